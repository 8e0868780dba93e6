"""May it cost that: prices pinned, holds taken from budget slices in memory, and in Postgres when a slice is spent.

All windows above a key are taken together or not at all, for the most expensive candidate. Before a rejection the
other gateways return what they have not admitted, within milliseconds (`REVOKE_LEASES_CHANNEL`). The lease of an
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
    BudgetLease,
    BudgetLeaseStore,
    InsufficientBudget,
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

REVOKE_LEASES_CHANNEL = "millrace:revoke_leases"  # a channel in Valkey: the ids of windows that are short
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
    """The prices, paths and slices of one gateway."""

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
        ] = {}  # window ids -> the path: keys with the same windows share it
        self._unreturned: list[tuple[BudgetChain, BudgetLease]] = []
        self._to_return = asyncio.Event()
        self._opening: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()  # by key: one look at a time
        self._changes = 0
        self._listening = False  # whether recalls reach this gateway
        self._tasks: list[asyncio.Task[None]] = []
        self._leasing: set[asyncio.Task[BudgetLease | list[InsufficientBudget]]] = set()
        self._given_up: dict[
            asyncio.Task[BudgetLease | list[InsufficientBudget]], BudgetChain
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
        sheets = [
            find(tenant, candidate.model.name, TIERS[demand.service_class], at) for candidate in demand.candidates
        ]
        needed = sheets if all_billed else sheets[:1]
        if None in needed:
            raise rejections.unpriced(demand.candidates[needed.index(None)].model.name)
        return CostEstimate(demand, tuple(sheet for sheet in sheets if sheet is not None), all_billed=all_billed)

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
        if not path.windows:
            return self._terms(bill, max_tokens, amount, None, ())
        slice_ = path.slice
        if slice_ is None or not slice_.take(amount, time.monotonic()):
            slice_, max_tokens, amount = await self._take_slowly(bill, path, max_tokens, amount)
        return self._terms(bill, max_tokens, amount, slice_, path.ids)

    def _terms(
        self,
        bill: CostEstimate,
        max_tokens: int,
        amount: ReservedAmount,
        slice_: BudgetLease | None,
        windows: Sequence[int],
    ) -> AdmissionGrant:
        sheet = bill.sheets[0]
        if slice_ is None:
            return AdmissionGrant(max_tokens, sheet.version, hold=amount.money, hold_tokens=amount.tokens, sheet=sheet)
        return AdmissionGrant(
            max_tokens, sheet.version, slice_.id, slice_.fence, amount.money, amount.tokens, sheet, windows
        )

    def _known(self, demand: AdmissionRequest) -> BudgetChain | None:
        """Return the key's windows if no change of budgets can have been missed."""
        path = self._by_key.get(demand.key.key_id)
        if path is None or self._is_stale():
            return None
        return path if path.starts <= demand.admitted_at < path.ends else None

    def _is_stale(self) -> bool:
        """Return whether changes may have been missed, such as after a pause of this process."""
        return time.monotonic() - self._polled_at >= FRESH_SECONDS

    async def _open(self, demand: AdmissionRequest) -> BudgetChain:
        """Find the windows on the key's way at that instant."""
        key, at = demand.key, _EPOCH + timedelta(microseconds=demand.admitted_at)
        while True:
            changes = self._changes
            try:
                windows = await self._store.open_windows(key.tenant_id, key.project_id, key.key_id, at)
            except _UNREACHABLE as exc:
                raise _unavailable(exc) from exc
            ids = tuple(window.id for window in windows)
            path = BudgetChain(key.tenant_id, windows)
            if windows:
                known = self._paths.get(ids)
                if known is not None:
                    known.windows = windows  # their names and modes may have changed
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
    ) -> tuple[BudgetLease, int, ReservedAmount]:
        """Take the amount from a new slice, after recalling others' if need be; or as much as there is, where a shorter
        answer will do."""
        shorter = bill.demand.sequences and (bill.demand.max_tokens is None or path.may_clamp)
        floor = bill.amount(1) if shorter else amount
        in_doubt = self._is_in_doubt(path)
        found = await self._recall_until(path, amount, floor)
        if isinstance(found, BudgetLease):
            return found, max_tokens, amount
        if shorter:
            leased = await self._lease(path, amount, floor, take=False)
            if isinstance(leased, BudgetLease):
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
            releasable = await self._store.releasable([each.window.id for each in shortages])
        except _UNREACHABLE as exc:
            return _unavailable(exc)
        return rejections.refusal(shortages, releasable)

    def _is_in_doubt(self, path: BudgetChain) -> bool:
        """Whether the part of a request that did not wait for it, or not long enough, is not back in these windows."""
        out = [*self._given_up.values(), *(each for each, slice_ in self._unreturned if slice_.sealed)]
        return any(not set(path.ids).isdisjoint(each.ids) for each in out)

    async def _recall_until(
        self, path: BudgetChain, amount: ReservedAmount, floor: ReservedAmount
    ) -> BudgetLease | list[InsufficientBudget]:
        """Take the amount, once this gateway and the others have released what they can; or return what is short then.

        If `floor` would do as well, wait for everything that other gateways may return.
        """
        ends = asked = 0.0
        while True:
            found = await self._lease(path, amount, amount, take=True)
            if isinstance(found, BudgetLease):
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
        """Recall what the other gateways can return or release of these windows. False: there are no others."""
        windows = [each.window.id for each in shortages]
        self.early.contend(windows)
        try:
            heard = int(await self._broker.publish(REVOKE_LEASES_CHANNEL, msgspec.msgpack.encode(windows)))
            return heard > int(self._listening)
        except redis.RedisError as exc:
            log.warning("lease_revocation_failed", error=str(exc))
            return False

    async def _lease(
        self, path: BudgetChain, amount: ReservedAmount, floor: ReservedAmount, *, take: bool
    ) -> BudgetLease | list[InsufficientBudget]:
        """Lease a slice, one at a time for each path; `take` the amount from it, or from one that came meanwhile."""
        async with path.lock:
            slice_ = path.slice
            if take and slice_ is not None and slice_.take(amount, time.monotonic()):
                return slice_
            path.slice = None  # what is left of it goes back with the same step
            # The waiting request may end. A slice that was leased nevertheless is kept for others.
            leasing = asyncio.create_task(self._store.lease(path, amount, floor, slice_))
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
                if slice_ is not None:
                    self._return_later(path, slice_)
                raise _unavailable(exc) from exc
            if isinstance(found, BudgetLease) and time.monotonic() >= found.until:  # this process was stopped meanwhile
                self._return_later(path, found)
                raise _unavailable(TimeoutError("the lease had ended when it was told"))
            if isinstance(found, list) or found.sealed:
                self.early.contend(path.ids)
            if isinstance(found, BudgetLease) and take:
                self._keep(path, found, amount)
            return found

    def _keep(self, path: BudgetChain, leased: BudgetLease, amount: ReservedAmount) -> None:
        """Take the amount from a slice just leased; what is left of it serves the next."""
        leased.left = ReservedAmount(*(have - need for have, need in zip(leased.left, amount, strict=True)))
        if leased.sealed:
            return
        forgotten = self._paths.get(tuple(path.ids)) is not path  # its period is over
        if forgotten or not leased.left.requests:
            self._return_later(path, leased)
            return
        if path.slice is not None:
            self._return_later(path, path.slice)
        path.slice = leased

    def _give_up(self, leasing: asyncio.Task[BudgetLease | list[InsufficientBudget]], path: BudgetChain) -> None:
        self._given_up[leasing] = path
        leasing.add_done_callback(self._keep_unwanted)

    def _keep_unwanted(self, leasing: asyncio.Task[BudgetLease | list[InsufficientBudget]]) -> None:
        path = self._given_up.pop(leasing)
        if (
            not leasing.cancelled()
            and leasing.exception() is None
            and isinstance(found := leasing.result(), BudgetLease)
        ):
            self._return_later(path, found)

    # Back.

    def _return_later(self, path: BudgetChain, slice_: BudgetLease) -> None:
        self._unreturned.append((path, slice_))
        self._to_return.set()

    def _seal(self, paths: Collection[BudgetChain]) -> None:
        """Admit nothing more from their slices."""
        for path in paths:
            if path.slice is not None:
                self._return_later(path, path.slice)
                path.slice = None

    async def _return_all(self) -> None:
        """Give back what is left of slices that are done with. NOTE: twice is as good as once, so they are forgotten
        only when it is done; one that the reaper took back meanwhile has another fence."""
        returning = [slice_ for _, slice_ in self._unreturned]
        if not returning:
            return
        try:
            await self._store.give_back(returning)
        except _UNREACHABLE as exc:
            log.warning("slice_release_failed", slices=len(returning), error=str(exc) or type(exc).__name__)
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
            over = [path for path in self._paths.values() if path.slice and now >= path.slice.until]
            self._seal(over)
            for ids, path in list(self._paths.items()):
                if path.slice is None and wall >= path.ends + 60_000_000:
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

    async def _recalled(self, windows: set[int]) -> None:
        """Give all of it back, and for a moment take no more than is needed: or the asker would never find it there."""
        paths = [path for path in self._paths.values() if not windows.isdisjoint(path.ids)]
        for path in paths:
            path.scarce_until = time.monotonic() + REVOKE_LEASES_SECONDS
        self._seal(paths)
        self.early.contend(windows)
        await asyncio.gather(self._return_all(), self.early.release(windows))

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
        each.room + each.elsewhere >= wanted[each.window.unit] for each in shortages
    )


def _unavailable(fault: Exception) -> ApiError:
    log.warning("budgets_unreachable", error=str(fault) or type(fault).__name__)
    return ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1)
