"""Slices of budget windows, as gateways lease, spend and return them. Free of Django.

Windows live in Postgres and move by the functions of migration 0006; a request that a slice covers needs none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString, NamedTuple

from psycopg_pool import AsyncConnectionPool

from billing.pricing.pricing import PriceIndex, RateCard, Tier, decode_rates

LEASE_SECONDS = 15.0
MARGIN_SECONDS = 1.0  # before the lease's end, when admission from it stops
SETTLING_SECONDS = 60.0  # for the end of a request that ran to its deadline to be settled
REQUESTS_A_SLICE = 64
DATABASE_SECONDS = 0.5
NO_END = 2**62
UNITS = ("money", "tokens", "requests")

_OPEN: LiteralString = "SELECT * FROM billing_open_windows(%s, %s, %s, %s)"
_LEASE: LiteralString = """
SELECT * FROM billing_lease(%s, %s, %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s, %s, %s::bigint,
    %s::integer, %s::bigint[])
"""
_RETURN: LiteralString = """
SELECT billing_return(%s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::bigint[], %s::boolean[])
"""
_RELEASE: LiteralString = """
SELECT billing_release_unused(%s::bigint[], %s::integer[], %s::timestamptz[], %s::text[], %s::smallint[], %s::bigint[],
    %s::bigint[], %s::bigint[], %s::bigint[])
"""
_RELEASABLE: LiteralString = """
SELECT w.id, CASE w.unit WHEN 'requests' THEN 0 ELSE w.held - coalesce((
    SELECT sum(CASE w.unit WHEN 'money' THEN r.kept_money ELSE r.kept_tokens END)::bigint
    FROM billing_earlyrelease r JOIN billing_slice s ON s.id = r.slice_id WHERE w.id = ANY(s.windows)), 0) END
FROM billing_window w WHERE w.id = ANY(%s)
"""
_SHEETS: LiteralString = """
SELECT id, tenant_id, model, tier, effective_from, rates FROM billing_pricesheet WHERE id > %s ORDER BY id
"""


class ReservedAmount(NamedTuple):
    """What a request needs of each unit's windows."""

    money: int  # nano-USD
    tokens: int
    requests: int

    def times(self, number: int) -> ReservedAmount:
        return ReservedAmount(self.money * number, self.tokens * number, self.requests * number)


class LeasedPeriod(NamedTuple):
    """One period of a budget on a key's way."""

    id: int
    budget_id: int
    name: str
    unit: str
    period: str  # day, month, lifetime
    mode: str
    clamp: bool
    starts: datetime
    ends: datetime | None


@dataclass
class BudgetLease:
    """What this gateway may still admit without asking."""

    id: int
    fence: int
    granted: ReservedAmount
    until: float  # monotonic: nothing is admitted from it afterwards
    sealed: bool  # for one request alone: nothing of it can be returned but all
    left: ReservedAmount = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.granted

    def take(self, amount: ReservedAmount, now: float) -> bool:
        """Take the amount, if it is there and the lease has not ended."""
        left = self.left
        if now >= self.until or amount[0] > left[0] or amount[1] > left[1] or amount[2] > left[2]:
            return False
        self.left = ReservedAmount(left[0] - amount[0], left[1] - amount[1], left[2] - amount[2])
        return True


class InsufficientBudget(NamedTuple):
    """A window that has no room for what was asked."""

    window: LeasedPeriod
    room: int
    elsewhere: int  # how much of it slices hold that may not all be admitted
    until: datetime | None  # when the first of those is taken back at the latest
    needed: int

    @property
    def recallable(self) -> bool:
        return self.room + self.elsewhere >= self.needed


class UnusedPart(NamedTuple):
    """The unused part of an ended execution's reservation, and what its settlement needs of the rest."""

    slice_id: int
    fence: int
    admitted_at: datetime
    request_id: str
    execution: int
    money: int  # nano-USD, as in Amount
    tokens: int
    kept_money: int
    kept_tokens: int


