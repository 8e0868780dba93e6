"""Early release: the unused part of a reservation is returned to its budgets before its usage event is settled.

While budgets have room, the unused parts of ended executions stay in memory, since the settlement releases them within
a second. When a budget is contended, the gateway releases these parts in PostgreSQL. It also releases each further part
before the last byte of its response is sent. PostgreSQL records every released part, so the settlement releases only
the rest (docs/explanation/budget-reservations.md). If a gateway fails, the settlement releases the parts that it had in
memory.
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

from billing.currencies.amounts import whole_units
from billing.rates.pricing import UnknownPriceError
from billing.reservations.budget_leases import BudgetLeaseStore, UnusedPart
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.admission import AdmittedRequest

log = structlog.get_logger(__name__)

CONTENDED_SECONDS = 10.0
RELEASE_SECONDS = 0.25  # the longest time that the last byte of a response waits for the release
MAX_AGE_SECONDS = 10.0  # the settlement takes less than a second while the settler runs
MAX_PARTS = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNREACHABLE = (psycopg.Error, PoolTimeout, TimeoutError, OSError)


class _Ended(NamedTuple):
    admitted: AdmittedRequest
    usage: TokenCounts
    ended_at: float  # monotonic


class EarlyReleases:
    """The unused parts of one gateway's ended executions that are not released yet."""

    def __init__(self, store: BudgetLeaseStore) -> None:
        self._store = store
        self._ended: OrderedDict[tuple[str, int], _Ended] = OrderedDict()
        self._contended: dict[int, float] = {}  # period ID -> monotonic time until which parts are released immediately
        self._lock = asyncio.Lock()
        self._releasing: set[asyncio.Task[bool]] = set()

    def contend(self, budget_periods: Iterable[int]) -> None:
        """Release the unused parts of these budget periods immediately for CONTENDED_SECONDS."""
        now = time.monotonic()
        self._contended = {budget_period: until for budget_period, until in self._contended.items() if until > now}
        self._contended.update((budget_period, now + CONTENDED_SECONDS) for budget_period in budget_periods)

    async def end(self, admitted: AdmittedRequest, usage: TokenCounts) -> None:
        """Store the unused part of an ended execution. Release it if a budget is contended."""
        if admitted.lease_id is None:
            return
        now = time.monotonic()
        self._ended[admitted.demand.request_id, admitted.demand.execution] = _Ended(admitted, usage, now)
        while next(iter(self._ended.values())).ended_at < now - MAX_AGE_SECONDS or len(self._ended) > MAX_PARTS:
            self._ended.popitem(last=False)
        if any(self._contended.get(budget_period, 0.0) > now for budget_period in admitted.budget_period_ids):
            releasing = asyncio.create_task(self.release(admitted.budget_period_ids))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.wait([releasing], timeout=RELEASE_SECONDS)

    async def release(self, budget_periods: Collection[int]) -> bool:
        """Release all parts of these budget periods. Return whether any were released, here or by a concurrent call."""
        waited = self._lock.locked()
        async with self._lock:
            period_ids = set(budget_periods)
            ended = {
                execution: ended_execution
                for execution, ended_execution in self._ended.items()
                if not period_ids.isdisjoint(ended_execution.admitted.budget_period_ids)
            }
            parts = [part for entry in ended.values() if (part := self._unused_part(entry)) is not None]
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
        """Return the unused part of the execution's reservation, or None if nothing can be released."""
        admitted, usage = ended.admitted, ended.usage
        demand = admitted.demand
        if admitted.lease_id is None or admitted.fencing_token is None or admitted.rate_card is None:
            return None
        try:
            cost = whole_units(admitted.rate(usage).cost_femto)
        except UnknownPriceError:
            return None
        money, tokens = (admitted.reserved_nano or 0) - cost, (admitted.reserved_tokens or 0) - usage.total
        if min(money, tokens) < 0 or not (money or tokens):
            return None
        return UnusedPart(
            admitted.lease_id,
            admitted.fencing_token,
            _EPOCH + timedelta(microseconds=demand.admitted_at),
            demand.request_id,
            demand.execution,
            money,
            tokens,
            cost,
            usage.total,
        )
