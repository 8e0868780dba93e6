"""Budget leases, as gateways take, spend and return them. Does not import Django.

Budget periods are rows in PostgreSQL. The functions in `billing/migrations/sql` change them. A request that a lease
covers needs no database access.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString, NamedTuple

from psycopg_pool import AsyncConnectionPool

from billing.rates.pricing import PriceIndex, RateCard, Tier, decode_rates

LEASE_SECONDS = 15.0
MARGIN_SECONDS = 1.0  # before the lease's end, when admission from it stops
SETTLING_SECONDS = 60.0  # for the end of a request that ran to its deadline to be settled
REQUESTS_PER_LEASE = 64
DATABASE_SECONDS = 0.5
NO_END = 2**62
UNITS = ("money", "tokens", "requests")

_OPEN: LiteralString = """
SELECT p.*, coalesce((
    SELECT b.currency FROM billing_pricebookassignment a JOIN billing_pricebook b ON b.id = a.book_id
    WHERE a.tenant_id = %s), 'USD')
FROM billing_open_budget_periods(%s, %s, %s, %s) p
"""
_LEASE: LiteralString = """
SELECT * FROM billing_lease_budget(%s, %s, %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s, %s, %s::bigint,
    %s::integer, %s::bigint[])
"""
_RETURN: LiteralString = """
SELECT billing_return_leases(%s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::bigint[], %s::boolean[])
"""
_RELEASE: LiteralString = """
SELECT billing_release_unused(%s::bigint[], %s::integer[], %s::timestamptz[], %s::text[], %s::smallint[], %s::bigint[],
    %s::bigint[], %s::bigint[], %s::bigint[])
"""
_RELEASABLE: LiteralString = """
SELECT w.id, CASE w.unit WHEN 'requests' THEN 0 ELSE w.reserved - coalesce((
    SELECT sum(CASE w.unit WHEN 'money' THEN r.retained_money ELSE r.retained_tokens END)::bigint
    FROM billing_earlyrelease r JOIN billing_budgetlease s ON s.id = r.lease_id
    WHERE w.id = ANY(s.budget_period_ids)), 0) END
FROM billing_budgetperiod w WHERE w.id = ANY(%s)
"""
_RATE_CARDS: LiteralString = """
SELECT id, tenant_id, model, tier, effective_from, rates FROM billing_compiledratecard WHERE id > %s ORDER BY id
"""


class ReservedAmount(NamedTuple):
    """The amounts that a request reserves, by unit."""

    money: int  # nano-USD
    tokens: int
    requests: int

    def times(self, number: int) -> ReservedAmount:
        return ReservedAmount(self.money * number, self.tokens * number, self.requests * number)


class LeasedPeriod(NamedTuple):
    """A budget period that applies to a key."""

    id: int
    budget_id: int
    name: str
    unit: str
    period: str  # day, month, lifetime
    mode: str
    reduce_max_tokens: bool
    starts: datetime
    ends: datetime | None
    currency: str  # the tenant's: it cannot change while the tenant has a budget of money


@dataclass
class LocalBudgetLease:
    """Budget that this gateway can still spend without contacting PostgreSQL."""

    id: int
    fencing_token: int
    granted: ReservedAmount
    until: float  # monotonic: nothing is admitted from it afterwards
    fully_reserved: bool  # for one request: it can only be returned as a whole
    left: ReservedAmount = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.granted

    def take(self, amount: ReservedAmount, now: float) -> bool:
        """Take the amount, if it fits and the lease has not expired. Return whether it was taken."""
        left = self.left
        if now >= self.until or amount[0] > left[0] or amount[1] > left[1] or amount[2] > left[2]:
            return False
        self.left = ReservedAmount(left[0] - amount[0], left[1] - amount[1], left[2] - amount[2])
        return True


class InsufficientBudget(NamedTuple):
    """A budget period without room for a requested amount."""

    budget_period: LeasedPeriod
    room: int
    elsewhere: int  # in leases of other gateways, and possibly not admitted
    until: datetime | None  # when the first of those leases is reclaimed at the latest
    needed: int

    @property
    def recallable(self) -> bool:
        return self.room + self.elsewhere >= self.needed


class UnusedPart(NamedTuple):
    """The unused part of an ended execution's reservation, and what its settlement needs of the rest."""

    lease_id: int
    fencing_token: int
    admitted_at: datetime
    request_id: str
    execution: int
    money: int  # nano-USD, as in Amount
    tokens: int
    retained_money: int
    retained_tokens: int