@dataclass
class BudgetChain:
    """The windows that count for some keys: all of them are taken together."""

    tenant_id: int
    windows: tuple[LeasedPeriod, ...]
    slice: BudgetLease | None = None
    recalled_at: float = float("-inf")  # monotonic: what other gateways could release was waited for then
    scarce_until: float = 0.0  # monotonic: others need what there is, so nothing is leased beyond what a request needs
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one lease at a time
    ids: list[int] = field(init=False)
    starts: int = field(init=False)  # microseconds: admissions in [starts, ends) belong here
    ends: int = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [window.id for window in self.windows]
        self.starts = max((_microseconds(window.starts) for window in self.windows), default=0)
        self.ends = min((_microseconds(window.ends) for window in self.windows if window.ends), default=NO_END)

    @property
    def may_clamp(self) -> bool:
        """Whether the budgets would rather have a shorter answer than none."""
        hard = [window for window in self.windows if window.mode == "hard" and window.unit != "requests"]
        return all(window.clamp for window in hard)


class BudgetLeaseStore:
    """The one authority, asked over a pool whose sessions have the system's role. Methods may raise psycopg.Error,
    PoolTimeout or TimeoutError; what was asked then may have been done or not."""

    def __init__(self, database: AsyncConnectionPool, gateway_id: str, request_seconds: float) -> None:
        self._database = database
        self._gateway_id = gateway_id
        self._lease = timedelta(seconds=LEASE_SECONDS)
        self._longest = timedelta(seconds=request_seconds + SETTLING_SECONDS)

    async def open_windows(
        self, tenant_id: int, project_id: int, key_id: int, at: datetime
    ) -> tuple[LeasedPeriod, ...]:
        rows = await self._ask(_OPEN, [tenant_id, project_id, key_id, at])
        return tuple(LeasedPeriod(*row) for row in rows)

    async def lease(
        self, path: BudgetChain, amount: ReservedAmount, floor: ReservedAmount, old: BudgetLease | None
    ) -> BudgetLease | list[InsufficientBudget]:
        """Lease at least `floor`, or return what is missing. The same step returns the rest of the old lease."""
        asked = time.monotonic()
        requests = 1 if asked < path.scarce_until else REQUESTS_A_SLICE
        rows = await self._ask(
            _LEASE,
            [
                path.tenant_id,
                self._gateway_id,
                path.ids,
                list(floor),
                list(amount),
                list(amount.times(requests)),
                self._lease,
                self._longest,
                old and old.id,
                old and old.fence,
                list(old.left) if old else None,
            ],
        )
        if rows and rows[0][0] is not None:
            slice_id, fence, money, tokens, requests = rows[0][:5]
            until = asked + LEASE_SECONDS - MARGIN_SECONDS
            granted = ReservedAmount(money, tokens, requests)
            return BudgetLease(slice_id, fence, granted, until, granted == amount)
        windows = {window.id: window for window in path.windows}
        needed = dict(zip(UNITS, floor, strict=True))
        return [
            InsufficientBudget(windows[window_id], room, elsewhere, until, needed[windows[window_id].unit])
            for *_, window_id, room, elsewhere, until in rows
        ]

    async def give_back(self, slices: Sequence[BudgetLease]) -> None:
        """Return what is left of slices that nothing is admitted from any more."""
        rows = [(each.id, each.fence, *each.left, each.left == each.granted) for each in slices]
        await self._ask(_RETURN, [list(column) for column in zip(*rows, strict=True)])

    async def release_unused(self, parts: Sequence[UnusedPart]) -> None:
        """Release the unused parts of reservations before their settlement. A part that was released is skipped."""
        await self._ask(_RELEASE, [list(column) for column in zip(*parts, strict=True)])

    async def releasable(self, windows: Sequence[int]) -> dict[int, int]:
        """Return what is reserved of each window and may be more than what will be used."""
        return dict(await self._ask(_RELEASABLE, [list(windows)]))

    async def load_prices(self, index: PriceIndex) -> None:
        """Add the price sheets that are new."""
        rows = await self._ask(_SHEETS, [index.newest])
        index.add(
            RateCard(version, tenant_id, model, Tier(tier), _microseconds(effective_from), decode_rates(rates))
            for version, tenant_id, model, tier, effective_from, rates in rows
        )

    async def _ask(self, query: LiteralString, parameters: Sequence[Any]) -> list[Any]:
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            return await (await connection.execute(query, parameters)).fetchall()


def _microseconds(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000 + at.microsecond
