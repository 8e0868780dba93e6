"""Budget admission: pin the price and reserve the maximum cost of a request.

The cost is reserved from a budget lease in memory. When the lease is used up, a new one is taken from PostgreSQL. All
budget periods that apply to a key are reserved together or not at all, for the most expensive candidate.

Before a rejection, the other gateways return what they have leased but not admitted, within milliseconds
(`REVOKE_LEASES_CHANNEL`). The lease of an unresponsive gateway stays reserved until none of its requests can run any
more. If only such a lease is missing, the response is 503 with `retry-after` instead of 429.

While PostgreSQL does not answer, requests are admitted from leases until these expire, and in the stale window
(millrace.gateway.auth.stale_window) also by the known budget periods of a key. Without a lease, only a key without hard
budgets is admitted then. Its soft and dry-run budgets do not count these requests.

The settler releases an execution's reservation when it settles the usage event. While a budget is contended, the
gateway releases the unused part before that: see early_release.py.
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

from billing.rates.pricing import PriceIndex, Tier, UnknownPriceError
from billing.reservations.budget_leases import (
    UNITS,
    BudgetChain,
    BudgetLeaseStore,
    InsufficientBudget,
    LocalBudgetLease,
    ReservedAmount,
)
from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.gateway.admission import rejections
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.admission.cost_estimate import CostEstimate
from millrace.gateway.admission.early_release import EarlyReleases
from millrace.gateway.admission.spend_limits import SpendLimits
from millrace.gateway.auth.authentication import FRESH_SECONDS
from millrace.gateway.auth.stale_window import ANSWER_SECONDS, StaleWindow, answer_within
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError, unavailable
from tenants.outbox.change_feed import ChangeEvent

log = structlog.get_logger(__name__)

REVOKE_LEASES_CHANNEL = "millrace:revoke_leases"  # a channel in Valkey: the IDs of budget periods that are short
REVOKE_LEASES_SECONDS = 0.19  # from the first revocation message to the rejection
RETRY_SECONDS = 0.01
LEASE_ANSWER_SECONDS = 2.0  # a slower database counts as unavailable
RECALLED_SECONDS = 5.0  # how long after a revocation other gateways are not asked again
PRICES_SECONDS = 1.0
FIRST_PRICES_SECONDS = 0.1  # until the prices were loaded once
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
    """The prices, budget chains and budget leases of one gateway."""

    def __init__(
        self,
        store: BudgetLeaseStore,
        broker: redis.Redis,
        blocking_broker: redis.Redis,
        activity: Activity | None = None,
        stale_window: StaleWindow | None = None,
    ) -> None:
        self._stale_window = stale_window or StaleWindow()
        self._store = store
        self._price_pauses = Poll(activity)
        self._broker = broker
        self._blocking_broker = blocking_broker
        self.prices = PriceIndex()
        self.has_prices = False  # whether the prices were loaded once
        self._prices_outdated = False  # whether versions may have been lost, and their numbers assigned again
        self.early = EarlyReleases(store)
        self._polled_at = float("-inf")  # monotonic
        self._by_key: dict[int, BudgetChain] = {}  # key ID -> its chain
        # Period IDs -> the chain. Keys with the same periods share it.
        self._chains: dict[tuple[int, ...], BudgetChain] = {}
        self._unreturned: list[tuple[BudgetChain, LocalBudgetLease]] = []
        self._to_return = asyncio.Event()
        self._opening: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()  # by key ID: one query at a time
        self._changes = 0
        self._listening = False  # whether this gateway receives revocations
        self._tasks: list[asyncio.Task[None]] = []
        self._leasing: set[asyncio.Task[LocalBudgetLease | list[InsufficientBudget]]] = set()
        # Leases that no request waits for any more.
        self._abandoned: dict[asyncio.Task[LocalBudgetLease | list[InsufficientBudget]], BudgetChain] = {}

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(work) for work in (self._keep_prices(), self._sweep(), self._listen())]

    async def stop(self) -> None:
        """Return all leases. After this only other gateways admit requests."""
        await cancel_and_wait(self._tasks)
        await asyncio.gather(*self._leasing, return_exceptions=True)
        self._seal(list(self._chains.values()))
        await self._return_all()

    def drop(self, changes: Collection[ChangeEvent]) -> None:
        """Return the leases of tenants whose budgets may have changed."""
        self._changes += 1
        tenants = {change.tenant_id for change in changes}
        self._by_key = {key: chain for key, chain in self._by_key.items() if chain.tenant_id not in tenants}
        self._seal([chain for chain in self._chains.values() if chain.tenant_id in tenants])

    def note_poll(self, polled_at: float) -> None:
        """Record that all changes up to the monotonic time `polled_at` were applied."""
        self._polled_at = polled_at

    def forget(self) -> None:
        """Clear the caches: changes may have been missed, or IDs assigned again after a failover of PostgreSQL."""
        self._changes += 1
        self._by_key.clear()
        self._seal(list(self._chains.values()))
        self._chains.clear()
        self._prices_outdated = True

    def estimate(self, demand: AdmissionRequest) -> CostEstimate:
        """Pin the prices of the candidates.

        Raises:
            ApiError: 503, the first candidate has no price, or the prices are not loaded yet.
        """
        find, tenant_id, tier = self.prices.find, demand.key.tenant_id, TIERS[demand.request.service_class]
        rate_cards = [find(tenant_id, model.name, tier, demand.admitted_at) for model in demand.candidates]
        if rate_cards[0] is None:
            raise rejections.reject_unpriced(demand.candidates[0].name) if self.has_prices else unavailable()
        return CostEstimate(demand, tuple(rate_card for rate_card in rate_cards if rate_card is not None))

    async def take(
        self, estimate: CostEstimate, admitted: AdmittedRequest, *, may_reduce: bool = True
    ) -> AdmittedRequest:
        """Reserve the maximum cost of the request. If `may_reduce`, its maximum of output tokens may be reduced.

        Raises:
            ApiError: 429, a budget does not allow it; 503, the database or a missing lease is unavailable.
        """
        demand, max_tokens = estimate.demand, admitted.max_tokens
        try:
            amount = estimate.amount(max_tokens)
        except UnknownPriceError:
            raise rejections.reject_unpriced(demand.model.name) from None
        chain = self._find_chain(demand)
        if chain is None:
            async with self._opening.setdefault(demand.key.key_id, asyncio.Lock()):
                chain = self._find_chain(demand) or await self._open_or_use_stale(demand)
        lease = chain.lease if chain.budget_periods else None
        if chain.budget_periods and (lease is None or not lease.take(amount, time.monotonic())):
            lease = None
            if not self._admits_without_lease(chain):
                try:
                    lease, max_tokens, amount = await self._take_from_new_lease(
                        estimate, chain, max_tokens, amount, may_reduce=may_reduce
                    )
                except ApiError:
                    if not self._admits_without_lease(chain):
                        raise
        reserved = msgspec.structs.replace(
            admitted,
            max_tokens=max_tokens,
            rate_card=estimate.rate_cards[0],
            lease_id=None if lease is None else lease.id,
            fencing_token=None if lease is None else lease.fencing_token,
            reserved_nano=amount.money,
            reserved_tokens=amount.tokens,
            budget_period_ids=() if lease is None else chain.ids,
            has_own_lease=lease is not None and lease.fully_reserved,
        )
        vars(reserved).clear()  # `replace` copies cached properties
        return reserved

    async def return_unused(self, admitted: AdmittedRequest) -> bool:
        """Return a reservation that no execution used. Return False if only a usage event can release it."""
        if admitted.lease_id is None or admitted.fencing_token is None:
            return True
        chain = self._chains.get(tuple(admitted.budget_period_ids))
        if chain is None:
            return False
        amount = ReservedAmount(admitted.reserved_nano or 0, admitted.reserved_tokens or 0, 1)
        lease = chain.lease
        if admitted.has_own_lease:
            own = LocalBudgetLease(admitted.lease_id, admitted.fencing_token, amount, 0.0, fully_reserved=True)
            self._return_later(chain, own)
            await self._return_all()
            return True
        if lease is None or (lease.id, lease.fencing_token) != (admitted.lease_id, admitted.fencing_token):
            return False
        lease.left = ReservedAmount(*(left + unused for left, unused in zip(lease.left, amount, strict=True)))
        return True

    def _find_chain(self, demand: AdmissionRequest) -> BudgetChain | None:
        """Return the key's budget chain, if it is current, or if the last query failed and the stale window covers it.

        The request's key was looked up before, so that query is at most a second old.
        """
        chain = self._find_known_chain(demand)
        if chain is None or not self._is_stale() or self._stale_window.covers(chain.tenant_id):
            return chain
        return None

    def _find_known_chain(self, demand: AdmissionRequest) -> BudgetChain | None:
        """Return the key's budget chain, of which changes may have been missed."""
        chain = self._by_key.get(demand.key.key_id)
        return chain if chain is not None and chain.starts <= demand.admitted_at < chain.ends else None

    def _admits_without_lease(self, chain: BudgetChain) -> bool:
        """Return whether no budget can reject a request, and no lease can be had since PostgreSQL does not answer."""
        return not chain.has_hard_budget and self._stale_window.covers(chain.tenant_id)

    def _is_stale(self) -> bool:
        """Return whether changes may have been missed, for example after a pause of this process."""
        return time.monotonic() - self._polled_at >= FRESH_SECONDS

    async def _open_or_use_stale(self, demand: AdmissionRequest) -> BudgetChain:
        """Read the key's budget periods. If PostgreSQL does not answer, use the known ones in the stale window."""
        if self._find_known_chain(demand) is None or not self._stale_window.may_cover(demand.key.tenant_id):
            return await self._open(demand)
        try:
            return await answer_within(ANSWER_SECONDS, self._open(demand))
        except (ApiError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError):
                self._stale_window.note_error(exc)
            chain = self._find_known_chain(demand)  # a change may have removed it meanwhile
            if chain is None or not self._stale_window.covers(chain.tenant_id):
                raise _unavailable(exc) from exc
            return chain

    async def _open(self, demand: AdmissionRequest) -> BudgetChain:
        """Read the key's budget periods at the time of the request."""
        key, admitted_at = demand.key, _EPOCH + timedelta(microseconds=demand.admitted_at)
        while True:
            changes = self._changes
            try:
                budget_periods = await self._store.open_budget_periods(
                    key.tenant_id, key.project_id, key.key_id, admitted_at
                )
            except _UNREACHABLE as exc:
                self._stale_window.note_error(exc)
                raise _unavailable(exc) from exc
            ids = tuple(budget_period.id for budget_period in budget_periods)
            chain = BudgetChain(key.tenant_id, budget_periods)
            if budget_periods:
                known = self._chains.get(ids)
                if known is not None:
                    known.budget_periods = budget_periods  # names and modes may have changed
                    chain = known
                    if self._is_stale():
                        self._seal([chain])  # leased under limits that may have been lowered
                else:
                    self._chains[ids] = chain
            if changes == self._changes:
                current = self._by_key.get(key.key_id)
                if current is None or current.starts <= chain.starts:  # do not go back to an earlier period
                    self._by_key[key.key_id] = chain
                return chain

    async def _take_from_new_lease(
        self,
        estimate: CostEstimate,
        chain: BudgetChain,
        max_tokens: int,
        amount: ReservedAmount,
        *,
        may_reduce: bool = True,
    ) -> tuple[LocalBudgetLease, int, ReservedAmount]:
        """Take the amount from a new budget lease, revoking leases of other gateways if necessary.

        If a shorter completion is acceptable, take as much as there is.
        """
        demand = estimate.demand
        shorter = may_reduce and demand.sequences and (demand.request.max_tokens is None or chain.may_reduce_max_tokens)
        floor = estimate.amount(1) if shorter else amount
        has_unreturned_lease = self._has_unreturned_lease(chain)
        found = await self._lease_after_revocation(chain, amount, floor)
        if isinstance(found, LocalBudgetLease):
            return found, max_tokens, amount
        if shorter:
            leased = await self._lease(chain, amount, floor, take=False)
            if isinstance(leased, LocalBudgetLease):
                max_tokens = min(max_tokens, estimate.affordable(leased.left))
                amount = estimate.amount(max_tokens)
                self._keep(chain, leased, amount)
                return leased, max_tokens, amount
            found = leased
        if has_unreturned_lease or self._has_unreturned_lease(chain):
            raise _unavailable(TimeoutError("an abandoned lease may be the missing budget"))
        raise await self._rejection(found)

    async def _rejection(self, shortages: Sequence[InsufficientBudget]) -> ApiError:
        try:
            releasable = await self._store.releasable([shortage.budget_period.id for shortage in shortages])
        except _UNREACHABLE as exc:
            return _unavailable(exc)
        return rejections.over_budget(shortages, releasable)

    def _has_unreturned_lease(self, chain: BudgetChain) -> bool:
        """Return whether a lease of these budget periods was abandoned and is not returned yet."""
        out = [*self._abandoned.values(), *(owner for owner, lease in self._unreturned if lease.fully_reserved)]
        return any(not set(chain.ids).isdisjoint(missing.ids) for missing in out)

    async def _lease_after_revocation(
        self, chain: BudgetChain, amount: ReservedAmount, floor: ReservedAmount
    ) -> LocalBudgetLease | list[InsufficientBudget]:
        """Take the amount after this gateway and the others have released what they can, or return what is short.

        If `floor` would be enough, wait for everything that other gateways may return.
        """
        deadline = revoked_at = 0.0
        while True:
            found = await self._lease(chain, amount, amount, take=True)
            if isinstance(found, LocalBudgetLease):
                return found
            if await self.early.release(chain.ids):
                continue
            now = time.monotonic()
            wait = _recallable(found, floor) or now - chain.recalled_at > RECALLED_SECONDS
            if not wait or (deadline and now >= deadline):
                return found
            deadline = deadline or now + REVOKE_LEASES_SECONDS
            if now - revoked_at > REVOKE_LEASES_SECONDS / 3:
                revoked_at = now
                has_others = await self._revoke_other_leases(found)
                if not (has_others or _recallable(found, floor)):
                    chain.recalled_at = now
                    return found
            await asyncio.sleep(RETRY_SECONDS)
            if time.monotonic() >= deadline:
                chain.recalled_at = time.monotonic()

    async def _revoke_other_leases(self, shortages: Sequence[InsufficientBudget]) -> bool:
        """Revoke the leases of other gateways in these budget periods. Return False if there are no other gateways."""
        budget_periods = [shortage.budget_period.id for shortage in shortages]
        self.early.contend(budget_periods)
        try:
            receivers = int(await self._broker.publish(REVOKE_LEASES_CHANNEL, msgspec.msgpack.encode(budget_periods)))
            return receivers > int(self._listening)
        except redis.RedisError as exc:
            log.warning("lease_revocation_failed", error=str(exc))
            return False

    async def _lease(
        self, chain: BudgetChain, amount: ReservedAmount, floor: ReservedAmount, *, take: bool
    ) -> LocalBudgetLease | list[InsufficientBudget]:
        """Lease a part of the budget, one lease at a time per chain. With `take`, take the amount from it."""
        async with chain.lock:
            lease = chain.lease
            if take and lease is not None and lease.take(amount, time.monotonic()):
                return lease
            chain.lease = None  # the rest of it is returned in the same statement
            # The waiting request may be cancelled. A lease that was taken nevertheless is kept for other requests.
            leasing = asyncio.create_task(self._store.lease(chain, amount, floor, lease))
            self._leasing.add(leasing)
            leasing.add_done_callback(self._leasing.discard)
            try:
                async with asyncio.timeout(LEASE_ANSWER_SECONDS):
                    found = await asyncio.shield(leasing)
            except asyncio.CancelledError:
                self._abandon(leasing, chain)
                raise
            except _UNREACHABLE as exc:
                self._stale_window.note_error(exc)
                self._abandon(leasing, chain)
                if lease is not None:
                    self._return_later(chain, lease)
                raise _unavailable(exc) from exc
            if (
                isinstance(found, LocalBudgetLease) and time.monotonic() >= found.until
            ):  # this process was paused meanwhile
                self._return_later(chain, found)
                raise _unavailable(TimeoutError("the lease had expired when it was received"))
            if isinstance(found, list) or found.fully_reserved:
                self.early.contend(chain.ids)
            if isinstance(found, LocalBudgetLease) and take:
                self._keep(chain, found, amount)
            return found

    def _keep(self, chain: BudgetChain, leased: LocalBudgetLease, amount: ReservedAmount) -> None:
        """Take the amount from a new lease. The rest of the lease serves later requests."""
        leased.left = ReservedAmount(*(have - need for have, need in zip(leased.left, amount, strict=True)))
        if leased.fully_reserved:
            return
        forgotten = self._chains.get(tuple(chain.ids)) is not chain  # its period is over
        if forgotten or not leased.left.requests:
            self._return_later(chain, leased)
            return
        if chain.lease is not None:
            self._return_later(chain, chain.lease)
        chain.lease = leased

    def _abandon(self, leasing: asyncio.Task[LocalBudgetLease | list[InsufficientBudget]], chain: BudgetChain) -> None:
        self._abandoned[leasing] = chain
        leasing.add_done_callback(self._keep_unwanted)

    def _keep_unwanted(self, leasing: asyncio.Task[LocalBudgetLease | list[InsufficientBudget]]) -> None:
        chain = self._abandoned.pop(leasing)
        if (
            not leasing.cancelled()
            and leasing.exception() is None
            and isinstance(found := leasing.result(), LocalBudgetLease)
        ):
            self._return_later(chain, found)

    def _return_later(self, chain: BudgetChain, lease: LocalBudgetLease) -> None:
        self._unreturned.append((chain, lease))
        self._to_return.set()

    def _seal(self, chains: Collection[BudgetChain]) -> None:
        """Stop admitting requests from the chains' leases, and return the leases."""
        for chain in chains:
            if chain.lease is not None:
                self._return_later(chain, chain.lease)
                chain.lease = None

    async def _return_all(self) -> None:
        """Return what is left of leases that are no longer used.

        Returning a lease twice is harmless, so a lease is removed from the list only when the call has succeeded. A
        lease that was reclaimed meanwhile has another fencing token.
        """
        returning = [lease for _, lease in self._unreturned]
        if not returning:
            return
        try:
            await self._store.return_leases(returning)
        except _UNREACHABLE as exc:
            log.warning("lease_release_failed", leases=len(returning), error=str(exc) or type(exc).__name__)
            return
        done = {id(lease) for lease in returning}
        self._unreturned = [entry for entry in self._unreturned if id(entry[1]) not in done]

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._to_return.wait()
            self._to_return.clear()
            now, wall = time.monotonic(), time.time_ns() // 1000
            expired = [chain for chain in self._chains.values() if chain.lease and now >= chain.lease.until]
            self._seal(expired)
            for ids, chain in list(self._chains.items()):
                if chain.lease is None and wall >= chain.ends + 60_000_000:
                    del self._chains[ids]
            await self._return_all()

    async def _listen(self) -> None:
        """Return unused leases as soon as another gateway revokes them."""
        while True:
            try:
                async with self._blocking_broker.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(REVOKE_LEASES_CHANNEL)
                    self._listening = True
                    while True:
                        message = await pubsub.get_message(timeout=30)
                        if message is not None:
                            await self._handle_revocation(set(msgspec.msgpack.decode(message["data"], type=list[int])))
            except (redis.RedisError, OSError) as exc:
                self._listening = False
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(1)

    async def _handle_revocation(self, budget_periods: set[int]) -> None:
        """Return the leases of these budget periods.

        For a moment only the needed amounts are leased again, so that the other gateway finds the budget available.
        """
        chains = [chain for chain in self._chains.values() if not budget_periods.isdisjoint(chain.ids)]
        for chain in chains:
            chain.contended_until = time.monotonic() + REVOKE_LEASES_SECONDS
        self._seal(chains)
        self.early.contend(budget_periods)
        await asyncio.gather(self._return_all(), self.early.release(budget_periods))

    async def _keep_prices(self) -> None:
        while True:
            index = PriceIndex() if self._prices_outdated else self.prices
            self._prices_outdated = False
            try:
                await self._store.load_prices(index)
                self.prices.replace(index)
                self.has_prices = True
            except _UNREACHABLE as exc:
                self._prices_outdated |= index is not self.prices
                log.warning("prices_unreadable", error=str(exc) or type(exc).__name__)
            await self._price_pauses.pause(PRICES_SECONDS if self.has_prices else FIRST_PRICES_SECONDS)


