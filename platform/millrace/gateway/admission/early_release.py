"""Early release: the unused part of a reservation goes back to its budgets before its usage event is settled.

While budgets have room, the unused parts of ended executions stay in memory: the settlement releases them within a
second. Once a budget is contended, the gateway releases the parts of ended executions in PostgreSQL, and each further
part before the last byte of its response is sent. PostgreSQL records every part that was released, so the settlement
releases only the rest (migration 0014 of billing; docs/holds.md). A part that is lost with its gateway is released by
the settlement.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from billing.budgets.budget_leases import BudgetLeaseStore, UnusedPart
from billing.pricing.pricing import Rater, UnknownPriceError, nano
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import TokenUsage
from millrace.gateway.admission.admission import AdmissionGrant

log = structlog.get_logger(__name__)

CONTENDED_SECONDS = 10.0
RELEASE_SECONDS = 0.25  # how long the last byte of a response waits for the release at most
KEPT_SECONDS = 10.0  # the settlement takes less than a second, unless the settler is down
MAX_KEPT = 10_000
MAX_RATERS = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNREACHABLE = (psycopg.Error, PoolTimeout, TimeoutError, OSError)


class _Ended(NamedTuple):
    billing_context: BillingContext
    terms: AdmissionGrant
    usage: TokenUsage
    ended_at: float  # monotonic


class EarlyReleases:
    """The unused parts of one gateway's ended executions, as far as they may not be released yet."""

    def __init__(self, store: BudgetLeaseStore) -> None:
        self._store = store
        self._ended: OrderedDict[tuple[str, int], _Ended] = OrderedDict()
        self._contended: dict[int, float] = {}  # window -> monotonic time until which parts are released immediately
        self._raters: dict[int, Rater] = {}  # by version of the price sheet
        self._lock = asyncio.Lock()
        self._releasing: set[asyncio.Task[bool]] = set()

    def contend(self, windows: Iterable[int]) -> None:
        """Release the parts of these windows immediately from now on, for some seconds."""
        now = time.monotonic()
        self._contended = {window: until for window, until in self._contended.items() if until > now}
        self._contended.update((window, now + CONTENDED_SECONDS) for window in windows)

    async def end(self, billing_context: BillingContext, terms: AdmissionGrant, usage: TokenUsage) -> None:
        """Keep the unused part of an execution that ended with this usage; release it if a budget is contended."""
        if billing_context.slice_id is None:
            return
        now = time.monotonic()
        self._ended[billing_context.request_id, billing_context.execution] = _Ended(billing_context, terms, usage, now)
        while next(iter(self._ended.values())).ended_at < now - KEPT_SECONDS or len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)
        if any(self._contended.get(window, 0.0) > now for window in terms.windows):
            releasing = asyncio.create_task(self.release(terms.windows))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.wait([releasing], timeout=RELEASE_SECONDS)

    async def release(self, windows: Collection[int]) -> bool:
        """Release all parts that belong to these windows. True: some were released, here or meanwhile."""
        waited = self._lock.locked()
        async with self._lock:
            wanted = set(windows)
            ended = {
                execution: each for execution, each in self._ended.items() if not wanted.isdisjoint(each.terms.windows)
            }
            parts = [part for each in ended.values() if (part := self._unused_part(each)) is not None]
            try:
                if parts:
                    await self._store.release_unused(parts)
            except _UNREACHABLE as exc:
                log.warning("early_release_failed", executions=len(parts), error=str(exc) or type(exc).__name__)
                if not isinstance(exc, psycopg.IntegrityError):
                    return waited
            for execution in ended:
                self._ended.pop(execution, None)
            return waited or bool(parts)

    def _unused_part(self, ended: _Ended) -> UnusedPart | None:
        """Return what the execution leaves of its reservation. None: nothing that could be released."""
        billing_context, sheet, usage = ended.billing_context, ended.terms.sheet, ended.usage
        if billing_context.slice_id is None or billing_context.fence is None or sheet is None:
            return None
        rater = self._raters.get(sheet.version)
        if rater is None:
            if len(self._raters) >= MAX_RATERS:
                self._raters.clear()
            rater = self._raters[sheet.version] = Rater(sheet)
        inputs = (usage.uncached, usage.cache_read, usage.cache_write_5m, usage.cache_write_1h)
        try:
            kept = nano(rater.rate((*inputs, usage.output, 0, 0), billing_context.admitted_at).cost_femto)
        except UnknownPriceError:
            return None
        kept_tokens = sum(inputs) + usage.output
        money, tokens = (billing_context.hold or 0) - kept, (billing_context.hold_tokens or 0) - kept_tokens
        if min(money, tokens) < 0 or not (money or tokens):
            return None
        admitted_at = _EPOCH + timedelta(microseconds=billing_context.admitted_at)
        execution = billing_context.request_id, billing_context.execution
        return UnusedPart(
            billing_context.slice_id, billing_context.fence, admitted_at, *execution, money, tokens, kept, kept_tokens
        )
