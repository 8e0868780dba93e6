"""Budget alerts: each threshold once in each period, by webhook and by email.

An alert's row is unique for (budget period, threshold). One transaction writes the rows of all thresholds that a check
found passed in a budget period, one webhook event for each of them, and one email for all. It writes the lowest
threshold first, so a concurrent check waits there and then finds the rows. A check that is killed leaves nothing
behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db import connection
from django.db.models import Q, QuerySet

from billing.budgets.forecast import Forecast, forecast_budget_period
from billing.currencies.amounts import exact_amount, whole_units
from billing.models import Budget, BudgetAlert, BudgetPeriod
from billing.models.budgets import LIMIT_SQL
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tenants.notifications.kinds import BUDGET_THRESHOLD
from tenants.notifications.notifying import Notice, notify
from tenants.outbox.email_outbox import enqueue_email
from tenants.webhooks.event_types import BUDGET_THRESHOLD_REACHED, BudgetAlertData
from tenants.webhooks.outbox import enqueue

ROLES = tuple(sorted(BUDGET_THRESHOLD.roles))
AFTERWARDS = timedelta(hours=1)  # how long a period is checked after its end, because its last requests settle then
# A hard budget rejects what does not fit, so its usage seldom reaches the limit exactly.
HARD_IS_FULL_AT = 99

# Budget periods under way that passed a threshold which has no alert yet. `budget_period_end` finds them, however many
# are over.
_PASSED = f"""
SELECT w.id, t.percent FROM billing_budgetperiod w
JOIN billing_budget b ON b.id = w.budget_id AND b.active
CROSS JOIN LATERAL unnest(b.thresholds) AS t (percent)
CROSS JOIN LATERAL (SELECT {LIMIT_SQL} AS whole) AS l
WHERE (w.period_end > %(since)s OR w.period_end IS NULL) AND w.period_start <= %(now)s AND l.whole > 0
    AND w.used * 100 >= l.whole::numeric * 1000000
        * CASE WHEN t.percent = 100 AND b.mode = 'hard' THEN %(full)s ELSE t.percent END
    AND NOT EXISTS (SELECT FROM billing_budgetalert a WHERE a.budget_period_id = w.id AND a.threshold = t.percent::text)
ORDER BY w.id, t.percent
"""  # noqa: S608  (a constant)


class BudgetStatus(NamedTuple):
    """The used amount and the limit of a budget period, in whole units."""

    used: int
    limit: int


def budget_status(budget: Budget, budget_period: BudgetPeriod, now: datetime) -> BudgetStatus:
    """Return the used amount, rounded up, and the limit of a budget period."""
    return BudgetStatus(whole_units(int(budget_period.used)), budget.limit_in(budget_period, now))


def check_thresholds(now: datetime | None = None) -> int:
    """Write alerts for every threshold that was reached. Return how many are new."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING), connection.cursor() as cursor:
        cursor.execute(_PASSED, {"now": now, "since": now - AFTERWARDS, "full": HARD_IS_FULL_AT})
        passed = defaultdict[int, list[str]](list)
        for budget_period_id, percent in cursor.fetchall():
            passed[budget_period_id].append(str(percent))
    return sum(_alert(budget_period_id, thresholds, now) for budget_period_id, thresholds in passed.items())


