"""Forecasts of the current month of a budget or a tenant, from the daily sums of usage. See projection.py.

The tenant scope or an all-tenants scope must be open. Days are in UTC, like the sums. The forecast starts from the used
amount of the budget period.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import F, QuerySet, Sum
from django.db.models.functions import TruncDay

from billing.budgets.projection import FEWEST_DAYS, fit, project
from billing.currencies.amounts import FEMTO_A_NANO, whole_units
from billing.metering.usage import UsageReport, sums, total
from billing.models import Budget, BudgetPeriod, UsageRollup, token_sum, totals_of
from billing.periods import billing_zone, month_bounds
from tenants.models import ApiKey

HISTORY = timedelta(days=56)  # eight weeks; older usage says little about today
_COUNTED = {
    BudgetPeriod.Unit.MONEY: F("cost_femto"),
    BudgetPeriod.Unit.REQUESTS: F("completed") + F("cancelled"),
    BudgetPeriod.Unit.TOKENS: token_sum(),
}
_DAY = timedelta(days=1)


class Day(NamedTuple):
    """The usage from the period's start to the end of a day, actual or forecast, in the budget's unit."""

    day: date
    actual: int | None  # past days, and today until now
    point: int | None = None  # today and future days
    low: int | None = None
    high: int | None = None


class Forecast(NamedTuple):
    """The forecast of a period: `low` to `high` is an 80% prediction interval."""

    point: int
    low: int
    high: int
    path: tuple[Day, ...]


def forecast_budget_period(budget: Budget, budget_period: BudgetPeriod, now: datetime | None = None) -> Forecast | None:
    """Forecast a budget's current month. None: another period, or less than three days of usage."""
    if budget.period != Budget.Period.MONTH or budget_period.period_end is None:
        return None
    unit = BudgetPeriod.Unit(budget.unit)
    daily = _daily(_rollups(budget), unit, budget_period.period_start, now := now or datetime.now(UTC))
    return _forecast(
        daily, budget_period.period_start, budget_period.period_end, whole_units(int(budget_period.used)), now
    )


def forecast_tenant(
    tenant_id: int, now: datetime | None = None, zone: ZoneInfo | None = None, used_femto: int | None = None
) -> Forecast | None:
    """Forecast the cost of a tenant's current month in nano-USD. None: less than three days of usage.

    Args:
        zone: the time zone of the tenant's billing entity, if it is known.
        used_femto: the cost of the month until now, if it is known.
    """
    now, zone = now or datetime.now(UTC), zone or billing_zone(tenant_id)
    local = now.astimezone(zone)
    start, end = month_bounds(zone.key, local.year, local.month)
    rollups = UsageRollup.objects.for_tenant(tenant_id).filter(bucket=totals_of(UsageRollup.Bucket.DAY))
    daily = _daily(rollups, BudgetPeriod.Unit.MONEY, start, now)
    if used_femto is None:
        used_femto = total(sums(UsageReport(tenant_id, start=start, end=now)))["cost_femto"]
    return _forecast(daily, start, end, whole_units(used_femto), now)


def _rollups(budget: Budget) -> QuerySet[UsageRollup]:
    """Return the rollups of days to which the budget applies."""
    rows = UsageRollup.objects.for_tenant(budget.tenant_id)
    by_key = rows.filter(bucket=UsageRollup.Bucket.DAY)
    if budget.member_id is not None:
        keys = ApiKey.objects.for_tenant(budget.tenant_id).filter(created_by_id=budget.member_id)
        return by_key.filter(key_id__in=keys.values("pk"))
    if budget.key_id is not None:
        return by_key.filter(key_id=budget.key_id)
    totals = rows.filter(bucket=totals_of(UsageRollup.Bucket.DAY))
    return totals if budget.project_id is None else totals.filter(project_id=budget.project_id)


def _daily(rows: QuerySet[UsageRollup], unit: BudgetPeriod.Unit, since: datetime, now: datetime) -> Mapping[date, int]:
    """Return the usage by day in whole units, of the last eight weeks and of the period. `rows` are of days."""
    first = min(now - HISTORY, since).astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = rows.filter(start__gte=first, start__lte=now)
    sums = days.annotate(day=TruncDay("start", tzinfo=UTC)).values("day").annotate(sum=Sum(_COUNTED[unit]))
    divisor = FEMTO_A_NANO if unit == BudgetPeriod.Unit.MONEY else 1
    return {row["day"].date(): int(row["sum"]) // divisor for row in sums.order_by("day")}


def _forecast(daily: Mapping[date, int], start: datetime, end: datetime, used: int, now: datetime) -> Forecast | None:
    today = now.astimezone(UTC).date()
    before = sorted(day for day in daily if day < today)
    if now >= end or not before or (today - before[0]).days < FEWEST_DAYS:
        return None
    first = max(before[0], today - HISTORY)
    whole = [daily.get(first + number * _DAY, 0) for number in range((today - first).days)]
    fitted = fit(first, whole)
    if fitted is None:
        return None
    last = (end.astimezone(UTC) - timedelta(microseconds=1)).date()
    rest = (min(end, _midnight(today + _DAY)) - now) / _DAY
    points = project(fitted, today, rest, (last - today).days + 1)
    path = [Day(day, actual) for day, actual in _gone_by(daily, start.astimezone(UTC).date(), today, used)]
    path.append(Day(today, used, *(used + value for value in points[0][1:])))
    path += [Day(each.day, None, *(used + value for value in each[1:])) for each in points[1:]]
    point, low, high = (used + value for value in points[-1][1:])
    return Forecast(point, low, high, tuple(path))


def _gone_by(daily: Mapping[date, int], start: date, today: date, used: int) -> list[tuple[date, int]]:
    """Return the sums up to the end of each day before today, counted back from what is used now."""
    found, left = [], used - daily.get(today, 0)
    day = today - _DAY
    while day >= start:
        found.append((day, max(0, left)))
        left -= daily.get(day, 0)
        day -= _DAY
    return found[::-1]


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
