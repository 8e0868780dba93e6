"""Budget alerts: each threshold once in each period, by webhook and by email.

An alert's row is unique for (window, threshold). One transaction writes the rows of all thresholds that a check found
passed in a window, one webhook event for each of them, and one email for all. It writes the lowest threshold first, so
a concurrent check waits there and then finds the rows. A check that is killed leaves nothing behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from django.db import connection
from django.db.models import Q, QuerySet

from billing.amounts import decimal
from billing.budgets.forecast import Forecast, forecast_window
from billing.models import Budget, BudgetAlert, Window
from millrace.conf.environment import platform_settings
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tenants.outbox.email_outbox import enqueue_email
from tenants.webhooks.outbox import enqueue

ROLES = ("owner", "admin", "billing")
AFTERWARDS = timedelta(hours=1)  # how long after its end a period is checked: its last requests settle then
MILLIONTHS = 10**6
# A hard budget refuses what does not fit, so its use seldom ends at its limit to the nano-dollar.
HARD_IS_FULL_AT = 99

# Windows under way that passed a threshold which has no alert yet. `window_end` finds them, however many are over.
_PASSED = """
SELECT w.id, t.percent FROM billing_window w
JOIN billing_budget b ON b.id = w.budget_id AND b.active
CROSS JOIN LATERAL unnest(b.thresholds) AS t (percent)
CROSS JOIN LATERAL (SELECT b.amount + w.carried
    + CASE WHEN b.raise_until > %(now)s THEN b.raise_amount ELSE 0 END AS whole) AS l
WHERE (w.period_end > %(since)s OR w.period_end IS NULL) AND w.period_start <= %(now)s AND l.whole > 0
    AND w.used * 100 >= l.whole::numeric * 1000000
        * CASE WHEN t.percent = 100 AND b.mode = 'hard' THEN %(full)s ELSE t.percent END
    AND NOT EXISTS (SELECT FROM billing_budgetalert a WHERE a.window_id = w.id AND a.threshold = t.percent::text)
ORDER BY w.id, t.percent
"""


class BudgetStatus(NamedTuple):
    """How a period of a budget stands, in whole units."""

    used: int
    limit: int


def standing(budget: Budget, window: Window, now: datetime) -> BudgetStatus:
    """Return what was used of it, rounded up, and what may be used in all."""
    raised = budget.raise_amount if budget.raise_until is not None and budget.raise_until > now else 0
    return BudgetStatus(-(-int(window.used) // MILLIONTHS), budget.amount + window.carried + raised)


def check_thresholds(now: datetime | None = None) -> int:
    """Alert for every threshold that was passed; gives how many are new."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING), connection.cursor() as cursor:
        cursor.execute(_PASSED, {"now": now, "since": now - AFTERWARDS, "full": HARD_IS_FULL_AT})
        passed = defaultdict[int, list[str]](list)
        for window_id, percent in cursor.fetchall():
            passed[window_id].append(str(percent))
    return sum(_alert(window_id, thresholds, now) for window_id, thresholds in passed.items())


