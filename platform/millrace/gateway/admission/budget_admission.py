"""May it cost that: prices pinned, holds taken from budget leases in memory, and in Postgres when a lease is spent.

All budget periods above a key are taken together or not at all, for the most expensive candidate. Before a rejection
the other gateways return what they have not admitted, within milliseconds (`REVOKE_LEASES_CHANNEL`). The lease of an
unresponsive gateway stays reserved until none of its requests can run any more. If only such a lease is missing, the
response is 503 with `retry-after` instead of 429.

The usage event of an execution releases its reservation when the settler settles it. While a budget is contended the
gateway releases the unused part before: see early_release.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from weakref import WeakValueDictionary

import msgspec
import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import PoolTimeout

from billing.budgets.budget_leases import (
    UNITS,
    BudgetChain,
    BudgetLeaseStore,
    InsufficientBudget,
    LocalBudgetLease,
    ReservedAmount,
)
from billing.pricing.pricing import PriceIndex, Tier, UnknownPriceError
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import ServiceClass, TokenUsage
from millrace.gateway.admission import rejections
from millrace.gateway.admission.admission import Admission, AdmissionGrant, AdmissionLease, AdmissionRequest
from millrace.gateway.admission.cost_estimate import CostEstimate
from millrace.gateway.admission.early_release import EarlyReleases
from millrace.gateway.auth.authentication import FRESH_SECONDS
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.limit_status import LimitStatus
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.outbox.change_feed import ChangeEvent

log = structlog.get_logger(__name__)

REVOKE_LEASES_CHANNEL = "millrace:revoke_leases"  # a channel in Valkey: the ids of budget periods that are short
REVOKE_LEASES_SECONDS = 0.19  # from the first asking to the refusal
ASK_AGAIN_SECONDS = 0.01
LEASE_ANSWER_SECONDS = 2.0  # a database that takes longer counts as unavailable
RECALLED_SECONDS = 5.0  # after a recall, when other gateways have released all they can
PRICES_SECONDS = 1.0
SWEEP_SECONDS = 0.5
TIERS = {
    ServiceClass.PRIORITY: Tier.PRIORITY,
    ServiceClass.DEFAULT: Tier.STANDARD,
    ServiceClass.FLEX: Tier.FLEX,
    ServiceClass.BATCH: Tier.BATCH,
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNREACHABLE = (psycopg.Error, PoolTimeout, TimeoutError, OSError)


class BudgetAdmission:
    """The prices, paths and leases of one gateway."""

    def __init__(self, store: BudgetLeaseStore, broker: redis.Redis, patient: redis.Redis) -> None:
        self._store = store
        self._broker = broker
        self._patient = patient
        self.prices = PriceIndex()
        self.early = EarlyReleases(store)
        self._polled_at = float("-inf")  # monotonic
        self._by_key: dict[int, BudgetChain] = {}  # key -> its path
        self._paths: dict[
            tuple[int, ...], BudgetChain
        ] = {}  # budget period ids -> the path: keys with the same budget periods share it
        self._unreturned: list[tuple[BudgetChain, LocalBudgetLease]] = []
        self._to_return = asyncio.Event()
        self._opening: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()  # by key: one look at a time
        self._changes = 0
        self._listening = False  # whether recalls reach this gateway
        self._tasks: list[asyncio.Task[None]] = []
        self._leasing: set[asyncio.Task[LocalBudgetLease | list[InsufficientBudget]]] = set()
        self._given_up: dict[
            asyncio.Task[LocalBudgetLease | list[InsufficientBudget]], BudgetChain
        ] = {}  # those nobody waits for any more

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(each) for each in (self._keep_prices(), self._sweep(), self._listen())]

    async def stop(self) -> None:
        """Return all leases. From now on only other gateways admit requests."""
        await cancel_and_wait(self._tasks)
        await asyncio.gather(*self._leasing, return_exceptions=True)
        self._seal(list(self._paths.values()))
        await self._return_all()

    def drop(self, changes: Collection[ChangeEvent]) -> None:
        """Budgets may have changed for these keys or tenants: what was leased by the old ones goes back."""
        self._changes += 1
        tenants = {change.tenant_id for change in changes}
        self._by_key = {key: path for key, path in self._by_key.items() if path.tenant_id not in tenants}
        self._seal([path for path in self._paths.values() if path.tenant_id in tenants])

    def polled(self, at: float) -> None:
        """Remember that all changes up to the monotonic time `at` were read and applied."""
        self._polled_at = at

    def forget(self) -> None:
        """Clear the caches, since changes may have been missed."""
        self._changes += 1
        self._by_key.clear()
        self._seal(list(self._paths.values()))

    def bill(self, demand: AdmissionRequest, *, all_billed: bool = False) -> CostEstimate:
        """Pin the price.

        Args:
            all_billed: every candidate runs and is billed; else one of them is.

        Raises:
            ApiError: 503, a price that is needed is missing. It is never free.
        """
        find, tenant, at = self.prices.find, demand.key.tenant_id, demand.admitted_at
        rate_cards = [
            find(tenant, candidate.model.name, TIERS[demand.service_class], at) for candidate in demand.candidates
        ]
        needed = rate_cards if all_billed else rate_cards[:1]
        if None in needed:
            raise rejections.unpriced(demand.candidates[needed.index(None)].model.name)
        return CostEstimate(
            demand, tuple(rate_card for rate_card in rate_cards if rate_card is not None), all_billed=all_billed
        )

    async def take(self, bill: CostEstimate, max_tokens: int) -> AdmissionGrant:
        """Hold what the request may cost.

        Raises:
            ApiError: 429, a budget does not allow it; 503, it cannot be known, or what is in the way may come back.
        """
        demand = bill.demand
        try:
            amount = bill.amount(max_tokens)
        except UnknownPriceError:
            raise rejections.unpriced(demand.candidates[0].model.name) from None
        path = self._known(demand)
        if path is None:
            async with self._opening.setdefault(demand.key.key_id, asyncio.Lock()):
                path = self._known(demand) or await self._open(demand)
        if not path.budget_periods:
            return self._terms(bill, max_tokens, amount, None, ())
        lease = path.lease
        if lease is None or not lease.take(amount, time.monotonic()):
            lease, max_tokens, amount = await self._take_slowly(bill, path, max_tokens, amount)
        return self._terms(bill, max_tokens, amount, lease, path.ids)

    def _terms(
        self,
        bill: CostEstimate,
        max_tokens: int,
        amount: ReservedAmount,
        lease: LocalBudgetLease | None,
        budget_periods: Sequence[int],
    ) -> AdmissionGrant:
        rate_card = bill.rate_cards[0]
        if lease is None:
            return AdmissionGrant(
                max_tokens,
                rate_card.version,
                reserved_nano=amount.money,
                reserved_tokens=amount.tokens,
                rate_card=rate_card,
            )
        return AdmissionGrant(
            max_tokens,
            rate_card.version,
            lease.id,
            lease.fencing_token,
            amount.money,
            amount.tokens,
            rate_card,
            budget_periods,
        )

    def _known(self, demand: AdmissionRequest) -> BudgetChain | None:
        """Return the key's budget periods if no change of budgets can have been missed."""
        path = self._by_key.get(demand.key.key_id)
        if path is None or self._is_stale():
            return None
        return path if path.starts <= demand.admitted_at < path.ends else None

    def _is_stale(self) -> bool:
        """Return whether changes may have been missed, such as after a pause of this process."""
        return time.monotonic() - self._polled_at >= FRESH_SECONDS

    async def _open(self, demand: AdmissionRequest) -> BudgetChain:
        """Find the budget periods on the key's way at that instant."""
        key, at = demand.key, _EPOCH + timedelta(microseconds=demand.admitted_at)
        while True:
            changes = self._changes
            try:
                budget_periods = await self._store.open_budget_periods(key.tenant_id, key.project_id, key.key_id, at)
            except _UNREACHABLE as exc:
                raise _unavailable(exc) from exc
            ids = tuple(budget_period.id for budget_period in budget_periods)
            path = BudgetChain(key.tenant_id, budget_periods)
            if budget_periods:
                known = self._paths.get(ids)
                if known is not None:
                    known.budget_periods = budget_periods  # their names and modes may have changed
                    path = known
                    if self._is_stale():
                        self._seal([path])  # leased under limits that may have been lowered
                else:
                    self._paths[ids] = path
            if changes == self._changes:
                current = self._by_key.get(key.key_id)
                if current is None or current.starts <= path.starts:  # not back to the period before
                    self._by_key[key.key_id] = path
                return path

    async def _take_slowly(
        self, bill: CostEstimate, path: BudgetChain, max_tokens: int, amount: ReservedAmount
    ) -> tuple[LocalBudgetLease, int, ReservedAmount]:
        """Take the amount from a new lease, after recalling others' if need be; or as much as there is, where a shorter
        answer will do."""
        shorter = bill.demand.sequences and (bill.demand.max_tokens is None or path.may_reduce_max_tokens)
        floor = bill.amount(1) if shorter else amount
        in_doubt = self._is_in_doubt(path)
        found = await self._recall_until(path, amount, floor)
        if isinstance(found, LocalBudgetLease):
            return found, max_tokens, amount
        if shorter:
            leased = await self._lease(path, amount, floor, take=False)
            if isinstance(leased, LocalBudgetLease):
                max_tokens = min(max_tokens, bill.affordable(leased.left))
                amount = bill.amount(max_tokens)
                self._keep(path, leased, amount)
                return leased, max_tokens, amount
            found = leased
        if in_doubt or self._is_in_doubt(path):
            raise _unavailable(TimeoutError("a lease was given up, and may be what is in the way"))
        raise await self._refusal(found)

    async def _refusal(self, shortages: Sequence[InsufficientBudget]) -> ApiError:
        try:
            releasable = await self._store.releasable([each.budget_period.id for each in shortages])
        except _UNREACHABLE as exc:
            return _unavailable(exc)
        return rejections.refusal(shortages, releasable)

    def _is_in_doubt(self, path: BudgetChain) -> bool:
        """Whether the part of a request that did not wait for it, or not long enough, is not back in these budget
        periods."""
        out = [*self._given_up.values(), *(each for each, lease in self._unreturned if lease.fully_reserved)]
        return any(not set(path.ids).isdisjoint(each.ids) for each in out)

    async def _recall_until(
        self, path: BudgetChain, amount: ReservedAmount, floor: ReservedAmount
    ) -> LocalBudgetLease | list[InsufficientBudget]:
        """Take the amount, once this gateway and the others have released what they can; or return what is short then.

        If `floor` would do as well, wait for everything that other gateways may return.
        """
        ends = asked = 0.0
        while True:
            found = await self._lease(path, amount, amount, take=True)
            if isinstance(found, LocalBudgetLease):
                return found
            if await self.early.release(path.ids):
                continue
            now = time.monotonic()
            wait = _recallable(found, floor) or now - path.recalled_at > RECALLED_SECONDS
            if not wait or (ends and now >= ends):
                return found
            ends = ends or now + REVOKE_LEASES_SECONDS
            if now - asked > REVOKE_LEASES_SECONDS / 3:
                asked = now
                others = await self._ask_for(found)
                if not (others or _recallable(found, floor)):
                    path.recalled_at = now
                    return found
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            if time.monotonic() >= ends:
                path.recalled_at = time.monotonic()

    async def _ask_for(self, shortages: Sequence[InsufficientBudget]) -> bool:
        """Recall what the other gateways can return or release of these budget periods. False: there are no others."""
        budget_periods = [each.budget_period.id for each in shortages]
        self.early.contend(budget_periods)
        try:
            heard = int(await self._broker.publish(REVOKE_LEASES_CHANNEL, msgspec.msgpack.encode(budget_periods)))
            return heard > int(self._listening)
        except redis.RedisError as exc:
            log.warning("lease_revocation_failed", error=str(exc))
            return False

    async def _lease(
        self, path: BudgetChain, amount: ReservedAmount, floor: ReservedAmount, *, take: bool
    ) -> LocalBudgetLease | list[InsufficientBudget]:
        """Lease a lease, one at a time for each path; `take` the amount from it, or from one that came meanwhile."""
        async with path.lock:
            lease = path.lease
            if take and lease is not None and lease.take(amount, time.monotonic()):
                return lease
            path.lease = None  # what is left of it goes back with the same step
            # The waiting request may end. A lease that was leased nevertheless is kept for others.
            leasing = asyncio.create_task(self._store.lease(path, amount, floor, lease))
            self._leasing.add(leasing)
            leasing.add_done_callback(self._leasing.discard)
            try:
                async with asyncio.timeout(LEASE_ANSWER_SECONDS):
                    found = await asyncio.shield(leasing)
            except asyncio.CancelledError:
                self._give_up(leasing, path)
                raise
            except _UNREACHABLE as exc:
                self._give_up(leasing, path)
                if lease is not None:
                    self._return_later(path, lease)
                raise _unavailable(exc) from exc
            if (
                isinstance(found, LocalBudgetLease) and time.monotonic() >= found.until
            ):  # this process was stopped meanwhile
                self._return_later(path, found)
                raise _unavailable(TimeoutError("the lease had ended when it was told"))
            if isinstance(found, list) or found.fully_reserved:
                self.early.contend(path.ids)
            if isinstance(found, LocalBudgetLease) and take:
                self._keep(path, found, amount)
            return found

    def _keep(self, path: BudgetChain, leased: LocalBudgetLease, amount: ReservedAmount) -> None:
        """Take the amount from a lease just leased; what is left of it serves the next."""
        leased.left = ReservedAmount(*(have - need for have, need in zip(leased.left, amount, strict=True)))
        if leased.fully_reserved:
            return
        forgotten = self._paths.get(tuple(path.ids)) is not path  # its period is over
        if forgotten or not leased.left.requests:
            self._return_later(path, leased)
            return
        if path.lease is not None:
            self._return_later(path, path.lease)
        path.lease = leased

    def _give_up(self, leasing: asyncio.Task[LocalBudgetLease | list[InsufficientBudget]], path: BudgetChain) -> None:
        self._given_up[leasing] = path
        leasing.add_done_callback(self._keep_unwanted)

    def _keep_unwanted(self, leasing: asyncio.Task[LocalBudgetLease | list[InsufficientBudget]]) -> None:
        path = self._given_up.pop(leasing)
        if (
            not leasing.cancelled()
            and leasing.exception() is None
            and isinstance(found := leasing.result(), LocalBudgetLease)
        ):
            self._return_later(path, found)

    # Back.

    def _return_later(self, path: BudgetChain, lease: LocalBudgetLease) -> None:
        self._unreturned.append((path, lease))
        self._to_return.set()

    def _seal(self, paths: Collection[BudgetChain]) -> None:
        """Admit nothing more from their leases."""
        for path in paths:
            if path.lease is not None:
                self._return_later(path, path.lease)
                path.lease = None

    async def _return_all(self) -> None:
        """Give back what is left of leases that are done with. NOTE: twice is as good as once, so they are forgotten
        only when it is done; one that the reclaimer took back meanwhile has another fencing token."""
        returning = [lease for _, lease in self._unreturned]
        if not returning:
            return
        try:
            await self._store.return_leases(returning)
        except _UNREACHABLE as exc:
            log.warning("lease_release_failed", leases=len(returning), error=str(exc) or type(exc).__name__)
            return
        done = {id(each) for each in returning}
        self._unreturned = [each for each in self._unreturned if id(each[1]) not in done]

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._to_return.wait()
            self._to_return.clear()
            now, wall = time.monotonic(), time.time_ns() // 1000
            over = [path for path in self._paths.values() if path.lease and now >= path.lease.until]
            self._seal(over)
            for ids, path in list(self._paths.items()):
                if path.lease is None and wall >= path.ends + 60_000_000:
                    del self._paths[ids]
            await self._return_all()

    async def _listen(self) -> None:
        """Return what is not admitted as soon as another gateway asks for it."""
        while True:
            try:
                async with self._patient.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(REVOKE_LEASES_CHANNEL)
                    self._listening = True
                    while True:
                        message = await pubsub.get_message(timeout=30)
                        if message is not None:
                            await self._recalled(set(msgspec.msgpack.decode(message["data"], type=list[int])))
            except (redis.RedisError, OSError) as exc:
                self._listening = False
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(1)

    async def _recalled(self, budget_periods: set[int]) -> None:
        """Give all of it back, and for a moment take no more than is needed: or the asker would never find it there."""
        paths = [path for path in self._paths.values() if not budget_periods.isdisjoint(path.ids)]
        for path in paths:
            path.contended_until = time.monotonic() + REVOKE_LEASES_SECONDS
        self._seal(paths)
        self.early.contend(budget_periods)
        await asyncio.gather(self._return_all(), self.early.release(budget_periods))

    async def _keep_prices(self) -> None:
        while True:
            try:
                await self._store.load_prices(self.prices)
            except _UNREACHABLE as exc:
                log.warning("prices_unreadable", error=str(exc) or type(exc).__name__)
            await asyncio.sleep(PRICES_SECONDS)


