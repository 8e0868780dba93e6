"""The overview's panels of money: spend, budget, forecast and notices."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _

from billing.budgets.alerts import alerts_of
from billing.budgets.forecast import Forecast, forecast_tenant
from billing.currencies.amounts import FEMTO_A_NANO
from billing.models import Budget, BudgetAlert, BudgetPeriod
from frontend.core.chart_marks import marks_of
from frontend.core.charts import Chart, Series
from frontend.core.date_ranges import billing_time_zone_of, days_of, month_of
from frontend.core.gauges import Gauge, Mark, percent
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, exact, share
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.page import BudgetUsage, statuses_of
from frontend.tenant.overview.usage import by_day

_DAY = timedelta(days=1)
MAX_NOTICES = 10  # notices of full budgets
_MIN_LABEL_DISTANCE = 17  # minimum distance of two labels, in percent of the gauge
_CODE = "429 budget_exceeded"
_PERIODS = {"day": _lazy("for today"), "month": _lazy("for this month"), "lifetime": _lazy("in total")}


def hard_budgets(ctx: PageContext) -> list[BudgetUsage]:
    """Return the tenant's hard budgets in money, smallest remaining part first."""
    filters = {"unit": BudgetPeriod.Unit.MONEY, "mode": Budget.Mode.HARD, "active": True}
    rows = Budget.objects.for_tenant(ctx.tenant).filter(project=None, key=None, member=None, **filters)
    return ctx.once("hard budgets", lambda: budget_statuses(ctx, list(rows)))


def monthly_forecast(ctx: PageContext) -> Forecast | None:
    """Return the forecast of the month's cost."""

    def find() -> Forecast | None:
        used = sum(row["cost_femto"] for row in by_day(ctx, *month_of(ctx)))
        return forecast_tenant(ctx.tenant.pk, ctx.now, billing_time_zone_of(ctx), used)

    return ctx.once("forecast", find)


def budget_statuses(ctx: PageContext, budgets: list[Budget]) -> list[BudgetUsage]:
    """Return the current status of budgets in money, smallest remaining part first."""

    def rank(status: BudgetUsage) -> int:
        taken = status.used.millionths + status.reserved.millionths
        return -taken * 10**6 // max(1, status.limit.millionths)

    return sorted(statuses_of(ctx, budgets), key=rank)


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
    chart = replace(chart, marks=marks_of(ctx), requests_url=ctx.url("requests"))
    shown = {"amount": amount, "chart": chart, "status": tightest, "gauge": None}
    if tightest is None:
        return shown
    return shown | {
        "period": {"day": _("per day"), "lifetime": _("in total")}.get(tightest.budget.period, ""),
        "used": share(tightest.used.millionths, tightest.limit.millionths),
        "gauge": _gauge(ctx, tightest, expected),
    }


def _chart(
    start: datetime, now: datetime, running: list[int], expected: Forecast | None, tightest: BudgetUsage | None
) -> Chart:
    last = expected.path[-1].day if expected else now.astimezone(UTC).date()
    at = days_of(start, datetime.combine(last + _DAY, datetime.min.time(), UTC))
    path = {forecast_day.day: forecast_day for forecast_day in expected.path} if expected else {}
    forecast = [path.get(day.date()) if day.date() >= now.astimezone(UTC).date() else None for day in at]
    actual = tuple(running[i] if i < len(running) else None for i in range(len(at)))
    series = [Series(_("Spend so far"), "spend", actual, "area")]
    upper, lower = _("80% interval, to"), _("80% interval, from")
    of = _("Spend by day, cumulative: %(spend)s until %(now)s") % {
        "spend": Money(running[-1]).text,
        "now": day_text(now, "j F"),
    }
    if expected:
        point = [None if day is None or day.point is None else day.point * FEMTO_A_NANO for day in forecast]
        point[len(running) - 1] = running[-1]  # the forecast starts where the spend ends
        high = tuple(None if day is None or day.high is None else day.high * FEMTO_A_NANO for day in forecast)
        low = tuple(None if day is None or day.low is None else day.low * FEMTO_A_NANO for day in forecast)
        series.append(Series(_("Forecast"), "forecast", tuple(point), "dash", Money.nano(expected.point).text))
        series.append(Series(upper, "forecast", high, "dash", in_legend=False))
        series.append(Series(lower, "forecast", low, "dash", in_legend=False))
        of += _(", forecast %(nano)s on %(last)s") % {
            "nano": Money.nano(expected.point).text,
            "last": day_text(last, "j F"),
        }
    top = max(running[-1], expected.high * FEMTO_A_NANO if expected else 0)
    if tightest and tightest.budget.period == Budget.Period.MONTH and tightest.limit.millionths <= 3 * top:
        series.append(Series(_("Hard limit"), "limit", (tightest.limit.millionths,) * len(at)))
        of += _(", against a limit of %(limit)s") % {"limit": tightest.limit.text}
    band = (upper, lower) if expected else None
    shaded = _("Shaded: 80% confidence") if expected else ""
    return Chart("spend", of, tuple(at), tuple(series), "usd", band=band, band_label=shaded, height=214)


