"""Which blocks hold which tokens: block tables, and the prefix cache found by a chain of hashes. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from inference_worker.engine.block_pool import BlockPool
from inference_worker.engine.sequence import Sequence

HASH_BYTES = 32


def hash_block(parent: bytes | None, tokens: Items[int], salt: bytes) -> bytes:
    """The hash of a full block after the block `parent`. The salt roots the chain: it enters the first block only.

    Who does not know the salt can neither find another's blocks nor make blocks that another would find.
    """
    key = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if parent is None else parent
    return hashlib.blake2b(array("I", tokens).tobytes(), key=key, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache holds of a request's tokens."""

    block_ids: list[int]  # usable now: they end before the last token, which is always computed
    num_cached_tokens: int  # tokens whose blocks are cached, the last block of a whole hit counted
    pending: bool  # the next block is being computed by another request: wait for it


class KVCacheManager:
    """Gives blocks to sequences, and publishes them for reuse when the step that filled them has succeeded."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks)
        self._pending: dict[bytes, str] = {}  # hashes of blocks being computed -> the request that does
        self._pending_of: dict[str, list[bytes]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, seq: Sequence) -> PrefixHit:
        """What the cache holds of `seq`'s tokens. Changes nothing but the sequence's own hashes."""
        if not self.prefix_cache:
            return PrefixHit([], 0, False)
        if self._owner(seq) is not None:
            return PrefixHit([], 0, True)
        hashes = self._hashes(seq, seq.num_tokens // self.block_size)
        found: list[int] = []
        for block_hash in hashes:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        usable = found[: (seq.num_tokens - 1) // self.block_size]
        misses = len(found) < (seq.num_tokens - 1) // self.block_size
        seq.awaited = hashes[len(found)] if misses else None
        return PrefixHit(usable, len(found) * self.block_size, self._owner(seq) is not None)

    def _owner(self, seq: Sequence) -> str | None:
        """The request that is computing the block `seq` waits for. A waiting sequence computes none itself."""
        return None if seq.awaited is None else self._pending.get(seq.awaited)

    def can_start(self, seq: Sequence, hit: PrefixHit, spare: int) -> bool:
        """Whether all of the sequence's tokens find room, with `spare` blocks left over for those that run."""
        waking = sum(self.pool.is_free(block_id) for block_id in hit.block_ids)
        needed = self.num_blocks_for(seq.num_tokens) - len(hit.block_ids)
        return needed + waking + spare <= self.pool.num_free

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        """Give `seq`, which holds nothing, the cached blocks of `hit`, and say that it computes the rest."""
        self.pool.take(hit.block_ids)
        seq.block_ids = list(hit.block_ids)
        seq.num_published = len(hit.block_ids)
        seq.num_computed_tokens = len(hit.block_ids) * self.block_size
        if not self.prefix_cache:
            return
        mine = [h for h in seq.block_hashes[seq.num_published :] if h not in self._pending and not self.pool.find(h)]
        self._pending.update(dict.fromkeys(mine, seq.request_id))
        self._pending_of[seq.request_id] = mine

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens. False, with nothing changed, if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(seq.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        seq.block_ids += self.pool.allocate(missing)
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among `seq`'s first `num_tokens` tokens: their step has succeeded."""
        full = num_tokens // self.block_size
        if not self.prefix_cache or full <= seq.num_published:
            return
        hashes = self._hashes(seq, full)
        for index in range(seq.num_published, full):
            self.pool.publish(seq.block_ids[index], hashes[index])
            if self._pending.get(hashes[index]) == seq.request_id:
                del self._pending[hashes[index]]
        seq.num_published = full

    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`. Those who waited for what it computed may compute it themselves."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_published = 0
        seq.num_computed_tokens = 0
        for block_hash in self._pending_of.pop(seq.request_id, ()):
            if self._pending.get(block_hash) == seq.request_id:
                del self._pending[block_hash]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused, with False, while any request holds blocks."""
        return self.pool.reset()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Check all accounts, `running` being everyone who may hold blocks.

        Raises:
            RuntimeError: something is not as it must be.
        """
        holders = {seq.request_id: seq for seq in running}
        self.pool.check_integrity([seq.block_ids for seq in holders.values()])
        for seq in holders.values():
            if seq.num_computed_tokens > len(seq.block_ids) * self.block_size:
                raise RuntimeError(f"KV cache integrity: {seq} has computed more tokens than its blocks hold")
            if len(seq.block_ids) > self.num_blocks_for(seq.num_tokens):
                raise RuntimeError(f"KV cache integrity: {seq} holds more blocks than its tokens need")
        if not set(self._pending.values()) <= set(holders) or not set(self._pending_of) <= set(holders):
            raise RuntimeError("KV cache integrity: a block is awaited from a request that does not run")

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        hashes = seq.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, seq.tokens[start : start + self.block_size], seq.request.cache_salt))
        return hashes
