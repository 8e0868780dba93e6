"""Block tables, and the prefix cache, which finds blocks by a chain of hashes. Does not import torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, NamedTuple

from inference_worker.engine.kv_cache.block_pool import BlockPool
from inference_worker.engine.kv_cache.cpu_offload import KVOffloadCache
from inference_worker.engine.kv_cache.pins import Pins
from inference_worker.engine.kv_cache.prefix_history import PrefixHistory
from inference_worker.engine.kv_cache.prompt_accounting import PromptAccounting
from inference_worker.engine.scheduling.sequence import Sequence

HASH_BYTES = 32
HISTORY_PER_BLOCK = 4  # remembered hashes per block


def hash_block(parent: bytes | None, tokens: Items[int], salt: bytes) -> bytes:
    """Return the hash of a full block that follows the block `parent`. The salt enters only the hash of a first block.

    Without the salt, a tenant can neither find another tenant's blocks nor create blocks that the other would find.
    """
    key = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if parent is None else parent
    return hashlib.blake2b(array("I", tokens).tobytes(), key=key, digest_size=HASH_BYTES).digest()


class BlockOperation(NamedTuple):
    """A copy of a block before a step's forward pass. A step's operations run in the given order.

    "save" copies block `source` to CPU slot `target`. "restore" copies slot `source` to block `target`. "copy" copies a
    block
    to a block.
    """

    operation_type: Literal["save", "restore", "copy"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached part of a request's tokens."""

    block_ids: list[int | None]  # usable now, without the last token, which is always computed; None: in CPU
    # memory
    num_cached_tokens: int  # tokens whose blocks are cached, including the last block of a complete hit
    pending: bool  # another request computes the next block: wait for it


_NOTHING = PrefixHit([], 0, False)
_WAIT = PrefixHit([], 0, True)


