"""The outbox of events: a row in the transaction of what happened, and a delivery for each endpoint that asked."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db.models import Q

from tenants.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.webhooks.event_types import KINDS
from tenants.webhooks.signing import secret_of


def enqueue(tenant_id: int, kind: str, key: str, payload: Mapping[str, Any]) -> WebhookEvent | None:
    """Tell the tenant of something, once for each `key` of theirs; None if that was done before.

    It is done in the caller's transaction and scope: if that is rolled back nobody hears of it.
    """
    if kind not in KINDS:
        raise ValueError(f"no such kind of event: {kind}")
    event, is_new = WebhookEvent.objects.for_tenant(tenant_id).get_or_create(
        tenant_id=tenant_id, key=key, defaults={"kind": kind, "payload": dict(payload)}
    )
    if not is_new:
        return None
    asked = WebhookEndpoint.objects.for_tenant(tenant_id).filter(Q(kinds=[]) | Q(kinds__contains=[kind]), active=True)
    now = datetime.now(UTC)
    WebhookDelivery.objects.for_tenant(tenant_id).bulk_create(
        WebhookDelivery(tenant_id=tenant_id, event=event, endpoint=endpoint, next_at=now) for endpoint in asked
    )
    return event


def secrets_of(endpoint: WebhookEndpoint, now: datetime) -> list[str]:
    """Return the secrets that sign for the endpoint: its own and, for a day after a rotation, the one before."""
    nonces = [endpoint.nonce]
    if endpoint.old_until is not None and endpoint.old_until > now:
        nonces.append(endpoint.old_nonce)
    return [secret_of(settings.SECRET_KEY, endpoint.pk, nonce) for nonce in nonces]
