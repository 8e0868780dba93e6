"""KV cache blocks: who holds which, and which cached one is given up next. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence


class Block:
    """One block of the KV cache. Block 0 is never given out: padding points at it."""

    __slots__ = ("block_hash", "block_id", "next_free", "pinned", "prev_free", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.pinned = False  # stays out of the free list while nobody holds it
        self.block_hash: bytes | None = None  # set while the block holds exactly the tokens its hash stands for
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, references={self.references})"


class FreeList:
    """Free blocks in the order they will be given out: a doubly linked list through the blocks themselves."""

    def __init__(self) -> None:
        self._ends = Block(-1)  # a sentinel: its neighbors are the list's head and tail
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
        """Put `block` where it is given out last."""
        self._insert(block, self._ends)

    def push(self, block: Block) -> None:
        """Put `block` where it is given out next."""
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
    """All blocks of one KV cache, ids 1 to `num_blocks`.

    A block whose last holder lets go keeps its hash, and can be found by it until it is given out again. A pinned one
    is not given out until it is unpinned.

    Args:
        num_blocks: how many there are to give out.
        on_evict: called with a cached block's id and hash just before its content is given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] = lambda *_: None) -> None:
        if num_blocks < 1:
            raise ValueError("a KV cache needs at least one block")
        self.num_blocks = num_blocks
        self.num_idle_pinned = 0  # pinned blocks that nobody holds
        self._on_evict = on_evict
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._free = FreeList()
        self._by_hash: dict[bytes, Block] = {}
        for block in self._blocks[1:]:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds and nothing pins; those that are cached count, since they can be given up."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - len(self._free) - self.num_idle_pinned

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, next to be given out first."""
        return [block.block_id for block in self._free]

    def references(self, block_id: int) -> int:
        return self._blocks[block_id].references

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds what `block_hash` stands for, held or free."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def is_idle(self, block_id: int) -> bool:
        """Whether nobody holds the block."""
        return self._blocks[block_id].references == 0

    def cached(self) -> Iterator[tuple[bytes, bool]]:
        """Return the hashes of all cached blocks, and whether they are pinned."""
        return ((block_hash, block.pinned) for block_hash, block in self._by_hash.items())

    def take(self, block_ids: Sequence[int]) -> None:
        """Hold the cached blocks `block_ids` once more."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.references == 0:
                if block.pinned:
                    self.num_idle_pinned -= 1
                else:
                    self._free.remove(block)
            block.references += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks of no content. Cached ones among them are forgotten.

        Raises:
            IndexError: fewer than `count` are free; nothing has changed then.
        """
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            if block.block_hash is not None:
                self._on_evict(block.block_id, block.block_hash)
                self._forget(block)
            block.references = 1
        return [block.block_id for block in blocks]

    def pin(self, block_id: int) -> None:
        """Keep a cached block's content, also while nobody holds it."""
        block = self._blocks[block_id]
        if block.pinned:
            return
        block.pinned = True
        if block.references == 0:
            self._free.remove(block)
            self.num_idle_pinned += 1

    def unpin(self, block_id: int) -> None:
        """Let a pinned block go the way of the others."""
        block = self._blocks[block_id]
        if not block.pinned:
            return
        block.pinned = False
        if block.references == 0:
            self.num_idle_pinned -= 1
            self._free.append(block)

    def evict_pinned(self, block_id: int) -> None:
        """Give up a pinned block that nobody holds: it is the next to be given out."""
        block = self._blocks[block_id]
        if not block.pinned or block.references or block.block_hash is None:
            raise ValueError(f"{block} is no idle pinned block")
        self._on_evict(block_id, block.block_hash)
        self._forget(block)
        block.pinned = False
        self.num_idle_pinned -= 1
        self._free.push(block)

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Let a block be found by `block_hash`. False if another block has it already: then that one stays."""
        if block_hash in self._by_hash:
            return False
        block = self._blocks[block_id]
        self._forget(block)
        block.block_hash = block_hash
        self._by_hash[block_hash] = block
        return True

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of a request's blocks, given in the order of its tokens.

        Its tail goes first, so that of a chain the end is given up before what leads to it; a block without a hash
        is of no use to anyone and is the next to be given out.
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
        """Forget all cached content, pinned or not. Refused, with False, while any block is held."""
        if self.num_held:
            return False
        for block in self._blocks:
            self.unpin(block.block_id)
            self._forget(block)
        return True

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Check counts, lists and hashes against the block lists of everyone who holds blocks.

        Raises:
            RuntimeError: something is not as it must be.
        """
        held = [0] * (self.num_blocks + 1)
        for block_ids in holders:
            for block_id in block_ids:
                held[block_id] += 1
        free = self.free_ids()
        _require(held[0] == 0, "block 0 is held")
        _require(len(free) == len(set(free)) == self.num_free, "the free list repeats or miscounts")
        for block in self._blocks[1:]:
            _require(block.references == held[block.block_id], f"{block} is held {held[block.block_id]} times")
        idle = [b for b in self._blocks[1:] if not b.references]
        _require(set(free) == {b.block_id for b in idle if not b.pinned}, "the free list is wrong")
        _require(self.num_idle_pinned == sum(b.pinned for b in idle), "the idle pinned blocks are miscounted")
        _require(all(b.block_hash is not None for b in self._blocks if b.pinned), "a pinned block has no hash")
        for block_hash, block in self._by_hash.items():
            _require(block.block_hash == block_hash, f"{block} is found by a hash it does not have")
        hashed = sum(block.block_hash is not None for block in self._blocks)
        _require(hashed == len(self._by_hash), "a block's hash is not in the index")

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"KV cache integrity: {message}")