def _gauge(ctx: PageContext, of: BudgetUsage, expected: Forecast | None) -> Gauge:
    monthly = of.budget.period == Budget.Period.MONTH
    forecast = Money.nano(expected.point) if expected and monthly else None
    limit = of.limit.millionths
    scale = max(limit * 17 // 15, of.used.millionths, min(forecast.femto if forecast else 0, limit * 2))
    sent = {
        row.threshold: row.created_at for row in alerts_of(ctx.tenant.pk, of.budget.pk) if _of_budget_period(row, of)
    }
    marks = [Mark(percent(limit, scale), _("Limit %(limit)s") % {"limit": of.limit.text}, is_limit=True)]
    for threshold in sorted(of.budget.thresholds):
        if threshold < 100:
            amount = limit * threshold // 100
            place = percent(amount, scale)
            near = any(abs(float(place) - float(mark.at)) < _MIN_LABEL_DISTANCE for mark in marks)
            passed = of.used.millionths >= amount
            words = _alert(threshold, sent.get(str(threshold)), amount, expected if monthly else None, passed=passed)
            marks.append(Mark(place, "" if near else words))
    used = share(of.used.millionths, limit)
    label = _("%(used)s of the %(limit)s limit used") % {"used": used, "limit": of.limit.text}
    if forecast:
        label += _("; forecast %(share)s by the end of the month") % {"share": share(forecast.femto, limit)}
    return Gauge(
        percent(of.used.millionths, scale), percent(forecast.femto, scale) if forecast else None, tuple(marks), label
    )


def _of_budget_period(row: BudgetAlert, of: BudgetUsage) -> bool:
    return of.budget_period is not None and row.budget_period_id == of.budget_period.pk


def _alert(threshold: int, sent: datetime | None, femto: int, expected: Forecast | None, *, passed: bool) -> str:
    if sent:
        return _("%(threshold)s%% alert, sent %(sent)s") % {"threshold": threshold, "sent": day_text(sent, "j M")}
    if passed:
        return _("%(threshold)s%% alert, due") % {"threshold": threshold}
    if day := crossing(expected, femto):
        return _("%(threshold)s%% alert, ≈ %(day)s") % {"threshold": threshold, "day": day_text(day, "j M")}
    return _("%(threshold)s%% alert") % {"threshold": threshold}


def crossing(expected: Forecast | None, femto: int) -> date | None:
    """Return the day on which the forecast exceeds an amount."""
    for day in expected.path if expected else ():
        if day.point is not None and day.point * FEMTO_A_NANO > femto:
            return day.day
    return None


def _around_code(sentence: str) -> dict[str, str]:
    """Return the parts of a sentence before and after the error code."""
    before, _code, after = sentence.partition(_CODE)
    return {"text": before, "after": after}


def notices(ctx: PageContext) -> list[dict[str, str]]:
    """Return notices for budgets that are full or will be: "bad" if requests are rejected now, else "warn"."""
    found = []
    budgets = hard_budgets(ctx)
    full = [status for status in budgets if status.is_full]
    for status in full[:MAX_NOTICES]:
        ends = status.budget_period.period_end if status.budget_period else None
        text = _("%(used)s of %(limit)s %(period)s used. Requests receive %(code)s until you raise it.")
        if ends:
            text = _(
                "%(used)s of %(limit)s %(period)s used. Requests receive %(code)s until %(ends)s, or until you raise"
                " it."
            )
        values = {
            "used": status.used.text,
            "limit": status.limit.text,
            "period": _PERIODS[status.budget.period],
            "code": _CODE,
            "ends": day_text(ends, "j F") if ends else "",
        }
        found.append(
            {
                "kind": "bad",
                "title": _("%(name)s: hard limit reached.") % {"name": status.budget.name},
                **_around_code(text % values),
            }
        )
    if len(full) > MAX_NOTICES:
        title = _("%(count)s more hard limits reached.") % {"count": exact(len(full) - MAX_NOTICES)}
        found.append({"kind": "bad", "title": title, **_around_code(_("Requests receive %(code)s.") % {"code": _CODE})})
    monthly = [status for status in budgets if status.budget.period == Budget.Period.MONTH and not status.is_full]
    expected = monthly_forecast(ctx) if monthly and not found else None
    if monthly and expected:
        least = min(monthly, key=lambda status: status.limit.millionths)
        day = crossing(expected, least.limit.millionths)
        if day:
            days = (expected.path[-1].day - day).days + 1
            text = _("At the current rate, requests receive %(code)s for the last %(days)s days of the month.")
            if days == 1:
                text = _("At the current rate, requests receive %(code)s on the last day of the month.")
            found.append(
                {
                    "kind": "warn",
                    "title": _("Hard limit likely on %(day)s.") % {"day": day_text(day, "j F")},
                    **_around_code(text % {"code": _CODE, "days": days}),
                }
            )
    return found