def check_forecasts(now: datetime | None = None) -> int:
    """Alert for every month whose forecast passes the limit, and whose use has not; gives how many are new."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        budgets = Budget.objects.all_tenants().filter(active=True, alert_forecast=True, period=Budget.Period.MONTH)
        open_windows = Window.objects.all_tenants().filter(period_start__lte=now, period_end__gt=now, used__gt=0)
        alerted = BudgetAlert.objects.all_tenants().filter(threshold=BudgetAlert.FORECAST)
        rows = open_windows.filter(budget_id__in=budgets.values("pk")).exclude(pk__in=alerted.values("window_id"))
        wanted = list(rows.order_by("pk").values_list("pk", flat=True))
    return sum(_alert(pk, [BudgetAlert.FORECAST], now) for pk in wanted)


def _alert(window_id: int, thresholds: Sequence[str], now: datetime) -> int:
    """Write the alerts that do not exist yet, with an event for each and one email for all of them.

    `thresholds` are in ascending order, or the forecast alone. Returns how many alerts are new.
    """
    with all_tenants_scope(BypassReason.BILLING):
        window = Window.objects.all_tenants().get(pk=window_id)
        budget = Budget.objects.all_tenants().select_related("tenant").filter(pk=window.budget_id, active=True).first()
        if budget is None or budget.tenant.status == Tenant.Status.PURGED:
            return 0
        stands = standing(budget, window, now)
        expected: Forecast | None = None
        if thresholds == [BudgetAlert.FORECAST]:
            expected = forecast_window(budget, window, now)
            if expected is None or not stands.used < stands.limit < expected.point:
                return 0
        defaults = {
            "tenant_id": budget.tenant_id,
            "budget": budget,
            "used": stands.used,
            "limit": stands.limit,
            "forecast": expected.point if expected else None,
        }
        found = [
            BudgetAlert.objects.all_tenants().get_or_create(window=window, threshold=threshold, defaults=defaults)
            for threshold in thresholds
        ]
        new = [row for row, is_new in found if is_new]
        mail = enqueue_email(budget.tenant_id, ROLES, *_mail(new, window)) if new else None
        for row in new:
            event_key, payload = f"budget:{window.pk}:{row.threshold}", _payload(row, window, expected)
            row.event = enqueue(budget.tenant_id, "budget.threshold_reached", event_key, payload)
            row.mail = mail
            row.save(update_fields=["event", "mail"])
    return len(new)


def _payload(alert: BudgetAlert, window: Window, expected: Forecast | None) -> dict[str, object]:
    budget = alert.budget
    return {
        "alert_id": alert.pk,
        "budget": {name: getattr(budget, name) for name in ("id", "name", "unit", "period", "mode")}
        | {name: getattr(budget, name) for name in ("project_id", "key_id", "member_id")},
        "period_start": window.period_start.isoformat(),
        "period_end": window.period_end and window.period_end.isoformat(),
        "threshold": alert.threshold,
        "used": alert.used,
        "limit": alert.limit,
        "percent": alert.used * 100 // alert.limit,
        "forecast": expected and {"point": expected.point, "low": expected.low, "high": expected.high},
    }


def _mail(alerts: Sequence[BudgetAlert], window: Window) -> tuple[str, str]:
    """Return the subject and the text of the email for alerts of one check, in ascending order."""
    alert = alerts[-1]
    budget = alert.budget
    used, limit = (_text(value, budget) for value in (alert.used, alert.limit))
    if alert.forecast is None:
        subject = f"{budget.name}: {alert.used * 100 // alert.limit}% of the budget used"
        text = f"{used} of {limit} of the budget “{budget.name}” of {budget.tenant.name} used."
        text += f"\n{_reached([each.threshold for each in alerts])}"
    else:
        subject = f"{budget.name}: budget forecast to be exceeded"
        text = (
            f"If use continues as it did, the budget “{budget.name}” of {budget.tenant.name} amounts to"
            f" {_text(alert.forecast, budget)} of {limit}. {used} are used."
        )
    if window.period_end is not None:
        text += f"\nThe period ends on {window.period_end:%-d %B %Y, %H:%M} UTC."
    if budget.mode == Budget.Mode.HARD:
        text += "\nRequests over the remaining budget are rejected."
    return subject, f"{text}\n\n{platform_settings().base_url}/t/{budget.tenant.slug}/budgets/"


def _reached(thresholds: Sequence[str]) -> str:
    """Name the highest threshold, and list the others."""
    *others, highest = (f"{threshold}%" for threshold in thresholds)
    if not others:
        return f"The {highest} alert threshold was reached."
    *first, last = others
    listed = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    return f"The highest alert threshold reached is {highest}. {listed} also reached."


def _text(amount: int, budget: Budget) -> str:
    return f"${Decimal(decimal(amount, 9, 2)):,}" if budget.unit == Window.Unit.MONEY else f"{amount:,} {budget.unit}"


def alerts_of(tenant_id: int, budget_id: int | None = None) -> QuerySet[BudgetAlert]:
    """Return the tenant's alerts, or one budget's, with their events and mails; the scope must be open."""
    rows = BudgetAlert.objects.for_tenant(tenant_id).select_related("event", "mail", "window", "budget").order_by("-pk")
    return rows.filter(Q() if budget_id is None else Q(budget_id=budget_id))
