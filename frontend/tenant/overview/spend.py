"""The overview's panels of money: spend, budget, forecast and notices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from billing.amounts import FEMTO_A_NANO
from billing.budgets.alerts import alerts_of
from billing.budgets.forecast import Forecast, forecast_tenant
from billing.models import Budget, BudgetAlert, BudgetPeriod
from billing.models.budgets import current_periods
from frontend.core.charts import Chart, Series
from frontend.core.date_ranges import billing_time_zone_of, days_of, month_of
from frontend.core.gauges import Gauge, Mark, percent
from frontend.core.numbers import Money, share
from frontend.core.page_context import PageContext
from frontend.tenant.overview.usage import by_day

_DAY = timedelta(days=1)
_MIN_LABEL_DISTANCE = 17  # minimum distance of two labels, in percent of the gauge
FULL_AT = 99  # percent; the rest is too small for most requests
_PERIODS = {"day": "for today", "month": "for this month", "lifetime": "in total"}


@dataclass(frozen=True)
class OverviewStatus:
    """The status of a budget in money."""

    budget: Budget
    budget_period: BudgetPeriod | None
    used: Money
    reserved: Money
    limit: Money

    @property
    def left(self) -> Money:
        return Money(max(0, self.limit.femto - self.used.femto - self.reserved.femto))

    @property
    def is_full(self) -> bool:
        return self.used.femto * 100 >= self.limit.femto * FULL_AT


def hard_budgets(ctx: PageContext) -> list[OverviewStatus]:
    """Return the tenant's hard budgets in money, smallest remaining part first."""
    filters = {"unit": BudgetPeriod.Unit.MONEY, "mode": Budget.Mode.HARD, "active": True}
    rows = Budget.objects.for_tenant(ctx.tenant).filter(project=None, key=None, member=None, **filters)
    return ctx.once("hard budgets", lambda: budget_statuses(ctx, list(rows)))


def monthly_forecast(ctx: PageContext) -> Forecast | None:
    """Return the forecast of the month's cost."""
    return ctx.once("forecast", lambda: forecast_tenant(ctx.tenant.pk, ctx.now, billing_time_zone_of(ctx)))


def budget_statuses(ctx: PageContext, budgets: list[Budget]) -> list[OverviewStatus]:
    """Return the current status of budgets in money, smallest remaining part first."""
    now = ctx.now
    budget_periods = current_periods(ctx.tenant.pk, budgets, now)
    found = [_status_of(budget, budget_periods.get(budget.pk), now) for budget in budgets]
    return sorted(
        found, key=lambda status: -(status.used.femto + status.reserved.femto) * 10**6 // max(1, status.limit.femto)
    )


def _status_of(budget: Budget, budget_period: BudgetPeriod | None, now: datetime) -> OverviewStatus:
    limit = Money.nano(budget.limit_in(budget_period, now))
    if budget_period is None:
        return OverviewStatus(budget, None, Money(0), Money(0), limit)
    return OverviewStatus(
        budget, budget_period, Money(int(budget_period.used)), Money.nano(budget_period.reserved), limit
    )


def spend(ctx: PageContext) -> dict[str, Any]:
    """Return this month's spend, and the status of the tenant's hard budget with the smallest part left."""
    start, now = month_of(ctx)
    days = by_day(ctx, start, now)
    amount = Money(sum(row["cost_femto"] for row in days))
    expected = monthly_forecast(ctx)
    tightest = next(iter(hard_budgets(ctx)), None)
    running: list[int] = []
    for row in days:
        running.append(row["cost_femto"] + (running[-1] if running else 0))
    chart = _chart(start, now, running, expected, tightest)
    shown = {"amount": amount, "chart": chart, "status": tightest}
    if tightest is None:
        return shown
    return shown | {
        "period": {"day": "per day", "lifetime": "in total"}.get(tightest.budget.period, ""),
        "used": share(tightest.used.femto, tightest.limit.femto),
        "gauge": _gauge(ctx, tightest, expected),
    }


