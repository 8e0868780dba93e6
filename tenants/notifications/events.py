"""Notifications about changes of tenants' objects, written in the transaction of the change."""

from __future__ import annotations

from datetime import UTC, datetime

from inference_worker.contract.texts import Text
from tenants.audit import current_actor
from tenants.models import Experiment, RoutingPolicy, WebhookEndpoint
from tenants.notifications.kinds import EXPERIMENT_STOPPED, POLICY_PUBLISHED, WEBHOOK_FAILING
from tenants.notifications.notifying import Notice, notify


def notify_failing(endpoint: WebhookEndpoint, since: datetime) -> None:
    """Notify of an endpoint whose deliveries have failed since then, once until a delivery succeeds."""
    text = Text("Deliveries to %(url)s have failed since %(since)s", url=endpoint.url, since=since)
    notify(
        WEBHOOK_FAILING,
        endpoint.tenant_id,
        Notice(f"{endpoint.pk}:failing:{since.timestamp()}", text, _link_to(endpoint)),
    )


def notify_disabled(endpoint: WebhookEndpoint) -> None:
    """Notify of an endpoint that the platform has disabled. Its email is that of the caller."""
    reason = endpoint.disabled_because
    text = Text("Endpoint %(url)s was disabled. %(reason)s", url=endpoint.url, reason=reason)
    key = f"{endpoint.pk}:disabled:{datetime.now(UTC).timestamp()}"  # each time is another event
    notify(WEBHOOK_FAILING, endpoint.tenant_id, Notice(key, text, _link_to(endpoint)), has_own_email=True)


def notify_published(policy: RoutingPolicy) -> None:
    """Notify of a published policy. Its publisher does not see the notification."""
    text = Text(
        "%(actor)s published version %(version)s of %(name)s",
        actor=current_actor().name,
        version=str(policy.version),
        name=policy.name,
    )
    notify(POLICY_PUBLISHED, policy.tenant_id, Notice(str(policy.pk), text, f"routing/{policy.pk}"))


def notify_stopped(experiment: Experiment) -> None:
    """Notify of a stopped experiment. A user who stopped it does not see the notification."""
    name = experiment.name
    match experiment.stop_reason:
        case Experiment.StopReason.HARM:
            text = Text(
                "Experiment %(name)s was stopped automatically: the guardrail for %(metric)s was crossed",
                name=name,
                metric=experiment.stop_metric,
            )
        case Experiment.StopReason.ENDED:
            text = Text("Experiment %(name)s reached its planned end", name=name)
        case _:
            text = Text("%(actor)s stopped experiment %(name)s", actor=current_actor().name, name=name)
    notify(EXPERIMENT_STOPPED, experiment.tenant_id, Notice(str(experiment.pk), text, f"experiments/{experiment.pk}"))


def _link_to(endpoint: WebhookEndpoint) -> str:
    return f"webhooks/{endpoint.pk}/" if endpoint.kind == WebhookEndpoint.Kind.WEBHOOK else "alerts/"