class RequestAdmission(RateLimitAdmission):
    """Admission by all rate limits and budgets that apply to a key."""

    def __init__(
        self,
        broker: redis.Redis,
        budgets: BudgetAdmission,
        *,
        spend_limits: SpendLimits | None = None,
        commands: CommandConnection | None = None,
        cached_token_limit_percent: int = 0,
    ) -> None:
        super().__init__(broker, commands=commands, cached_token_limit_percent=cached_token_limit_percent)
        self.budgets = budgets
        self._spend_limits = spend_limits

    async def start(self) -> None:
        await super().start()
        await self.budgets.start()
        if self._spend_limits is not None:
            await self._spend_limits.start()

    async def stop(self) -> None:
        await super().stop()
        await self.budgets.stop()
        if self._spend_limits is not None:
            await self._spend_limits.stop()

    async def admit(self, demand: AdmissionRequest) -> AdmittedRequest:
        estimate = self.budgets.estimate(demand)
        admitted = await super().admit(demand)
        has_spend = False
        try:
            if self._spend_limits is not None:
                await self._spend_limits.reserve(admitted)
                has_spend = True
            return await self.budgets.take(estimate, admitted)
        except BaseException as exc:
            await self.close(admitted, None)
            if has_spend and self._spend_limits is not None:
                await self._spend_limits.release(admitted)
            if isinstance(exc, ApiError):
                exc.limit_statuses = admitted.limit_statuses
            raise

    async def reserve_further(self, demand: AdmissionRequest) -> AdmittedRequest:
        estimate = self.budgets.estimate(demand)
        return await self.budgets.take(estimate, await super().reserve_further(demand), may_reduce=False)

    async def return_further(self, reserved: AdmittedRequest) -> bool:
        return await self.budgets.return_unused(reserved)

    async def admit_reserved(self, reserved: AdmittedRequest) -> AdmittedRequest:
        admitted = await super().admit_reserved(reserved)
        if self._spend_limits is not None:
            try:
                await self._spend_limits.reserve(admitted)
            except BaseException:
                await self.close(admitted, None)
                raise
        return admitted

    async def admit_side_execution(
        self, demand: AdmissionRequest, max_tokens: int | None = None, *, is_operator_paid: bool
    ) -> AdmittedRequest:
        admitted = await super().admit_side_execution(demand, max_tokens, is_operator_paid=is_operator_paid)
        if self._spend_limits is not None:
            await self._spend_limits.reserve(admitted)
        if is_operator_paid:
            return admitted
        try:
            return await self.budgets.take(self.budgets.estimate(demand), admitted, may_reduce=False)
        except BaseException:
            if self._spend_limits is not None:
                await self._spend_limits.release(admitted)
            raise

    async def end(self, admitted: AdmittedRequest, usage: TokenCounts) -> None:
        await self.budgets.early.end(admitted, usage)


def _recallable(shortages: Sequence[InsufficientBudget], floor: ReservedAmount) -> bool:
    """Return whether other gateways may return enough to reach the floor."""
    needed = dict(zip(UNITS, floor, strict=True))
    return any(shortage.elsewhere for shortage in shortages) and all(
        shortage.room + shortage.elsewhere >= needed[shortage.budget_period.unit] for shortage in shortages
    )


def _unavailable(exc: Exception) -> ApiError:
    log.warning("budgets_unreachable", error=str(exc) or type(exc).__name__)
    return unavailable()
