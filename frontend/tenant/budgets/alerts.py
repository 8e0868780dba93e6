"""The history of alerts, and whether they arrived."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime

from billing.budgets.alerts import alerts_of
from billing.models import BudgetAlert
from frontend.core.numbers import exact
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.amounts import BudgetAmount
from tenants.models import OutboxEmail, WebhookDelivery
from tenants.permissions import Permission
from tenants.webhooks.queries import deliveries

MOST = 20


@dataclass(frozen=True)
class BudgetDelivery:
    """A mail, or webhooks, and what became of it; `why` it did not arrive."""

    text: str
    kind: str
    why: str


@dataclass(frozen=True)
class BudgetAlertRow:
    budget: str
    url: str
    what: str
    kind: str
    used: BudgetAmount
    limit: BudgetAmount
    at: datetime
    told: tuple[BudgetDelivery, ...]


@dataclass(frozen=True)
class BudgetAlertsAlerts:
    rows: tuple[BudgetAlertRow, ...]
    webhooks_url: str


def alerts(visit: PageContext, budget_id: int | None = None) -> BudgetAlertsAlerts:
    """Return what was told lately, and whether it arrived."""
    rows = list(alerts_of(visit.tenant.pk, budget_id)[:MOST])
    told = how_told(rows, visit.tenant.pk)
    return BudgetAlertsAlerts(
        tuple(_alert(visit, row, told[row.pk]) for row in rows),
        visit.link("webhooks") if visit.may(Permission.WEBHOOKS_READ) else "",
    )


def _alert(visit: PageContext, row: BudgetAlert, told: tuple[BudgetDelivery, ...]) -> BudgetAlertRow:
    unit = row.budget.unit
    expected = row.threshold == BudgetAlert.FORECAST
    what = f"{row.threshold}% reached"
    if expected:
        what = f"Forecast {BudgetAmount.whole(unit, row.forecast or 0).text}"
    return BudgetAlertRow(
        row.budget.name,
        visit.url("budgets-detail", row.budget_id) if row.budget.active else "",
        what,
        "info" if expected else "bad" if int(row.threshold) >= 100 else "warn",
        BudgetAmount.whole(unit, row.used),
        BudgetAmount.whole(unit, row.limit),
        row.created_at,
        told,
    )


_MAILED = {OutboxEmail.State.QUEUED: "warn", OutboxEmail.State.SENT: "good", OutboxEmail.State.FAILED: "bad"}
_SENT = {
    WebhookDelivery.State.PENDING: ("pending", "warn"),
    WebhookDelivery.State.DELIVERED: ("delivered", "good"),
    WebhookDelivery.State.FAILED: ("failed", "bad"),
}


def how_told(rows: list[BudgetAlert], tenant_id: int | None) -> dict[int, tuple[BudgetDelivery, ...]]:
    """Return what became of the mail and the webhooks of each; `tenant_id` None: they are of several tenants."""
    sent: defaultdict[int | None, list[WebhookDelivery]] = defaultdict(list)
    if events := [row.event_id for row in rows if row.event_id]:
        for one in deliveries(tenant_id).filter(event_id__in=events):
            sent[one.event_id].append(one)
    return {row.pk: _told(row.email, sent[row.event_id]) for row in rows}


def _told(mail: OutboxEmail | None, sent: list[WebhookDelivery]) -> tuple[BudgetDelivery, ...]:
    """Return the mail, then the webhooks, those that fared alike together."""
    alike = Counter((one.state, _why(one)) for one in sent)
    hooks = []
    for (state, why), count in sorted(alike.items()):
        fared, kind = _SENT[WebhookDelivery.State(state)]
        hooks.append(BudgetDelivery(f"{exact(count)} webhooks {fared}" if count > 1 else f"Webhook {fared}", kind, why))
    if mail is None:
        return (BudgetDelivery("Email", "", "no longer stored"), *hooks)
    return (BudgetDelivery(f"Email {mail.state}", _MAILED[mail.state], mail.error), *hooks)


def _why(one: WebhookDelivery) -> str:
    """Why it has not arrived, as far as a try says."""
    tries = list(one.attempts.all())
    if one.state == WebhookDelivery.State.DELIVERED or not tries:
        return ""
    return tries[-1].error
