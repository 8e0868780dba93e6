"""Billing of prompts: tokens by billing class, pins of cache breakpoints, and reasons of cache misses. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from inference_worker.contract.request import CacheReport, TokenCounts
from inference_worker.engine.kv_cache.pins import Pins
from inference_worker.engine.kv_cache.prefix_history import PrefixHistory
from inference_worker.engine.sequences.sequence import Sequence


class PromptAccounting:
    """The accounting of the prompts of one KV cache, whose pins and history it uses.

    Args:
        pin_blocks: pins the blocks of a hash that are on the device.
    """

    def __init__(
        self, block_size: int, pin_blocks: Callable[[bytes], None], pins: Pins, history: PrefixHistory
    ) -> None:
        self._block_size = block_size
        self._pin_blocks = pin_blocks
        self._pins = pins
        self._history = history

    def account(
        self,
        seq: Sequence,
        hashes: Items[bytes],
        num_cached_tokens: int,
        host_tokens: int,
        *,
        reads_cache: bool,
        now: float,
    ) -> None:
        """Determine the prompt's billing classes, and create or refresh its pins. Called once for each prompt.

        Args:
            hashes: the hashes of the prompt's full blocks; empty without a prefix cache.
            num_cached_tokens: the tokens whose blocks are cached on this replica.
            host_tokens: those whose blocks are restored from CPU memory.
            reads_cache: whether the request may use cached blocks.
        """
        size = self._block_size
        cached = min(num_cached_tokens // size, len(hashes))
        paid, report = seq.request.paid, CacheReport()
        if reads_cache:
            report = self._explain_miss(seq, hashes, cached)
            while cached < len(hashes) and (hashes[cached] in self._pins or hashes[cached] in paid):
                self._pins.refresh(hashes[cached], now)
                cached += 1  # paid for, and evicted here or cached on another replica
            seq.group.pins = {h: paid[h] for h in hashes[:cached] if h in paid} if paid else {}
        written = {300: 0, 3600: 0}
        unpinned = pinned = 0
        for point in seq.request.breakpoints:
            end = min(point.num_tokens // size, len(hashes))
            for index in range(pinned, end):
                is_pinned = self._pin(seq, hashes[index], point.seconds, index, now)
                if index >= cached and is_pinned:
                    written[point.seconds] += size
                unpinned += 0 if is_pinned else size
            pinned = max(pinned, end)
        read = cached * size
        uncached = seq.num_prompt_tokens - read - sum(written.values())
        seq.group.prompt_usage = TokenCounts(uncached, read, written[300], written[3600])
        seq.group.cache_report = CacheReport(report.miss, report.changed_at, unpinned, host_tokens)

    def _pin(self, seq: Sequence, block_hash: bytes, seconds: int, index: int, now: float) -> bool:
        """Pin a block of the prompt. Return False if a limit is reached and the block is not already paid for."""
        request, is_new = seq.request, block_hash not in self._pins
        paid = request.paid.get(block_hash, 0)
        if is_new and not paid and request.pin_room is not None and len(seq.new_pins) >= request.pin_room:
            return False
        seconds = max(seconds, paid)
        if self._pins.add(block_hash, request.tenant, seconds, index, now):
            seconds = self._pins[block_hash].seconds
            if is_new:
                self._pin_blocks(block_hash)
                if not paid:
                    seq.new_pins.append(block_hash)
        elif not paid:
            return False
        seq.group.pins[block_hash] = seconds
        return True

    def _explain_miss(self, seq: Sequence, hashes: Items[bytes], cached: int) -> CacheReport:
        if not hashes:
            return CacheReport("too_short")
        if cached == len(hashes):
            return CacheReport()
        if self._history.was_cached(hashes[cached]):
            return CacheReport("expired_or_evicted")
        if not cached:
            return CacheReport("first_use")
        start = cached * self._block_size
        same = self._history.leaves_at(hashes[cached - 1], seq.tokens[start : start + self._block_size])
        return CacheReport() if same is None else CacheReport("prefix_changed", start + same)
