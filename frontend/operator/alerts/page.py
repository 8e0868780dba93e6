"""The alerts page: health events, and the budget alerts of all tenants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils.timesince import timesince
from django.utils.translation import gettext as _

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.models import BudgetAlert, BudgetPeriod
from billing.pricing.currencies import other_currencies
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, ListPage, keyset_page
from frontend.core.numbers import Money, compact, exact, share
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import deliveries_of
from millrace.apps.health.models import HealthEvent

PAGE_SIZE = 50
SHOWS = (("health", _lazy("Health")), ("budgets", _lazy("Budgets")), ("rules", _lazy("Rules")))


def query_of(ctx: PageContext) -> dict[str, Any]:
    """Return the filters of the query string. The default list is health issues."""
    show = ctx.query.get("show", "")
    show = show if show in dict(SHOWS) else "health"
    only_open = ctx.query.get("state") == "open"
    return {
        "show": show,
        "shows": [Choice(label, "?" if name == "health" else f"?show={name}", name == show) for name, label in SHOWS],
        "only_open": only_open,
        "states": (Choice(_("All"), "?", not only_open), Choice(_("Open"), "?state=open", only_open)),
    }


def events(ctx: PageContext) -> ListPage:
    """Return health events with their durations, newest first."""
    rows = HealthEvent.objects.all()
    if query_of(ctx)["only_open"]:
        rows = rows.filter(closed_at__isnull=True)
    page = keyset_page(ctx, rows, ctx.url("operator-alerts"), PAGE_SIZE)
    return replace(page, rows=[(row, _duration((row.closed_at or ctx.now) - row.opened_at)) for row in page.rows])


def alerts(ctx: PageContext) -> dict[str, Any]:
    """Return the budget alerts of all tenants, newest first."""
    rows = BudgetAlert.objects.all_tenants().select_related("budget", "email", "budget_period", "tenant")
    page = keyset_page(ctx, rows, ctx.url("operator-alerts"), PAGE_SIZE)
    deliveries, others = deliveries_of(list(page.rows), None), other_currencies()
    shown = [
        _alert(row, others.get(row.tenant_id, DEFAULT_CURRENCY)) | {"deliveries": deliveries[row.pk]}
        for row in page.rows
    ]
    return {"page": page, "rows": shown}


def _duration(time: timedelta) -> str:
    start = datetime(2000, 1, 1, tzinfo=UTC)
    return timesince(start, start + time, depth=1) if time >= timedelta(minutes=1) else _("Under a minute")


def _alert(row: BudgetAlert, currency: str) -> dict[str, Any]:
    return {
        "alert": row,
        "is_forecast": row.threshold == BudgetAlert.FORECAST,
        "used": _amount(row.budget.unit, row.used if row.forecast is None else row.forecast, currency),
        "limit": _amount(row.budget.unit, row.limit, currency, exact),
        "part": share(row.used, row.limit),
    }


def _amount(unit: str, amount: int, currency: str, number: Callable[[int], str] = compact) -> str:
    if unit == BudgetPeriod.Unit.MONEY:
        return Money.nano(amount, currency).text
    return f"{number(amount)} {unit}"
