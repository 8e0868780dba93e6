"""Actions on listeners: programs that fetch a tenant's webhook events and post them themselves.

A delivery to a listener has the state `waiting` until an attempt succeeds or the last one has failed. A listener leases
due deliveries, posts them, and reports the results with its next poll. If it is killed before that, the lease ends, and
the next poll returns the delivery again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import Conflict, locked_tenant
from tenants.actions.webhooks import check_endpoint, secret_of_endpoint
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from tenants.webhooks.sending import WEBHOOKS, body_of, headers_of

State = WebhookDelivery.State
MAX_LISTENERS = 20
MAX_POLLED = 10  # deliveries of one poll, which a listener posts within the lease
POLL_NOTED_EVERY = timedelta(minutes=1)


class ListenerDelivery(NamedTuple):
    """A leased delivery: what the listener posts."""

    id: int
    attempt: int
    event_type: str
    headers: dict[str, str]
    body: str


class ListenerResult(NamedTuple):
    """The result of an attempt. Without a response, `status` is None and `error` is the reason."""

    id: int
    attempt: int
    status: int | None
    duration_ms: int
    error: str = ""
    excerpt: str = ""

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def do_open_listener(
    tenant: Tenant, url: str, device: str, *, event_types: Iterable[str] = ()
) -> tuple[WebhookEndpoint, str]:
    """Create the listener of a URL on a device, or continue it. Return it with its signing secret.

    Args:
        event_types: which events it receives; without any, all.

    Raises:
        ActionRefused: an event type is unknown. Conflict: the tenant has the maximum of listeners.
    """
    with locked_tenant(tenant) as locked:
        rows = WebhookEndpoint.objects.for_tenant(locked).filter(kind=WebhookEndpoint.Kind.LISTENER)
        row = rows.select_for_update().filter(url=url, device=device).first()
        before = None if row is None else audit.serialize_for_audit(row)
        if row is None:
            if rows.count() >= MAX_LISTENERS:
                raise Conflict(
                    Text(
                        "The maximum of %(max_listeners)s listeners is reached. Delete one first.",
                        max_listeners=str(MAX_LISTENERS),
                    )
                )
            row = WebhookEndpoint(tenant=locked, kind=WebhookEndpoint.Kind.LISTENER, url=url, device=device)
        row.event_types, row.active, row.polled_at = sorted(set(event_types)), True, datetime.now(UTC)
        check_endpoint(row)
        row.save()
        after = audit.serialize_for_audit(row)
        if before is None:
            audit.record("webhook.created", row, tenant_id=locked.pk, after=after)
        elif before != after:
            audit.record("webhook.updated", row, tenant_id=locked.pk, before=before, after=after)
    return row, secret_of_endpoint(row)


def do_poll_listener(
    listener: WebhookEndpoint,
    results: Iterable[ListenerResult] = (),
    *,
    max_deliveries: int = MAX_POLLED,
    now: datetime | None = None,
) -> list[ListenerDelivery]:
    """Store results of a listener, then lease its due deliveries, oldest first. Returns these.

    The result of an attempt whose lease another poll has taken over is ignored, and so is one that is stored already.

    Raises:
        Conflict: the listener is disabled or no longer exists.
    """
    now = now or datetime.now(UTC)
    with tenant_scope(listener.tenant_id):
        rows = WebhookEndpoint.objects.for_tenant(listener.tenant_id).filter(pk=listener.pk)
        row = rows.select_for_update(no_key=True).first()  # before its deliveries, as in the other actions
        if row is None or not row.active:
            raise Conflict(Text("This endpoint is disabled."))
        if row.polled_at is None or row.polled_at < now - POLL_NOTED_EVERY:
            rows.update(polled_at=now)
        for result in results:
            _store(row, result, now)
        return _lease(row, now, max_deliveries)


def _store(listener: WebhookEndpoint, result: ListenerResult, now: datetime) -> None:
    rows = WebhookDelivery.objects.for_tenant(listener.tenant_id).filter(endpoint=listener, state=State.WAITING)
    rows = rows.filter(pk=result.id, attempt_count=result.attempt, leased_until__isnull=False)
    row = rows.select_for_update(no_key=True).first()
    if row is None:
        return
    error: str = ""
    if result.status is None:
        error = Text("The connection failed: %(reason)s.", reason=result.error)
    elif not result.is_success:
        error = Text("The response status was %(status)s.", status=str(result.status))
    WebhookAttempt.objects.create(
        tenant_id=listener.tenant_id,
        delivery=row,
        attempted_at=now,
        status=result.status,
        duration_ms=result.duration_ms,
        error=error,
        excerpt=result.excerpt,
    )
    if result.is_success:
        row.state, row.leased_until = State.DELIVERED, None
    else:
        WEBHOOKS.postpone(row, now, is_final=False)
    row.save(update_fields=["state", "next_attempt_at", "leased_until"])


def _lease(listener: WebhookEndpoint, now: datetime, most: int) -> list[ListenerDelivery]:
    rows = WebhookDelivery.objects.for_tenant(listener.tenant_id).filter(endpoint=listener, state=State.WAITING)
    due = rows.filter(next_attempt_at__lte=now).select_related("event", "endpoint").order_by("pk")
    leased = []
    for row in due.select_for_update(of=("self",), no_key=True, skip_locked=True)[:most]:
        if row.attempt_count > len(WEBHOOKS.retry_seconds):  # the listener was killed in each attempt
            row.state, row.leased_until = State.FAILED, None
        else:
            row.attempt_count += 1
            row.leased_until = row.next_attempt_at = now + WEBHOOKS.lease
            body = body_of(row.event)
            headers = headers_of(row.endpoint, row.event, body, now)
            event_type = row.event.event_type
            leased.append(ListenerDelivery(row.pk, row.attempt_count, event_type, headers, body.decode()))
        row.save(update_fields=["state", "attempt_count", "next_attempt_at", "leased_until"])
    return leased
