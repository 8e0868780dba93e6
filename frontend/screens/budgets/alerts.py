"""The history of alerts, and whether they arrived."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from billing.alerts import alerts_of
from billing.models import BudgetAlert
from frontend.numbers import exact
from frontend.screens.budgets.amounts import Amount
from frontend.visits import Visit
from tenants.access import Permission
from tenants.models import WebhookDelivery
from tenants.webhooks.queries import deliveries

MOST = 20


@dataclass(frozen=True)
class AlertRow:
    budget: str
    url: str
    what: str
    kind: str
    used: Amount
    limit: Amount
    at: datetime
    told: str
    told_kind: str


@dataclass(frozen=True)
class Alerts:
    rows: tuple[AlertRow, ...]
    webhooks_url: str


def alerts(visit: Visit, budget_id: int | None = None) -> Alerts:
    """What was told lately, and whether it arrived."""
    rows = list(alerts_of(visit.tenant.pk, budget_id)[:MOST])
    events = [row.event_id for row in rows if row.event_id]
    sent: defaultdict[int, list[WebhookDelivery]] = defaultdict(list)
    if events:
        for one in deliveries(visit.tenant.pk).filter(event_id__in=events):
            sent[one.event_id].append(one)
    return Alerts(
        tuple(_alert(visit, row, sent[row.event_id or 0]) for row in rows),
        visit.link("webhooks") if visit.may(Permission.WEBHOOKS_READ) else "",
    )


def _alert(visit: Visit, row: BudgetAlert, sent: list[WebhookDelivery]) -> AlertRow:
    unit = row.budget.unit
    expected = row.threshold == BudgetAlert.FORECAST
    what = f"{row.threshold} % reached"
    if expected:
        what = f"Forecast {Amount.whole(unit, row.forecast or 0).text}"
    told, kind = _told(sent)
    return AlertRow(
        row.budget.name,
        visit.url("budgets-one", row.budget_id) if row.budget.active else "",
        what,
        "info" if expected else "bad" if int(row.threshold) >= 100 else "warn",
        Amount.whole(unit, row.used),
        Amount.whole(unit, row.limit),
        row.at,
        told,
        kind,
    )


def _told(sent: list[WebhookDelivery]) -> tuple[str, str]:
    """A mail is always sent; webhooks as far as there are any, and of those it is known whether they arrived."""
    if not sent:
        return "Mail", ""
    states = [one.state for one in sent]
    arrived = states.count(WebhookDelivery.State.DELIVERED)
    if arrived == len(states):
        return f"Mail, {exact(arrived)} webhook{'' if arrived == 1 else 's'}", "good"
    if WebhookDelivery.State.FAILED in states:
        return f"Mail; {exact(states.count(WebhookDelivery.State.FAILED))} webhook failed", "bad"
    return "Mail; webhook on its way", "warn"
