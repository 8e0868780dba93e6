"""KV cache blocks: references to them, and the order in which cached blocks are evicted. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence


class Block:
    """A block of the KV cache. Block 0 is never allocated, because padding points at it."""

    __slots__ = ("block_hash", "block_id", "next_free", "pinned", "prev_free", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.pinned = False  # not in the free list, even if no request uses it
        self.block_hash: bytes | None = None  # set while the block contains exactly the tokens of the hash
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, references={self.references})"


class FreeList:
    """The free blocks in the order of their allocation: a doubly linked list through the blocks."""

    def __init__(self) -> None:
        self._ends = Block(-1)  # a sentinel between the tail and the head
        self._ends.prev_free = self._ends.next_free = self._ends
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next_free
        while block is not None and block is not self._ends:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Add `block` at the end; it is allocated last."""
        self._insert(block, self._ends)

    def push(self, block: Block) -> None:
        """Add `block` at the front; it is allocated next."""
        head = self._ends.next_free
        assert head is not None  # noqa: S101 - the sentinel always has neighbors
        self._insert(block, head)

    def pop(self) -> Block:
        block = self._ends.next_free
        if block is None or block is self._ends:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free list")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._count -= 1

    def _insert(self, block: Block, after: Block) -> None:
        before = after.prev_free
        assert before is not None  # noqa: S101 - `after` is in the list
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self._count += 1


class BlockPool:
    """All blocks of one KV cache, with ids from 1 to `num_blocks`.

    A block that is released by its last user keeps its hash, and can be found by it until it is allocated again. A
    pinned block is not allocated until it is unpinned.

    Args:
        num_blocks: blocks that can be allocated.
        on_evict: called with a cached block's id and hash before its content is overwritten.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] = lambda *_: None) -> None:
        if num_blocks < 1:
            raise ValueError("a KV cache needs at least one block")
        self.num_blocks = num_blocks
        self.num_idle_pinned = 0  # pinned blocks that no request uses
        self._on_evict = on_evict
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._free = FreeList()
        self._by_hash: dict[bytes, Block] = {}
        for block in self._blocks[1:]:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Return the number of free blocks: not in use and not pinned. Cached blocks count, because they can be
        evicted."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Return the number of blocks that requests use."""
        return self.num_blocks - len(self._free) - self.num_idle_pinned

    def free_ids(self) -> list[int]:
        """Return the ids of the free blocks in the order of their allocation."""
        return [block.block_id for block in self._free]

    def references(self, block_id: int) -> int:
        return self._blocks[block_id].references

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this hash, in use or free."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def is_idle(self, block_id: int) -> bool:
        """Return whether no request uses the block."""
        return self._blocks[block_id].references == 0

    def cached_keys(self) -> list[bytes]:
        """Return the hashes of all cached blocks. Any thread may call it, because a dictionary is copied atomically."""
        return list(self._by_hash)

    def list_cached(self) -> Iterator[tuple[bytes, bool]]:
        """Return the hashes of all cached blocks, and whether they are pinned."""
        return ((block_hash, block.pinned) for block_hash, block in self._by_hash.items())

    def take(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of the cached blocks `block_ids`."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.references == 0:
                if block.pinned:
                    self.num_idle_pinned -= 1
                else:
                    self._free.remove(block)
            block.references += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks without content. Cached blocks among them are evicted.

        Raises:
            IndexError: fewer than `count` blocks are free; nothing has changed.
        """
        if count > len(self._free):
            raise IndexError(f"{count} blocks requested, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            if block.block_hash is not None:
                self._on_evict(block.block_id, block.block_hash)
                self._forget(block)
            block.references = 1
        return [block.block_id for block in blocks]

    def pin(self, block_id: int) -> None:
        """Pin a cached block: its content stays even if no request uses it."""
        block = self._blocks[block_id]
        if block.pinned:
            return
        block.pinned = True
        if block.references == 0:
            self._free.remove(block)
            self.num_idle_pinned += 1

    def unpin(self, block_id: int) -> None:
        """Unpin a block, so that it can be evicted when it is free."""
        block = self._blocks[block_id]
        if not block.pinned:
            return
        block.pinned = False
        if block.references == 0:
            self.num_idle_pinned -= 1
            self._free.append(block)

    def evict_pinned(self, block_id: int) -> None:
        """Evict a pinned block that no request uses. It is allocated next."""
        block = self._blocks[block_id]
        if not block.pinned or block.references or block.block_hash is None:
            raise ValueError(f"{block} is not an idle pinned block")
        self._on_evict(block_id, block.block_hash)
        self._forget(block)
        block.pinned = False
        self.num_idle_pinned -= 1
        self._free.push(block)

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Make a block available by `block_hash`. Return False, without a change, if another block has this hash."""
        if block_hash in self._by_hash:
            return False
        block = self._blocks[block_id]
        self._forget(block)
        block.block_hash = block_hash
        self._by_hash[block_hash] = block
        return True

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a request's blocks, given in the order of its tokens.

        The last blocks are evicted first, because they are useless without the blocks before them. Blocks without a
        hash are allocated next.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.references -= 1
            if block.references:
                continue
            if block.pinned:
                self.num_idle_pinned += 1
            elif block.block_hash is None:
                self._free.push(block)
            else:
                self._free.append(block)

    def reset(self) -> bool:
        """Evict all cached content, pinned or not, and return True. Return False, without a change, while a block is in
        use."""
        if self.num_held:
            return False
        for block in self._blocks:
            self.unpin(block.block_id)
            self._forget(block)
        return True

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Check counts, lists and hashes against the block lists of all users.

        Raises:
            RuntimeError: an invariant is violated.
        """
        held = [0] * (self.num_blocks + 1)
        for block_ids in holders:
            for block_id in block_ids:
                held[block_id] += 1
        free = self.free_ids()
        _require(held[0] == 0, "block 0 is in use")
        _require(len(free) == len(set(free)) == self.num_free, "the free list has duplicates or a wrong length")
        for block in self._blocks[1:]:
            _require(block.references == held[block.block_id], f"{block} has {held[block.block_id]} users")
        idle = [b for b in self._blocks[1:] if not b.references]
        _require(set(free) == {b.block_id for b in idle if not b.pinned}, "the free list is wrong")
        _require(self.num_idle_pinned == sum(b.pinned for b in idle), "the idle pinned blocks are miscounted")
        _require(all(b.block_hash is not None for b in self._blocks if b.pinned), "a pinned block has no hash")
        for block_hash, block in self._by_hash.items():
            _require(block.block_hash == block_hash, f"{block} is indexed by a hash that it does not have")
        hashed = sum(block.block_hash is not None for block in self._blocks)
        _require(hashed == len(self._by_hash), "a block's hash is not in the index")

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"KV cache integrity: {message}")
