"""Replays of a budget on the usage of the previous billing month, from the hourly sums of usage.

The cost of a replay does not depend on the number of requests: a month has 744 hours at most. The number of rejected
requests is an estimate, because the requests of an hour are taken as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from django.db.models import F, Sum
from django.db.models.expressions import Combinable

from billing.currencies.amounts import FEMTO_A_NANO
from billing.models import Budget, token_sum
from billing.periods import billing_zone, month_bounds
from millrace.apps.policy_results.dry_runs import DryRunScope, period_start

_REQUESTS = F("completed") + F("cancelled")
_COLUMNS: dict[str, Combinable] = {"money": F("cost_femto"), "tokens": token_sum(), "requests": _REQUESTS}


@dataclass(frozen=True)
class ReplayedDay:
    """The usage of the budget's period until the end of a day, and the part of it that the budget rejects.

    Amounts are femto-USD, tokens or requests.
    """

    day: datetime  # its start in the billing time zone
    accepted: int
    rejected: int


@dataclass(frozen=True)
class BudgetReplay:
    """The result of a replay. Amounts are femto-USD, tokens or requests.

    `peak` is the largest usage of a period. `passed` has the first hour in which each threshold was passed.
    """

    start: datetime
    zone: ZoneInfo
    days: tuple[ReplayedDay, ...]
    used: int
    peak: int
    requests: int
    rejected: int
    rejected_amount: int
    passed: tuple[tuple[int, datetime], ...]
    reached_days: int  # days with rejections


def replay_budget(
    scope: DryRunScope, unit: str, period: str, amount: int | None, thresholds: Sequence[int] = ()
) -> BudgetReplay:
    """Replay a hard budget of `amount` (nano-USD, tokens or requests; None: no limit) on the previous billing month.

    Every period starts empty. A lifetime budget starts with the month. Call inside the tenant's scope.
    """
    zone = billing_zone(scope.tenant_id)
    local = datetime.now(UTC).astimezone(zone)
    last = local.replace(day=1) - timedelta(days=1)
    start, end = month_bounds(zone.key, last.year, last.month)
    limit = None if amount is None else amount * FEMTO_A_NANO if unit == "money" else amount
    hours = (
        scope.hours(start, end)
        .order_by("start")
        .values("start")
        .annotate(used=Sum(_COLUMNS[unit]), requests=Sum(_REQUESTS))
    )
    run = _Run(period, limit, thresholds, zone)
    for hour, used, requests in hours.values_list("start", "used", "requests"):
        run.take(hour, int(used or 0), int(requests or 0))
    return run.result(start, end)


class _Run:
    """The state of a replay between two hours."""

    def __init__(self, period: str, limit: int | None, thresholds: Sequence[int], zone: ZoneInfo) -> None:
        self._period, self._limit, self._zone = period, limit, zone
        self._thresholds = sorted(set(thresholds))
        self._window: datetime | None = None
        self._wanted = self._accepted = 0  # amounts in the current period
        self._days: dict[datetime, tuple[int, int]] = {}
        self._passed: dict[int, datetime] = {}
        self._reached: set[datetime] = set()
        self._used = self._peak = self._requests = self._rejected = self._rejected_amount = 0

    def take(self, hour: datetime, used: int, requests: int) -> None:
        """Add the usage of an hour."""
        begun = period_start(self._period, hour, self._zone)
        if begun != self._window:
            self._window, self._wanted, self._accepted = begun, 0, 0
        rejected = 0 if self._limit is None else max(0, used - max(0, self._limit - self._accepted))
        day = period_start(Budget.Period.DAY, hour, self._zone)
        self._wanted += used
        self._accepted += used - rejected
        self._days[day] = (self._accepted, self._wanted - self._accepted)
        for percent in self._thresholds if self._limit else ():
            if self._wanted * 100 >= (self._limit or 0) * percent:
                self._passed.setdefault(percent, hour)
        if rejected:
            self._reached.add(day)
            self._rejected += -(-requests * rejected // used)
            self._rejected_amount += rejected
        self._used += used
        self._requests += requests
        self._peak = max(self._peak, self._wanted)

    def result(self, start: datetime, end: datetime) -> BudgetReplay:
        """Return the result, with every day of the month. A day without usage repeats the sum of the previous day."""
        days: list[ReplayedDay] = []
        at = start.astimezone(self._zone)
        before = (0, 0)
        while at.astimezone(UTC) < end:
            if self._period == Budget.Period.DAY:
                before = (0, 0)
            before = self._days.get(at.astimezone(UTC), before)
            days.append(ReplayedDay(at, *before))
            at += timedelta(days=1)  # by the clocks of the zone
        return BudgetReplay(
            start,
            self._zone,
            tuple(days),
            self._used,
            self._peak,
            self._requests,
            self._rejected,
            self._rejected_amount,
            tuple(sorted(self._passed.items())),
            len(self._reached),
        )
