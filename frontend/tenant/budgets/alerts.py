"""The history of budget alerts and their deliveries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from billing.budgets.alerts import alerts_of
from billing.models import BudgetAlert
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import exact
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.amounts import BudgetAmount
from millrace.apps.alerts.models import RuleAlert
from tenants.models import OutboxEmail, WebhookDelivery
from tenants.webhooks.queries import deliveries

MAX_ALERTS = 20


@dataclass(frozen=True)
class BudgetDelivery:
    """The delivery of an alert by email or webhooks. `reason` is the error of a failed delivery."""

    text: str
    kind: str
    reason: str


def alerts(ctx: PageContext, budget_id: int | None = None) -> list[dict[str, Any]]:
    """Return the latest alerts with their deliveries."""
    return alert_rows(ctx, list(alerts_of(ctx.tenant.pk, budget_id)[:MAX_ALERTS]))


def alert_rows(ctx: PageContext, rows: list[BudgetAlert]) -> list[dict[str, Any]]:
    """Return alerts for the template, with their deliveries."""
    deliveries = deliveries_of(rows, ctx.tenant.pk)
    return [_alert(row) | {"deliveries": deliveries[row.pk]} for row in rows]


def _alert(row: BudgetAlert) -> dict[str, Any]:
    unit = row.budget.unit
    expected = row.threshold == BudgetAlert.FORECAST
    what = (
        _("Forecast %(whole)s") % {"whole": BudgetAmount.from_units(unit, row.forecast or 0).text}
        if expected
        else _("%(threshold)s%% reached") % {"threshold": row.threshold}
    )
    return {
        "alert": row,
        "what": what,
        "kind": "info" if expected else "bad" if int(row.threshold) >= 100 else "warn",
        "used": BudgetAmount.from_units(unit, row.used),
        "limit": BudgetAmount.from_units(unit, row.limit),
    }


_EMAIL_STATES: dict[str, tuple[str, str]] = {
    OutboxEmail.State.QUEUED: (_lazy("queued"), "warn"),
    OutboxEmail.State.SENT: (_lazy("sent"), "good"),
    OutboxEmail.State.FAILED: (_lazy("failed"), "bad"),
}
_WEBHOOK_STATES = {
    WebhookDelivery.State.PENDING: (_lazy("pending"), "warn"),
    WebhookDelivery.State.WAITING: (_lazy("waiting"), "info"),
    WebhookDelivery.State.DELIVERED: (_lazy("delivered"), "good"),
    WebhookDelivery.State.FAILED: (_lazy("failed"), "bad"),
}


def deliveries_of(
    rows: Sequence[BudgetAlert | RuleAlert], tenant_id: int | None
) -> dict[int, tuple[BudgetDelivery, ...]]:
    """Return the email and webhook deliveries of each alert. `tenant_id` is None for alerts of several tenants."""
    sent: defaultdict[int | None, list[WebhookDelivery]] = defaultdict(list)
    if events := [row.event_id for row in rows if row.event_id]:
        for delivery in deliveries(tenant_id).filter(event_id__in=events):
            sent[delivery.event_id].append(delivery)
    return {
        row.pk: (BudgetDelivery(_("Muted"), "", ""),) if row.is_muted else _delivery_rows(row.email, sent[row.event_id])
        for row in rows
    }


def _delivery_rows(mail: OutboxEmail | None, sent: list[WebhookDelivery]) -> tuple[BudgetDelivery, ...]:
    """Return the email, then the webhooks, grouped by state and error."""
    alike = Counter((delivery.state, _last_error(delivery)) for delivery in sent)
    hooks = []
    for (state, reason), count in sorted(alike.items()):
        fared, kind = _WEBHOOK_STATES[WebhookDelivery.State(state)]
        hooks.append(
            BudgetDelivery(
                _("%(count)s webhooks %(fared)s") % {"count": exact(count), "fared": fared}
                if count > 1
                else _("Webhook %(fared)s") % {"fared": fared},
                kind,
                reason,
            )
        )
    if mail is None:
        return (BudgetDelivery(_("Email"), "", _("no longer stored")), *hooks)
    state, kind = _EMAIL_STATES[mail.state]
    return (BudgetDelivery(_("Email %(state)s") % {"state": state}, kind, mail.error), *hooks)


def _last_error(delivery: WebhookDelivery) -> str:
    """Return the error of the last attempt; empty if there is none."""
    tries = list(delivery.attempts.all())
    if delivery.state == WebhookDelivery.State.DELIVERED or not tries:
        return ""
    return tries[-1].error
