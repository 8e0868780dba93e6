"""Block tables, and the prefix cache, which finds blocks by a chain of hashes. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inference_worker.contract.prefix_digest import HASH_BYTES, PrefixDigest, hash_block, make_digest
from inference_worker.engine.capacity.layer_groups import BlockDemand
from inference_worker.engine.kv_cache.block_pool import BlockPool
from inference_worker.engine.kv_cache.cpu_offload import KVOffloadCache
from inference_worker.engine.kv_cache.pins import Pins
from inference_worker.engine.kv_cache.prefix_history import PrefixHistory
from inference_worker.engine.kv_cache.prompt_accounting import PromptAccounting
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import BlockOperation

HISTORY_PER_BLOCK = 4  # remembered hashes per block
IN_CPU_MEMORY = -1  # in place of a block's id


def cache_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a group's block in the pool and in CPU memory. It begins with the hash of the tokens."""
    return block_hash + bytes((group,)) if group else block_hash


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached part of a request's tokens.

    tables: the usable blocks of each group, without the block of the last token, which is always computed. 0: behind
        the group's window; IN_CPU_MEMORY: to be restored.
    num_cached_tokens: tokens whose blocks are cached, including the last block of a complete hit.
    pending: another request computes the next block: wait for it.
    """

    tables: list[list[int]]
    num_cached_tokens: int
    pending: bool

    @property
    def num_blocks(self) -> int:
        """Return the number of usable blocks in each group, with those behind a window."""
        return len(self.tables[0])

    @property
    def block_ids(self) -> list[int]:
        """Return the usable blocks on the device, of all groups."""
        return [block_id for table in self.tables for block_id in table if block_id > 0]


class KVCacheManager:
    """The block tables of sequences. Blocks become available for reuse when the step that filled them has succeeded.

    Each group of layers has its own block table. In a group with a window, the blocks behind it are released early.

    Args:
        num_blocks: blocks of the device.
        block_size: tokens per block.
        windows: of each group of layers, those without a window (0) first.
        tokens_in_flight: maximum new tokens of a sequence in steps that have not ended; only windows need it.
        prefix_cache: whether blocks are reused.
        num_host_blocks: blocks of the KV offload in CPU memory.
        pin_share: maximum share of the blocks that all pins may take. Running requests still have precedence over pins.
        tenant_pin_share: maximum share of the blocks for one tenant's pins.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[int, ...] = (0,),
        tokens_in_flight: int = 0,
        prefix_cache: bool = True,
        num_host_blocks: int = 0,
        pin_share: float = 0.5,
        tenant_pin_share: float = 0.25,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.demand = BlockDemand(block_size, windows, tokens_in_flight)
        self.num_groups = len(windows)
        self.pool = BlockPool(num_blocks, self._save)
        num_pinnable = num_blocks // self.num_groups  # a pin pins a block in each group
        self.pins = Pins(int(num_pinnable * pin_share), int(num_pinnable * tenant_pin_share))
        self.host = KVOffloadCache(num_host_blocks, lambda key: key[:HASH_BYTES] in self.pins)
        self.restores = True  # whether restores are worth their time; the engine measures them
        self._history = PrefixHistory(HISTORY_PER_BLOCK * (num_blocks + num_host_blocks))
        self._accounting = PromptAccounting(block_size, self._pin_blocks, self.pins, self._history)
        self._window_groups = [(group, window) for group, window in enumerate(windows) if window]
        # The blocks before a block boundary that the next token attends to.
        self._blocks_in_windows = max(1, -(-(max(windows) - 1) // block_size))
        self._operations: list[BlockOperation] = []
        self._pending: dict[bytes, Sequence] = {}  # hashes of blocks -> the sequence that computes them
        self._pending_of: dict[Sequence, list[bytes]] = {}

    @property
    def num_available(self) -> int:
        """Return the number of blocks that can be allocated: free blocks, and pinned blocks that no request uses."""
        return self.pool.num_free + self.pool.num_idle_pinned

    def prefix_digest(self) -> PrefixDigest | None:
        """Return the digest of the cached blocks on the device; None without a prefix cache. Any thread may call it."""
        if not self.prefix_cache:
            return None
        return make_digest(self.block_size, [key for key in self.pool.cached_keys() if len(key) == HASH_BYTES])

    def lookup(self, seq: Sequence) -> PrefixHit:
        """Return the cached part of `seq`'s tokens. Changes only the sequence's hashes."""
        if not self._reads(seq):
            return self._no_hit(pending=False)
        if self._leads(seq) is not None:
            return self._no_hit(pending=True)
        hashes = self._hashes(seq, len(seq.tokens) // self.block_size)
        tables = self._find_prefix(hashes)
        found = len(tables[-1]) if tables else len(hashes)
        last = (len(seq.tokens) - 1) // self.block_size
        tables = [table[: min(found, last)] for table in tables]
        if self._window_groups:
            tables = self._find_in_windows(hashes, tables, min(found, last))
            usable = len(tables[-1])
            is_complete = usable == last < found and all(self._find(hashes[last], g) for g, _ in self._window_groups)
            found = usable + is_complete
        seq.awaited = hashes[found] if found < last else None
        return PrefixHit(tables, found * self.block_size, self._leads(seq) is not None)

    def _no_hit(self, *, pending: bool) -> PrefixHit:
        return PrefixHit([[] for _ in range(self.num_groups)], 0, pending)

    def _find_prefix(self, hashes: list[bytes]) -> list[list[int]]:
        """Return the leading cached blocks of each group without a window. The last table is the shortest."""
        tables: list[list[int]] = []
        for group in range(self.num_groups - len(self._window_groups)):
            keys = [cache_key(h, group) for h in hashes[: len(tables[-1])]] if group else hashes
            table: list[int] = []
            for key in keys:
                block_id = self.pool.find(key)
                if block_id is None:
                    if not (self.restores and key in self.host):
                        break
                    block_id = IN_CPU_MEMORY
                table.append(block_id)
            tables.append(table)
        return tables

    def _find_in_windows(self, hashes: list[bytes], tables: list[list[int]], limit: int) -> list[list[int]]:
        """Return the tables of all groups for the longest usable prefix of at most `limit` blocks.

        A prefix is usable if all groups with a window have its last blocks, as far as the next token attends to them.
        """
        usable, run = 0, list[list[int]]()  # the blocks of each place, from the last place
        for index in range(limit - 1, -1, -1):
            block_ids = [self._find(hashes[index], group) for group, _ in self._window_groups]
            if not all(block_ids):
                run.clear()
                continue
            run.append(block_ids)
            if len(run) == self._blocks_in_windows:
                usable = index
                break
        usable += len(run)
        behind = [0] * (usable - len(run))
        found = zip(*reversed(run), strict=True) if run else ((),) * len(self._window_groups)
        tables = [table[:usable] for table in tables]
        for (_, window), cached in zip(self._window_groups, found, strict=True):
            table = [*behind, *cached]
            released = max(0, usable * self.block_size - window) // self.block_size  # as in `publish`
            table[:released] = [0] * released
            tables.append(table)
        return tables

    def _find(self, block_hash: bytes, group: int) -> int:
        """Return the block of a group with this hash, IN_CPU_MEMORY, or 0 if it is not cached."""
        key = cache_key(block_hash, group)
        block_id = self.pool.find(key)
        if block_id is None:
            return IN_CPU_MEMORY if self.restores and key in self.host else 0
        return block_id

    def _reads(self, seq: Sequence) -> bool:
        # The logits of cached tokens are not stored: a request for them computes its prompt.
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _leads(self, seq: Sequence) -> Sequence | None:
        """Return the sequence that computes the block `seq` waits for. A sequence does not wait for a lower class."""
        leader = None if seq.awaited is None else self._pending.get(seq.awaited)
        return None if leader is None or leader.rank > seq.rank else leader

    def shortage(self, seq: Sequence, hit: PrefixHit, spare: int) -> int:
        """Return how many blocks are missing to start `seq`, with blocks left for `spare` running sequences.

        The number is negative if there are more than enough.
        """
        block_ids = hit.block_ids
        waking = sum(self.pool.is_idle(block_id) for block_id in block_ids)
        needed = self.demand.blocks_for(seq.num_tokens) - len(block_ids)
        return needed + waking + spare * self.num_groups - self.num_available

    def fork_shortage(self, spare: int) -> int:
        """Return how many blocks are missing to fork a sequence, with blocks left for `spare` running sequences."""
        return (1 + spare) * self.num_groups - self.num_available

    def start(self, seq: Sequence, hit: PrefixHit, now: float = 0.0) -> None:
        """Assign the cached blocks of `hit` to `seq`, which has no blocks, and register the blocks that it will
        compute."""
        self._account(seq, hit, now)
        # The cached blocks are referenced before the allocation, which could evict them otherwise.
        self.pool.take(hit.block_ids)
        seq.block_tables = [list(table) for table in hit.tables]
        seq.num_released = [table.count(0) for table in hit.tables]
        seq.num_published = hit.num_blocks
        seq.num_computed_tokens = hit.num_blocks * self.block_size
        self._restore(seq)
        if not self.prefix_cache:
            return
        own_hashes = [
            h for h in seq.block_hashes[seq.num_published :] if h not in self._pending and not self._is_cached(h)
        ]
        self._pending.update(dict.fromkeys(own_hashes, seq))
        self._pending_of[seq] = own_hashes

    def _restore(self, seq: Sequence) -> None:
        """Allocate the blocks of `seq` that are in CPU memory, and restore them before the next step."""
        missing = [
            (index, group)
            for group, table in enumerate(seq.block_tables)
            for index, block_id in enumerate(table)
            if block_id == IN_CPU_MEMORY
        ]
        if not missing:
            return
        slots = [self.host.take(cache_key(seq.block_hashes[index], group)) for index, group in missing]
        for (index, group), slot, block_id in zip(missing, slots, self._allocate(len(missing)), strict=True):
            self._operations.append(BlockOperation("restore", slot, block_id))
            seq.block_tables[group][index] = block_id
        seq.num_published = min(index for index, _ in missing)

    def _is_cached(self, block_hash: bytes) -> bool:
        """Return whether all groups have the block on the device."""
        return all(self.pool.find(cache_key(block_hash, group)) for group in range(self.num_groups))

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Return whether `parent`, which has computed the prompt, still has the blocks that `child` needs."""
        computed = child.num_prompt_tokens - 1
        return all(
            parent.num_released[group] * self.block_size <= max(0, computed - window + 1)
            for group, window in self._window_groups
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the blocks of the prompt that `parent` has computed with `child`, which has no blocks.

        The prompt's last token is computed again for separate logits. A write to a shared block goes to a copy.
        """
        count = self.demand.blocks_per_group(child.num_prompt_tokens)
        child.block_tables = [table[:count] for table in parent.block_tables]
        child.num_released = list(parent.num_released)
        self.pool.take(child.block_ids)
        child.num_computed_tokens = child.num_prompt_tokens - 1
        child.block_hashes = parent.block_hashes[: child.num_prompt_tokens // self.block_size]
        child.num_published = min(parent.num_published, child.num_prompt_tokens // self.block_size)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate blocks of `seq` for its tokens from `num_computed_tokens` to `num_tokens`.

        Return False, without a change, if there are too few blocks.
        """
        tables = seq.block_tables
        missing = max(0, self.demand.blocks_per_group(num_tokens) - len(tables[0]))
        first = seq.num_computed_tokens // self.block_size
        shared: list[list[int]] = []
        if first < len(tables[0]):
            shared = [table for table in tables if self.pool.references(table[first]) > 1]
        if not missing and not shared:
            return True
        if missing * self.num_groups + len(shared) > self.num_available:
            return False
        for table in shared:
            [copy] = self._allocate(1)
            self._operations.append(BlockOperation("copy", table[first], copy))
            self.pool.release([table[first]])
            table[first] = copy
        for table in tables:
            table += self._allocate(missing)
        return True

    def room_for_drafts(self, seq: Sequence, spare: int) -> int:
        """Return how many tokens after the computed ones fit into the blocks of `seq` and one more in each group, with
        blocks left for `spare` running sequences."""
        own = len(seq.block_tables[0]) * self.block_size - seq.num_computed_tokens
        return own + self.block_size * (self.num_available >= (1 + spare) * self.num_groups)

    def shrink(self, seq: Sequence, num_tokens: int) -> None:
        """Release the blocks of `seq` after those of its first `num_tokens` tokens. They were not published."""
        count = self.demand.blocks_per_group(num_tokens)
        for table in seq.block_tables:
            self.pool.release(table[count:])
            del table[count:]

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks of `seq`'s first `num_tokens` tokens available for reuse, after their step has
        succeeded. Release the blocks behind a window."""
        full = num_tokens // self.block_size
        if self.prefix_cache and full > seq.num_published:
            self._publish_blocks(seq, full)
        for group, window in self._window_groups:
            # The token before the next one may be computed again, for a fork.
            first, end = seq.num_released[group], max(0, num_tokens - window) // self.block_size
            if end > first:
                table = seq.block_tables[group]
                self.pool.release(table[first:end])
                table[first:end] = [0] * (end - first)
                seq.num_released[group] = end

    def _publish_blocks(self, seq: Sequence, full: int) -> None:
        hashes = self._hashes(seq, full)
        for index in range(seq.num_published, full):
            block_hash = hashes[index]
            is_new = False
            for group, table in enumerate(seq.block_tables):
                key = cache_key(block_hash, group)
                if table[index] and self.pool.publish(table[index], key):
                    is_new = True
                    self.host.drop(key)
                    if block_hash in self.pins:
                        self.pool.pin(table[index])
            if is_new:
                start = index * self.block_size
                parent = hashes[index - 1] if index else None
                self._history.add(parent, block_hash, seq.tokens[start : start + self.block_size])
            if self._pending.get(block_hash) is seq:
                del self._pending[block_hash]
        seq.num_published = full

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`. Sequences that waited for its blocks may compute them."""
        for table, num_released in zip(seq.block_tables, seq.num_released, strict=True):
            self.pool.release(table[num_released:])
        seq.block_tables = []
        seq.num_released = []
        seq.num_published = 0
        seq.num_computed_tokens = 0
        for block_hash in self._pending_of.pop(seq, ()):
            if self._pending.get(block_hash) is seq:
                del self._pending[block_hash]

    def withdraw_pins(self, seq: Sequence) -> None:
        """Remove a failed request's pins whose blocks were never computed."""
        for block_hash in seq.new_pins:
            keys = [cache_key(block_hash, group) for group in range(self.num_groups)]
            if not any(self.pool.find(key) or key in self.host for key in keys):
                self.pins.drop(block_hash)
        seq.new_pins.clear()

    def expire(self, now: float) -> None:
        """Remove expired pins. Called before each step."""
        for block_hash in self.pins.expire(now):
            for block_id in self._blocks_of(block_hash):
                self.pool.unpin(block_id)

    def _blocks_of(self, block_hash: bytes) -> list[int]:
        """Return the blocks on the device with this hash, of all groups."""
        found = (self.pool.find(cache_key(block_hash, group)) for group in range(self.num_groups))
        return [block_id for block_id in found if block_id is not None]

    def _pin_blocks(self, block_hash: bytes) -> None:
        for block_id in self._blocks_of(block_hash):
            self.pool.pin(block_id)

    def take_operations(self) -> list[BlockOperation]:
        """Return the copies to run before the next step."""
        operations, self._operations = self._operations, []
        self.host.end_step()
        return operations

    def operations_failed(self, operations: Iterable[BlockOperation]) -> None:
        """Discard the saves of a failed step."""
        slots = {operation.target for operation in operations if operation.operation_type == "save"}
        self.host.drop_slots(slots)

    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes on the device and in CPU memory, and return True. Return False while requests use
        blocks.

        Pins stay, because tenants have paid for them: their prompts are billed as cache reads when they are sent again.
        """
        if not self.pool.reset():
            return False
        self.host.clear()
        self._history.clear()
        return True

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Check all accounting. `running` are all sequences that may have blocks.

        Raises:
            RuntimeError: an invariant is violated.
        """
        holders = list(running)
        self.pool.check_integrity([seq.block_ids for seq in holders])
        self.host.check_integrity()
        self.pins.check_integrity()
        for key, pinned in self.pool.list_cached():
            if pinned != (key[:HASH_BYTES] in self.pins) or key in self.host:
                raise RuntimeError(
                    "KV cache integrity: a block's pin is wrong, or the block is on the device and in CPU memory"
                )
        for seq in holders:
            self._check_tables(seq)
        if not {*self._pending.values(), *self._pending_of} <= set(holders):
            raise RuntimeError("KV cache integrity: a block is awaited from a request that does not run")

    def _check_tables(self, seq: Sequence) -> None:
        lengths = {len(table) for table in seq.block_tables}
        if len(seq.block_tables) != self.num_groups or len(lengths) != 1:
            raise RuntimeError(f"KV cache integrity: {seq} has block tables of different lengths, or too few")
        [length] = lengths
        if seq.num_computed_tokens > length * self.block_size:
            raise RuntimeError(f"KV cache integrity: {seq} has computed more tokens than its blocks contain")
        if length > self.demand.blocks_per_group(seq.num_tokens):
            raise RuntimeError(f"KV cache integrity: {seq} has more blocks than its tokens need")
        for table, num_released, window in zip(seq.block_tables, seq.num_released, self.demand.windows, strict=True):
            if any(table[:num_released]) or not all(table[num_released:]):
                raise RuntimeError(f"KV cache integrity: {seq} has a released block, or lacks another one")
            attended = max(0, seq.num_computed_tokens - window + 1) if window else 0
            if num_released * self.block_size > attended:
                raise RuntimeError(f"KV cache integrity: {seq} has released blocks in its window")
            if window and length - num_released > self.demand.max_window_blocks(window):
                raise RuntimeError(f"KV cache integrity: {seq} has too many blocks behind its window")

    def _account(self, seq: Sequence, hit: PrefixHit, now: float) -> None:
        """Refresh the pins of the reused blocks. Account the prompt at its first start."""
        if self.prefix_cache:
            for block_hash in seq.block_hashes[: hit.num_blocks]:
                self.pins.refresh(block_hash, now)
        if seq.group.prompt_usage is None:
            hashes = self._hashes(seq, seq.num_prompt_tokens // self.block_size) if self.prefix_cache else []
            host_tokens = self.block_size * sum(IN_CPU_MEMORY in blocks for blocks in zip(*hit.tables, strict=True))
            self._accounting.account(
                seq, hashes, hit.num_cached_tokens, host_tokens, reads_cache=self._reads(seq), now=now
            )

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            self._evict_pinned(count - self.pool.num_free)
        return self.pool.allocate(count)

    def _evict_pinned(self, count: int) -> None:
        """Move pinned blocks that no request uses to CPU memory: first those that expire first, and of a chain its end
        first."""
        idle = []
        for key, pinned in self.pool.list_cached():
            block_id = self.pool.find(key)
            if pinned and block_id is not None and self.pool.is_idle(block_id):
                pin = self.pins[key[:HASH_BYTES]]
                idle.append((pin.expires, -pin.index, block_id))
        for _, _, block_id in sorted(idle)[:count]:
            self.pool.evict_pinned(block_id)

    def _save(self, block_id: int, key: bytes) -> None:
        if self.host.num_slots:
            slot = self.host.put(key)
            if slot is not None:
                self._operations.append(BlockOperation("save", block_id, slot))

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        hashes = seq.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, seq.tokens[start : start + self.block_size], seq.request.cache_salt))
        return hashes