class KVCacheManager:
    """The block tables of sequences. Blocks become available for reuse when the step that filled them has succeeded.

    Args:
        num_blocks: blocks of the device.
        block_size: tokens per block.
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
        prefix_cache: bool = True,
        num_host_blocks: int = 0,
        pin_share: float = 0.5,
        tenant_pin_share: float = 0.25,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks, self._save)
        self.pins = Pins(int(num_blocks * pin_share), int(num_blocks * tenant_pin_share))
        self.host = KVOffloadCache(num_host_blocks, self.pins.__contains__)
        self.restores = True  # whether restores are worth their time; the engine measures them
        self._history = PrefixHistory(HISTORY_PER_BLOCK * (num_blocks + num_host_blocks))
        self._accounting = PromptAccounting(block_size, self.pool, self.pins, self._history)
        self._operations: list[BlockOperation] = []
        self._pending: dict[bytes, Sequence] = {}  # hashes of blocks -> the sequence that computes them
        self._pending_of: dict[Sequence, list[bytes]] = {}

    @property
    def num_available(self) -> int:
        """Return the number of blocks that can be allocated: free blocks, and pinned blocks that no request uses."""
        return self.pool.num_free + self.pool.num_idle_pinned

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, seq: Sequence) -> PrefixHit:
        """Return the cached part of `seq`'s tokens. Changes only the sequence's hashes."""
        if not self._reads(seq):
            return _NOTHING
        if self._leads(seq) is not None:
            return _WAIT
        hashes = self._hashes(seq, len(seq.tokens) // self.block_size)
        found: list[int | None] = []
        for block_hash in hashes:
            block_id = self.pool.find(block_hash)
            if block_id is None and not (self.restores and block_hash in self.host):
                break
            found.append(block_id)
        last = (len(seq.tokens) - 1) // self.block_size
        seq.awaited = hashes[len(found)] if len(found) < last else None
        return PrefixHit(found[:last], len(found) * self.block_size, self._leads(seq) is not None)

    def _reads(self, seq: Sequence) -> bool:
        # The logits of cached tokens are not stored: a request for them computes its prompt.
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _leads(self, seq: Sequence) -> Sequence | None:
        """Return the sequence that computes the block `seq` waits for. A sequence does not wait for a lower class."""
        leader = None if seq.awaited is None else self._pending.get(seq.awaited)
        return None if leader is None or leader.rank > seq.rank else leader

    def shortage(self, seq: Sequence, hit: PrefixHit, spare: int) -> int:
        """Return how many blocks are missing to start `seq` with `spare` blocks left for running sequences.

        The number is negative if there are more than enough.
        """
        held = [block_id for block_id in hit.block_ids if block_id is not None]
        waking = sum(self.pool.is_idle(block_id) for block_id in held)
        needed = self.num_blocks_for(seq.num_tokens) - len(held)
        return needed + waking + spare - self.num_available

    def start(self, seq: Sequence, hit: PrefixHit, now: float = 0.0) -> None:
        """Assign the cached blocks of `hit` to `seq`, which has no blocks, and register the blocks that it will
        compute."""
        self._account(seq, hit, now)
        reused = len(hit.block_ids)
        # The cached blocks are referenced before the allocation, which could evict them otherwise.
        self.pool.take([block_id for block_id in hit.block_ids if block_id is not None])
        missing = [index for index, block_id in enumerate(hit.block_ids) if block_id is None]
        slots = [self.host.take(seq.block_hashes[index]) for index in missing]
        restored = dict(zip(missing, self._allocate(len(missing)), strict=True))
        self._operations += [BlockOperation("restore", s, b) for s, b in zip(slots, restored.values(), strict=True)]
        seq.block_ids = [restored[i] if block_id is None else block_id for i, block_id in enumerate(hit.block_ids)]
        seq.num_published = missing[0] if missing else reused
        seq.num_computed_tokens = reused * self.block_size
        if not self.prefix_cache:
            return
        own_hashes = [
            h for h in seq.block_hashes[seq.num_published :] if h not in self._pending and not self.pool.find(h)
        ]
        self._pending.update(dict.fromkeys(own_hashes, seq))
        self._pending_of[seq] = own_hashes

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the blocks of the prompt that `parent` has computed with `child`, which has no blocks.

        The prompt's last token is computed again for separate logits. A write to a shared block goes to a copy.
        """
        child.block_ids = parent.block_ids[: self.num_blocks_for(child.num_prompt_tokens)]
        self.pool.take(child.block_ids)
        child.num_computed_tokens = child.num_prompt_tokens - 1
        child.block_hashes = parent.block_hashes[: child.num_prompt_tokens // self.block_size]
        child.num_published = min(parent.num_published, child.num_prompt_tokens // self.block_size)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate blocks of `seq` for its tokens from `num_computed_tokens` to `num_tokens`.

        Return False, without a change, if there are too few blocks.
        """
        missing = max(0, self.num_blocks_for(num_tokens) - len(seq.block_ids))
        first = seq.num_computed_tokens // self.block_size
        shared = first < len(seq.block_ids) and self.pool.references(seq.block_ids[first]) > 1
        if not missing and not shared:
            return True
        if missing + shared > self.num_available:
            return False
        if shared:
            [copy] = self._allocate(1)
            self._operations.append(BlockOperation("copy", seq.block_ids[first], copy))
            self.pool.release([seq.block_ids[first]])
            seq.block_ids[first] = copy
        seq.block_ids += self._allocate(missing)
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks of `seq`'s first `num_tokens` tokens available for reuse, after their step has
        succeeded."""
        full = num_tokens // self.block_size
        if not self.prefix_cache or full <= seq.num_published:
            return
        hashes = self._hashes(seq, full)
        for index in range(seq.num_published, full):
            block_hash = hashes[index]
            if self.pool.publish(seq.block_ids[index], block_hash):
                self.host.drop(block_hash)
                start = index * self.block_size
                parent = hashes[index - 1] if index else None
                self._history.add(parent, block_hash, seq.tokens[start : start + self.block_size])
                if block_hash in self.pins:
                    self.pool.pin(seq.block_ids[index])
            if self._pending.get(block_hash) is seq:
                del self._pending[block_hash]
        seq.num_published = full

    def free(self, seq: Sequence) -> None:
        """Release all blocks of `seq`. Sequences that waited for its blocks may compute them."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_published = 0
        seq.num_computed_tokens = 0
        for block_hash in self._pending_of.pop(seq, ()):
            if self._pending.get(block_hash) is seq:
                del self._pending[block_hash]

    def withdraw_pins(self, seq: Sequence) -> None:
        """Remove a failed request's pins whose blocks were never computed."""
        for block_hash in seq.new_pins:
            if self.pool.find(block_hash) is None and block_hash not in self.host:
                self.pins.drop(block_hash)
        seq.new_pins.clear()

    def expire(self, now: float) -> None:
        """Remove expired pins. Called before each step."""
        for block_hash in self.pins.expire(now):
            block_id = self.pool.find(block_hash)
            if block_id is not None:
                self.pool.unpin(block_id)

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
        for block_hash, pinned in self.pool.cached():
            if pinned != (block_hash in self.pins) or block_hash in self.host:
                raise RuntimeError(
                    "KV cache integrity: a block's pin is wrong, or the block is on the device and in CPU memory"
                )
        for seq in holders:
            if seq.num_computed_tokens > len(seq.block_ids) * self.block_size:
                raise RuntimeError(f"KV cache integrity: {seq} has computed more tokens than its blocks contain")
            if len(seq.block_ids) > self.num_blocks_for(seq.num_tokens):
                raise RuntimeError(f"KV cache integrity: {seq} has more blocks than its tokens need")
        if not {*self._pending.values(), *self._pending_of} <= set(holders):
            raise RuntimeError("KV cache integrity: a block is awaited from a request that does not run")

    def _account(self, seq: Sequence, hit: PrefixHit, now: float) -> None:
        """Refresh the pins of the reused blocks. Account the prompt at its first start."""
        if self.prefix_cache:
            for block_hash in seq.block_hashes[: len(hit.block_ids)]:
                self.pins.refresh(block_hash, now)
        if seq.group.prompt_usage is None:
            hashes = self._hashes(seq, seq.num_prompt_tokens // self.block_size) if self.prefix_cache else []
            self._accounting.account(seq, hashes, hit.num_cached_tokens, reads_cache=self._reads(seq), now=now)

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            self._evict_pinned(count - self.pool.num_free)
        return self.pool.allocate(count)

    def _evict_pinned(self, count: int) -> None:
        """Move pinned blocks that no request uses to CPU memory: first those that expire first, and of a chain its end
        first."""
        idle = []
        for block_hash, pinned in self.pool.cached():
            block_id = self.pool.find(block_hash)
            if pinned and block_id is not None and self.pool.is_idle(block_id):
                pin = self.pins[block_hash]
                idle.append((pin.expires, -pin.index, block_id))
        for _, _, block_id in sorted(idle)[:count]:
            self.pool.evict_pinned(block_id)

    def _save(self, block_id: int, block_hash: bytes) -> None:
        if self.host.num_slots:
            slot = self.host.put(block_hash)
            if slot is not None:
                self._operations.append(BlockOperation("save", block_id, slot))

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        hashes = seq.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, seq.tokens[start : start + self.block_size], seq.request.cache_salt))
        return hashes
