"""The outbox of webhook events: an event and its deliveries are written in the transaction that causes them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Q

from tenants.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.webhooks.event_types import D, EventType
from tenants.webhooks.signing import secret_of
from tenants.work import announce_work

LISTENS = timedelta(hours=1)  # without a poll for this time, a listener receives no new events


def enqueue(tenant_id: int, event_type: EventType[D], deduplication_key: str, data: D) -> WebhookEvent | None:
    """Write an event and its deliveries in the caller's transaction and scope.

    Returns:
        The event. None if the tenant already has an event with this key.
    Raises:
        TypeError: the data is not that of the event type.
    """
    if type(data) is not event_type.data:
        raise TypeError(f"{event_type.name} needs {event_type.data.__name__}, not {type(data).__name__}")
    new = WebhookEvent(
        tenant_id=tenant_id, event_type=event_type.name, deduplication_key=deduplication_key, payload=asdict(data)
    )
    events = WebhookEvent.objects.for_tenant(tenant_id)
    events.bulk_create([new], ignore_conflicts=True)
    event = events.filter(public_id=new.public_id).first()  # None: another event has the key
    if event is None:
        return None
    endpoints = WebhookEndpoint.objects.for_tenant(tenant_id).filter(
        Q(event_types=[]) | Q(event_types__contains=[event_type.name]),
        Q(polled_at=None) | Q(polled_at__gt=datetime.now(UTC) - LISTENS),
        active=True,
    )
    if WebhookDelivery.objects.for_tenant(tenant_id).bulk_create(
        WebhookDelivery(
            tenant_id=tenant_id, event=event, endpoint=endpoint, state=WebhookDelivery.first_state(endpoint)
        )
        for endpoint in endpoints
    ):
        announce_work()
    return event


def secrets_of(endpoint: WebhookEndpoint, now: datetime) -> list[str]:
    """Return the endpoint's signing secrets: the current one and, for a day after a rotation, the previous one."""
    nonces = [endpoint.nonce]
    if endpoint.previous_expires_at is not None and endpoint.previous_expires_at > now:
        nonces.append(endpoint.previous_nonce)
    return [secret_of(settings.SECRET_KEY, endpoint.pk, nonce) for nonce in nonces]