def _chart(
    start: datetime, now: datetime, running: list[int], expected: Forecast | None, tightest: OverviewStatus | None
) -> Chart:
    last = expected.path[-1].day if expected else now.astimezone(UTC).date()
    at = days_of(start, datetime.combine(last + _DAY, datetime.min.time(), UTC))
    path = {forecast_day.day: forecast_day for forecast_day in expected.path} if expected else {}
    forecast = [path.get(day.date()) if day.date() >= now.astimezone(UTC).date() else None for day in at]
    actual = tuple(running[i] if i < len(running) else None for i in range(len(at)))
    series = [Series("Spend so far", "spend", actual, "area")]
    of = f"Spend by day, cumulative: {Money(running[-1]).text} until {now:%-d %B}"
    if expected:
        point = [None if day is None or day.point is None else day.point * FEMTO_A_NANO for day in forecast]
        point[len(running) - 1] = running[-1]  # the forecast starts where the spend ends
        high = tuple(None if day is None or day.high is None else day.high * FEMTO_A_NANO for day in forecast)
        low = tuple(None if day is None or day.low is None else day.low * FEMTO_A_NANO for day in forecast)
        series.append(Series("Forecast", "forecast", tuple(point), "dash", Money.nano(expected.point).text))
        series.append(Series("80% interval, to", "forecast", high, "dash", in_legend=False))
        series.append(Series("80% interval, from", "forecast", low, "dash", in_legend=False))
        of += f", forecast {Money.nano(expected.point).text} on {last:%-d %B}"
    top = max(running[-1], expected.high * FEMTO_A_NANO if expected else 0)
    if tightest and tightest.budget.period == Budget.Period.MONTH and tightest.limit.femto <= 3 * top:
        series.append(Series("Hard limit", "limit", (tightest.limit.femto,) * len(at)))
        of += f", against a limit of {tightest.limit.text}"
    band = ("80% interval, to", "80% interval, from") if expected else None
    shaded = "Shaded: 80% confidence" if expected else ""
    return Chart("spend", of, tuple(at), tuple(series), "usd", band=band, band_label=shaded, height=214)


def _gauge(ctx: PageContext, of: OverviewStatus, expected: Forecast | None) -> Gauge:
    monthly = of.budget.period == Budget.Period.MONTH
    forecast = Money.nano(expected.point) if expected and monthly else None
    scale = max(of.limit.femto * 17 // 15, of.used.femto, min(forecast.femto if forecast else 0, of.limit.femto * 2))
    sent = {
        row.threshold: row.created_at for row in alerts_of(ctx.tenant.pk, of.budget.pk) if _of_budget_period(row, of)
    }
    marks = [Mark(percent(of.limit.femto, scale), f"Limit {of.limit.text}", is_limit=True)]
    for threshold in sorted(of.budget.thresholds):
        if threshold < 100:
            amount = of.limit.femto * threshold // 100
            place = percent(amount, scale)
            near = any(abs(float(place) - float(mark.at)) < _MIN_LABEL_DISTANCE for mark in marks)
            passed = of.used.femto >= amount
            words = _alert(threshold, sent.get(str(threshold)), amount, expected if monthly else None, passed=passed)
            marks.append(Mark(place, "" if near else words))
    used = share(of.used.femto, of.limit.femto)
    label = f"{used} of the {of.limit.text} limit used"
    if forecast:
        label += f"; forecast {share(forecast.femto, of.limit.femto)} by the end of the month"
    return Gauge(
        percent(of.used.femto, scale), percent(forecast.femto, scale) if forecast else None, tuple(marks), label
    )


def _of_budget_period(row: BudgetAlert, of: OverviewStatus) -> bool:
    return of.budget_period is not None and row.budget_period_id == of.budget_period.pk


def _alert(threshold: int, sent: datetime | None, femto: int, expected: Forecast | None, *, passed: bool) -> str:
    if sent:
        return f"{threshold}% alert, sent {sent:%-d %b}"
    if passed:
        return f"{threshold}% alert, due"
    day = crossing(expected, femto)
    return f"{threshold}% alert, ≈ {day:%-d %b}" if day else f"{threshold}% alert"


def crossing(expected: Forecast | None, femto: int) -> date | None:
    """Return the day on which the forecast exceeds an amount."""
    for day in expected.path if expected else ():
        if day.point is not None and day.point * FEMTO_A_NANO > femto:
            return day.day
    return None


def notices(ctx: PageContext) -> list[dict[str, str]]:
    """Return notices for budgets that are full or will be: "bad" if requests are rejected now, else "warn"."""
    found = []
    budgets = hard_budgets(ctx)
    for status in budgets:
        if status.is_full:
            ends = status.budget_period.period_end if status.budget_period else None
            until = f" until {ends:%-d %B}" if ends else ""
            text = f"{status.used.text} of {status.limit.text} {_PERIODS[status.budget.period]} used. Requests receive"
            found.append(
                {
                    "kind": "bad",
                    "title": f"{status.budget.name}: hard limit reached.",
                    "text": text,
                    "after": f"{until}, or until you raise it." if until else " until you raise it.",
                }
            )
    monthly = [status for status in budgets if status.budget.period == Budget.Period.MONTH and not status.is_full]
    expected = monthly_forecast(ctx) if monthly and not found else None
    if monthly and expected:
        least = min(monthly, key=lambda status: status.limit.femto)
        day = crossing(expected, least.limit.femto)
        if day:
            days = (expected.path[-1].day - day).days + 1
            rest = "on the last day" if days == 1 else f"for the last {days} days"
            found.append(
                {
                    "kind": "warn",
                    "title": f"Hard limit likely on {day:%-d %B}.",
                    "text": "At the current rate, requests receive",
                    "after": f" {rest} of the month.",
                }
            )
    return found
