"""Actions on webhooks: endpoints, signing secrets, test events and replays."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings

from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, FieldRefused, check, locked_tenant
from tenants.models import Tenant, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.models.webhooks import new_nonce, new_public_id
from tenants.notifications.events import notify_disabled
from tenants.notifications.kinds import WEBHOOK_FAILING
from tenants.outbox.email_outbox import enqueue_email
from tenants.webhooks.event_types import EVENT_TYPES, WEBHOOK_TEST, WebhookTestData
from tenants.webhooks.signing import secret_of
from tenants.webhooks.targets import CheckedUrl, TargetRefused, check_url
from tenants.work import announce_work

State = WebhookDelivery.State
OVERLAP = timedelta(hours=24)  # both secrets are valid after a rotation
MAX_ENDPOINTS = 20
SIGNED = (WebhookEndpoint.Kind.WEBHOOK, WebhookEndpoint.Kind.LISTENER)
CHANGEABLE = ("url", "description", "event_types", "active")


def do_create_endpoint(
    tenant: Tenant, url: str, *, description: str = "", event_types: list[str] | None = None
) -> tuple[WebhookEndpoint, str]:
    """Create a webhook endpoint. Return it with its signing secret, which is shown only once.

    Raises:
        ActionRefused: the URL or an event type is not allowed. Conflict: the tenant has the maximum of endpoints.
    """
    url = check_endpoint_url(url)
    with locked_tenant(tenant) as locked:
        check_number_of_endpoints(locked)
        endpoint = WebhookEndpoint(
            tenant=locked, url=url, description=description, event_types=sorted(set(event_types or ()))
        )
        check_endpoint(endpoint)
        endpoint.save(force_insert=True)
        audit.record("webhook.created", endpoint, tenant_id=locked.pk, after=audit.serialize_for_audit(endpoint))
    return endpoint, secret_of_endpoint(endpoint)


def check_number_of_endpoints(tenant: Tenant) -> None:
    """Check that the locked tenant may have another endpoint or channel.

    Raises:
        Conflict: it has the maximum.
    """
    rows = WebhookEndpoint.objects.for_tenant(tenant).exclude(kind=WebhookEndpoint.Kind.LISTENER)
    if rows.count() >= MAX_ENDPOINTS:
        raise Conflict(
            Text(
                "The maximum of %(max_endpoints)s endpoints is reached. Delete one first.", max_endpoints=MAX_ENDPOINTS
            )
        )


def do_update_endpoint(endpoint: WebhookEndpoint, **fields: Any) -> WebhookEndpoint:
    """Change an endpoint. If it is disabled, its pending deliveries fail; they can be replayed later.

    Raises:
        ActionRefused: the URL or an event type is not allowed. Conflict: the endpoint no longer exists.
    """
    if unknown := sorted(set(fields) - set(CHANGEABLE)):
        raise ActionRefused(Text("%(unknown)s cannot be changed.", unknown=", ".join(unknown)))
    if "url" in fields:
        fields["url"] = check_endpoint_url(fields["url"])
    with locked_tenant(endpoint.tenant_id) as tenant:
        row = _lock_endpoint(tenant.pk, endpoint.pk)
        if "url" in fields and row.kind == WebhookEndpoint.Kind.LISTENER:
            raise FieldRefused("url", "listener", Text("The URL of a listener cannot be changed. Start a new one."))
        if "url" in fields and row.kind != WebhookEndpoint.Kind.WEBHOOK:
            raise FieldRefused(
                "url", "channel", Text("The target of a channel cannot be changed. Create a new channel.")
            )
        before = audit.serialize_for_audit(row)
        for name, value in fields.items():
            setattr(row, name, sorted(set(value)) if name == "event_types" else value)
        if row.active and not before["active"]:
            row.failing_since, row.disabled_because = None, ""
        check_endpoint(row)
        row.save(update_fields=[*fields, "failing_since", "disabled_because"])
        if not row.active:
            _drop_pending(row)
        audit.record("webhook.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
    return row


def check_endpoint_url(url: str) -> CheckedUrl:
    """Check a URL. Call it before the transaction that stores the URL, because it can wait for a name server.

    Raises:
        FieldRefused: the URL is not allowed.
    """
    if isinstance(url, CheckedUrl):
        return url
    try:
        return check_url(url, settings.MILLRACE.webhook_allowed_private_hosts)
    except TargetRefused as exc:
        raise FieldRefused("url", "webhook_url_refused", text_of(exc)) from exc


def do_disable_endpoint(endpoint: WebhookEndpoint, *, because: str) -> bool:
    """Disable an endpoint and email the tenant's owners and admins. Returns False if it is already disabled."""
    with locked_tenant(endpoint.tenant_id) as tenant:
        rows = WebhookEndpoint.objects.for_tenant(tenant).select_for_update(no_key=True)
        row = rows.filter(pk=endpoint.pk, active=True).first()
        if row is None:
            return False
        before = audit.serialize_for_audit(row)
        row.active, row.disabled_because = False, because
        row.save(update_fields=["active", "disabled_because"])
        _drop_pending(row)
        audit.record("webhook.disabled", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        text = (
            f"Millrace no longer sends events of {tenant.name} to\n{row.url}\n\n{because}\n\n"
            "Fix the endpoint, then enable it again. Failed deliveries can be replayed.\n\n"
            f"{settings.MILLRACE.base_url}/t/{tenant.slug}/webhooks/"
        )
        subject = f"Webhook of {tenant.name} disabled"
        enqueue_email(tenant.pk, sorted(WEBHOOK_FAILING.roles), subject, text, kind=WEBHOOK_FAILING)
        notify_disabled(row)
    return True


def do_rotate_webhook_secret(endpoint: WebhookEndpoint) -> str:
    """Replace the signing secret and return the new one. Events are signed with both secrets for a day.

    Raises:
        Conflict: the endpoint no longer exists, or is a channel.
    """
    with locked_tenant(endpoint.tenant_id) as tenant:
        row = _lock_endpoint(tenant.pk, endpoint.pk)
        if row.kind not in SIGNED:
            raise Conflict(Text("A channel has no signing secret."))
        row.previous_nonce, row.previous_expires_at = row.nonce, datetime.now(UTC) + OVERLAP
        row.nonce = new_nonce()
        row.save(update_fields=["nonce", "previous_nonce", "previous_expires_at"])
        audit.record("webhook.secret_rotated", row, tenant_id=tenant.pk, after=audit.serialize_for_audit(row))
    return secret_of_endpoint(row)


def do_delete_endpoint(endpoint: WebhookEndpoint) -> None:
    """Delete an endpoint with its deliveries. Events are kept.

    Raises:
        Conflict: the endpoint no longer exists.
    """
    with locked_tenant(endpoint.tenant_id) as tenant:
        row = _lock_endpoint(tenant.pk, endpoint.pk)
        audit.record("webhook.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
        row.delete()


def do_send_test_event(endpoint: WebhookEndpoint) -> WebhookDelivery:
    """Send a test event to this endpoint only.

    Raises:
        Conflict: the endpoint is disabled or no longer exists.
    """
    with locked_tenant(endpoint.tenant_id) as tenant:
        row = _lock_endpoint(tenant.pk, endpoint.pk)
        if not row.active:
            raise Conflict(Text("This endpoint is disabled."))
        public_id = new_public_id()
        event = WebhookEvent.objects.create(
            tenant_id=tenant.pk,
            public_id=public_id,
            event_type=WEBHOOK_TEST.name,
            deduplication_key=public_id,
            payload=asdict(WebhookTestData(endpoint_id=row.pk, text="This is a test.")),
        )
        delivery = WebhookDelivery.objects.create(
            tenant_id=tenant.pk, event=event, endpoint=row, state=WebhookDelivery.first_state(row)
        )
        announce_work()
        audit.record("webhook.tested", row, tenant_id=tenant.pk, after=audit.serialize_for_audit(row))
    return delivery


def do_replay(delivery: WebhookDelivery) -> WebhookDelivery:
    """Send an event again with the same ID, in any state. A delivery that is to be sent is attempted immediately.

    Raises:
        Conflict: the endpoint is disabled, or the delivery no longer exists.
    """
    with locked_tenant(delivery.tenant_id) as tenant:
        endpoint = _lock_endpoint(tenant.pk, delivery.endpoint_id)
        if not endpoint.active:
            raise Conflict(Text("The endpoint of this delivery is disabled. Enable it first."))
        rows = WebhookDelivery.objects.for_tenant(tenant).select_related("event", "endpoint")
        row = rows.select_for_update(of=("self",), no_key=True).filter(pk=delivery.pk).first()
        if row is None:
            raise Conflict(Text("This delivery no longer exists."))
        before = audit.serialize_for_audit(row)
        row.state, row.attempt_count = WebhookDelivery.first_state(endpoint), 0
        row.next_attempt_at, row.leased_until = datetime.now(UTC), None
        row.save(update_fields=["state", "attempt_count", "next_attempt_at", "leased_until"])
        announce_work()
        audit.record("webhook.replayed", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
    return row


def _lock_endpoint(tenant_id: int, pk: int) -> WebhookEndpoint:
    row = WebhookEndpoint.objects.for_tenant(tenant_id).select_for_update().filter(pk=pk).first()
    if row is None:
        raise Conflict(Text("This endpoint no longer exists."))
    return row


def _drop_pending(endpoint: WebhookEndpoint) -> None:
    rows = WebhookDelivery.objects.for_tenant(endpoint.tenant_id).filter(
        endpoint=endpoint, state__in=(State.PENDING, State.WAITING)
    )
    rows.update(state=State.FAILED, leased_until=None)


def check_endpoint(endpoint: WebhookEndpoint) -> None:
    """Validate the fields of an endpoint.

    Raises:
        ActionRefused: a value is not valid, or an event type is unknown.
    """
    check(endpoint)
    if unknown := sorted(set(endpoint.event_types) - set(EVENT_TYPES)):
        raise ActionRefused(Text("Unknown event type %(unknown)s.", unknown=", ".join(unknown)))


def secret_of_endpoint(endpoint: WebhookEndpoint) -> str:
    """Return the current signing secret of an endpoint."""
    return secret_of(settings.SECRET_KEY, endpoint.pk, endpoint.nonce)