class RequestAdmission:
    """Admits what every limit and every budget on a key's way allows."""

    def __init__(self, limits: Admission, budget_admission: BudgetAdmission) -> None:
        self._limits = limits
        self._budgets = budget_admission

    async def start(self) -> None:
        await self._limits.start()
        await self._budgets.start()

    async def stop(self) -> None:
        await self._limits.stop()
        await self._budgets.stop()

    async def admit(self, demand: AdmissionRequest) -> AdmissionLease:
        bill = self._budgets.bill(demand)
        ticket = await self._limits.admit(demand)
        try:
            ticket.terms = await self._budgets.take(bill, ticket.terms.max_tokens)
        except BaseException as exc:
            await ticket.close(None)
            if isinstance(exc, ApiError):
                exc.limit_statuses = ticket.limit_statuses
            raise
        return ticket

    async def charge(self, key: ApiKeySnapshot) -> None:
        await self._limits.charge(key)

    async def end(self, billing_context: BillingContext, terms: AdmissionGrant, usage: TokenUsage) -> None:
        await self._budgets.early.end(billing_context, terms, usage)

    async def standing(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        return await self._limits.standing(key)


def _recallable(shortages: Sequence[InsufficientBudget], floor: ReservedAmount) -> bool:
    """Whether so much may come back from others that the floor is reached."""
    wanted = dict(zip(UNITS, floor, strict=True))
    return any(each.elsewhere for each in shortages) and all(
        each.room + each.elsewhere >= wanted[each.budget_period.unit] for each in shortages
    )


def _unavailable(fault: Exception) -> ApiError:
    log.warning("budgets_unreachable", error=str(fault) or type(fault).__name__)
    return ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1)