@dataclass
class BudgetChain:
    """The budget periods that apply to some keys. A reservation takes from all of them together."""

    tenant_id: int
    budget_periods: tuple[LeasedPeriod, ...]
    lease: LocalBudgetLease | None = None
    recalled_at: float = float("-inf")  # monotonic: what other gateways could release was waited for then
    contended_until: float = 0.0  # monotonic: until then nothing is leased beyond the need of a request
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one lease at a time
    ids: list[int] = field(init=False)
    starts: int = field(init=False)  # microseconds: admissions in [starts, ends) belong here
    ends: int = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [budget_period.id for budget_period in self.budget_periods]
        self.starts = max((_microseconds(budget_period.starts) for budget_period in self.budget_periods), default=0)
        self.ends = min(
            (_microseconds(budget_period.ends) for budget_period in self.budget_periods if budget_period.ends),
            default=NO_END,
        )

    @property
    def has_hard_budget(self) -> bool:
        """Return whether a budget can reject a request."""
        return any(budget_period.mode == "hard" for budget_period in self.budget_periods)

    @property
    def may_reduce_max_tokens(self) -> bool:
        """Return whether every hard budget of money or tokens allows a reduction of max_tokens."""
        hard = [
            budget_period
            for budget_period in self.budget_periods
            if budget_period.mode == "hard" and budget_period.unit != "requests"
        ]
        return all(budget_period.reduce_max_tokens for budget_period in hard)


class BudgetLeaseStore:
    """The functions that lease and return budgets in PostgreSQL, called with the system role.

    Methods may raise psycopg.Error, PoolTimeout or TimeoutError. The call may have been executed or not.
    """

    def __init__(self, database: AsyncConnectionPool, gateway_id: str, request_seconds: float) -> None:
        self._database = database
        self._gateway_id = gateway_id
        self._lease = timedelta(seconds=LEASE_SECONDS)
        self._longest = timedelta(seconds=request_seconds + SETTLING_SECONDS)

    async def open_budget_periods(
        self, tenant_id: int, project_id: int, key_id: int, at: datetime
    ) -> tuple[LeasedPeriod, ...]:
        rows = await self._ask(_OPEN, [tenant_id, tenant_id, project_id, key_id, at])
        return tuple(LeasedPeriod(*row) for row in rows)

    async def lease(
        self, chain: BudgetChain, amount: ReservedAmount, floor: ReservedAmount, old: LocalBudgetLease | None
    ) -> LocalBudgetLease | list[InsufficientBudget]:
        """Lease at least `floor`, or return what is missing. The same step returns the rest of the old lease."""
        requested_at = time.monotonic()
        requests = 1 if requested_at < chain.contended_until else REQUESTS_PER_LEASE
        rows = await self._ask(
            _LEASE,
            [
                chain.tenant_id,
                self._gateway_id,
                chain.ids,
                list(floor),
                list(amount),
                list(amount.times(requests)),
                self._lease,
                self._longest,
                old and old.id,
                old and old.fencing_token,
                list(old.left) if old else None,
            ],
        )
        if rows and rows[0][0] is not None:
            lease_id, fencing_token, money, tokens, requests = rows[0][:5]
            until = requested_at + LEASE_SECONDS - MARGIN_SECONDS
            granted = ReservedAmount(money, tokens, requests)
            return LocalBudgetLease(lease_id, fencing_token, granted, until, granted == amount)
        budget_periods = {budget_period.id: budget_period for budget_period in chain.budget_periods}
        needed = dict(zip(UNITS, floor, strict=True))
        return [
            InsufficientBudget(
                budget_periods[budget_period_id], room, elsewhere, until, needed[budget_periods[budget_period_id].unit]
            )
            for *_, budget_period_id, room, elsewhere, until in rows
        ]

    async def return_leases(self, leases: Sequence[LocalBudgetLease]) -> None:
        """Return the rest of leases from which nothing is admitted any more."""
        rows = [(lease.id, lease.fencing_token, *lease.left, lease.left == lease.granted) for lease in leases]
        await self._ask(_RETURN, [list(column) for column in zip(*rows, strict=True)])

    async def release_unused(self, parts: Sequence[UnusedPart]) -> None:
        """Release the unused parts of reservations before their settlement. A part that was released is skipped."""
        await self._ask(_RELEASE, [list(column) for column in zip(*parts, strict=True)])

    async def releasable(self, budget_periods: Sequence[int]) -> dict[int, int]:
        """Return the reserved amount of each budget period that may exceed its later usage."""
        return dict(await self._ask(_RELEASABLE, [list(budget_periods)]))

    async def load_prices(self, index: PriceIndex) -> None:
        """Add the rate cards that are new to the index."""
        rows = await self._ask(_RATE_CARDS, [index.newest])
        index.add(
            RateCard(version, tenant_id, model, Tier(tier), _microseconds(effective_from), decode_rates(rates))
            for version, tenant_id, model, tier, effective_from, rates in rows
        )

    async def _ask(self, query: LiteralString, parameters: Sequence[Any]) -> list[Any]:
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            return await (await connection.execute(query, parameters)).fetchall()


def _microseconds(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000 + at.microsecond