def check_forecasts(now: datetime | None = None) -> int:
    """Write alerts for every month that is forecast to exceed its limit and has not yet. Return how many are new."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        budgets = Budget.objects.all_tenants().filter(active=True, alert_forecast=True, period=Budget.Period.MONTH)
        open_budget_periods = BudgetPeriod.objects.all_tenants().filter(
            period_start__lte=now, period_end__gt=now, used__gt=0
        )
        alerted = BudgetAlert.objects.all_tenants().filter(threshold=BudgetAlert.FORECAST)
        rows = open_budget_periods.filter(budget_id__in=budgets.values("pk")).exclude(
            pk__in=alerted.values("budget_period_id")
        )
        wanted = list(rows.order_by("pk").values_list("pk", flat=True))
    return sum(_alert(pk, [BudgetAlert.FORECAST], now) for pk in wanted)


def _alert(budget_period_id: int, thresholds: Sequence[str], now: datetime) -> int:
    """Write the alerts that do not exist yet, with an event for each and one email for all of them.

    `thresholds` are in ascending order, or only the forecast. Return how many alerts are new.
    """
    with all_tenants_scope(BypassReason.BILLING):
        budget_period = BudgetPeriod.objects.all_tenants().get(pk=budget_period_id)
        budget = (
            Budget.objects.all_tenants()
            .select_related("tenant")
            .filter(pk=budget_period.budget_id, active=True)
            .first()
        )
        if budget is None or budget.tenant.status == Tenant.Status.PURGED:
            return 0
        status = budget_status(budget, budget_period, now)
        expected: Forecast | None = None
        if thresholds == [BudgetAlert.FORECAST]:
            expected = forecast_budget_period(budget, budget_period, now)
            if expected is None or not status.used < status.limit < expected.point:
                return 0
        is_muted = budget.alerts_muted_until is not None and budget.alerts_muted_until > now
        defaults = {
            "is_muted": is_muted,
            "tenant_id": budget.tenant_id,
            "budget": budget,
            "used": status.used,
            "limit": status.limit,
            "forecast": expected.point if expected else None,
        }
        found = [
            BudgetAlert.objects.all_tenants().get_or_create(
                budget_period=budget_period, threshold=threshold, defaults=defaults
            )
            for threshold in thresholds
        ]
        new = [row for row, is_new in found if is_new]
        if is_muted:
            return len(new)
        email = None
        if new:
            email = enqueue_email(budget.tenant_id, ROLES, *_mail(new, budget_period), kind=BUDGET_THRESHOLD)
            notify(BUDGET_THRESHOLD, budget.tenant_id, _notice(new[-1]), has_own_email=True)
        for row in new:
            event_key, data = f"budget:{budget_period.pk}:{row.threshold}", _event_data(row, budget_period, expected)
            row.event = enqueue(budget.tenant_id, BUDGET_THRESHOLD_REACHED, event_key, data)
            row.email = email
            row.save(update_fields=["event", "email"])
    return len(new)


def _event_data(alert: BudgetAlert, budget_period: BudgetPeriod, expected: Forecast | None) -> BudgetAlertData:
    budget = alert.budget
    names = ("id", "name", "unit", "period", "mode", "project_id", "key_id", "member_id")
    return BudgetAlertData(
        alert_id=alert.pk,
        budget={name: getattr(budget, name) for name in names},
        period_start=budget_period.period_start.isoformat(),
        period_end=budget_period.period_end.isoformat() if budget_period.period_end else None,
        currency=currency_of(budget.tenant_id) if budget.unit == BudgetPeriod.Unit.MONEY else None,
        threshold=alert.threshold,
        used=alert.used,
        limit=alert.limit,
        percent=alert.used * 100 // alert.limit,
        forecast={"point": expected.point, "low": expected.low, "high": expected.high} if expected else None,
    )


def _notice(alert: BudgetAlert) -> Notice:
    """Return the notification of an alert."""
    name = alert.budget.name
    if alert.threshold == BudgetAlert.FORECAST:
        text = Text("Budget %(name)s is forecast to be exceeded", name=name)
    else:
        used = f"{alert.used * 100 // alert.limit}%"
        text = Text("%(used)s of the budget %(name)s is used", used=used, name=name)
    return Notice(f"{alert.budget_period_id}:{alert.threshold}", text, f"budgets/{alert.budget_id}/")


def _mail(alerts: Sequence[BudgetAlert], budget_period: BudgetPeriod) -> tuple[str, str]:
    """Return the subject and the text of the email for alerts of one check, in ascending order."""
    alert = alerts[-1]
    budget = alert.budget
    used, limit = (_text(value, budget) for value in (alert.used, alert.limit))
    if alert.forecast is None:
        subject = f"{budget.name}: {alert.used * 100 // alert.limit}% of the budget used"
        text = f"{used} of {limit} of the budget “{budget.name}” of {budget.tenant.name} used."
        text += f"\n{_name_reached([each.threshold for each in alerts])}"
    else:
        subject = f"{budget.name}: budget forecast to be exceeded"
        text = (
            f"If use continues as it did, the budget “{budget.name}” of {budget.tenant.name} amounts to"
            f" {_text(alert.forecast, budget)} of {limit}. {used} are used."
        )
    if budget_period.period_end is not None:
        text += f"\nThe period ends on {budget_period.period_end:%-d %B %Y, %H:%M} UTC."
    if budget.mode == Budget.Mode.HARD:
        text += "\nRequests over the remaining budget are rejected."
    return subject, f"{text}\n\n{settings.MILLRACE.base_url}/t/{budget.tenant.slug}/budgets/"


def _name_reached(thresholds: Sequence[str]) -> str:
    """Name the highest threshold, and list the others."""
    *others, highest = (f"{threshold}%" for threshold in thresholds)
    if not others:
        return f"The {highest} alert threshold was reached."
    *first, last = others
    listed = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    return f"The highest alert threshold reached is {highest}. {listed} also reached."


def _text(amount: int, budget: Budget) -> str:
    if budget.unit != BudgetPeriod.Unit.MONEY:
        return f"{amount:,} {budget.unit}"
    return exact_amount(amount, currency_of(budget.tenant_id))


def alerts_of(tenant_id: int, budget_id: int | None = None) -> QuerySet[BudgetAlert]:
    """Return the alerts of a tenant or a budget, with their events and emails. The tenant scope must be open."""
    rows = (
        BudgetAlert.objects.for_tenant(tenant_id)
        .select_related("event", "email", "budget_period", "budget")
        .order_by("-pk")
    )
    return rows.filter(Q() if budget_id is None else Q(budget_id=budget_id))
