"""Sending of due deliveries by concurrent senders. If a sender is killed, its lease expires and another sends again."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import structlog
from django.conf import settings
from django.db import connection

from tenants.actions.webhooks import do_disable_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.webhooks.outbox import secrets_of
from tenants.webhooks.posting import WebhookResponse, post
from tenants.webhooks.signing import signature

log = structlog.get_logger(__name__)
State = WebhookDelivery.State

RETRY_SECONDS = (30, 120, 600, 1800, 7200, 21600, 50400)  # after each attempt but the last; 23 hours in total
JITTER = 0.2  # share of each delay, so that simultaneous failures are not retried simultaneously
LEASE = timedelta(minutes=2)  # longer than an attempt: a DNS query can take 30 s, the rest 10 s
DISABLE_AFTER = timedelta(days=3)  # without a success, a permanently failed delivery disables the endpoint
SENDERS = 8  # concurrent, in all processes
GONE = 410
_LOCK = 0x77656268  # the number of an advisory lock; unique in the database

_WANTED = """
SELECT count(*) FROM (
    SELECT DISTINCT tenant_id FROM tenants_webhookdelivery WHERE state = 'pending' AND next_attempt_at <= %s LIMIT %s
) AS waiting
"""
# A tenant has one sender at a time, so that a slow server does not delay other tenants.
_CLAIM = """
UPDATE tenants_webhookdelivery SET leased_until = %(until)s, next_attempt_at = %(until)s,
    attempt_count = attempt_count + 1
WHERE id = (
    SELECT d.id FROM tenants_webhookdelivery d
    WHERE d.state = 'pending' AND d.next_attempt_at <= %(now)s
        AND (SELECT count(*) FROM tenants_webhookdelivery o WHERE o.state = 'pending' AND o.leased_until > %(now)s)
            < %(senders)s
        AND NOT EXISTS (SELECT FROM tenants_webhookdelivery o
            WHERE o.state = 'pending' AND o.tenant_id = d.tenant_id AND o.leased_until > %(now)s)
    ORDER BY d.next_attempt_at, d.id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


class _Claimed(NamedTuple):
    delivery: WebhookDelivery
    event: WebhookEvent
    endpoint: WebhookEndpoint


def senders_wanted() -> int:
    """Return the number of senders with work: one for each tenant with a due delivery, at most SENDERS."""
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute(_WANTED, [datetime.now(UTC), SENDERS])
        wanted = int(cursor.fetchone()[0])
    _release_connection()
    return wanted


def send_all() -> int:
    """Send all due deliveries, one after another. Returns the number of attempts."""
    attempts = 0
    try:
        while (claimed := _claim(datetime.now(UTC))) is not None:
            response = _attempt(claimed)
            if _record(claimed, response, datetime.now(UTC)):
                do_disable_endpoint(claimed.endpoint, because=_reason(response))
            attempts += 1
    finally:
        _release_connection()
    return attempts


def body_of(event: WebhookEvent) -> bytes:
    """Return the body of the event's POST, identical in every attempt."""
    message = {"type": event.event_type, "timestamp": event.created_at.isoformat(), "data": event.payload}
    return json.dumps(message, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _claim(now: datetime) -> _Claimed | None:
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])  # so that a tenant has one claim at a time
        cursor.execute(_CLAIM, {"now": now, "until": now + LEASE, "senders": SENDERS})
        row = cursor.fetchone()
        if row is None:
            return None
        delivery = WebhookDelivery.objects.all_tenants().select_related("event", "endpoint").get(pk=row[0])
    return _Claimed(delivery, delivery.event, delivery.endpoint)


def _attempt(claimed: _Claimed) -> WebhookResponse:
    _release_connection()
    if not claimed.endpoint.active:
        return WebhookResponse(None, 0, "The endpoint is disabled.")
    now = datetime.now(UTC)
    at, body = int(now.timestamp()), body_of(claimed.event)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "Millrace-Webhooks/1",
        "webhook-id": claimed.event.public_id,
        "webhook-timestamp": str(at),
        "webhook-signature": signature(secrets_of(claimed.endpoint, now), claimed.event.public_id, at, body),
    }
    return post(claimed.endpoint.url, headers, body, private_hosts=settings.MILLRACE.webhook_allowed_private_hosts)


def _release_connection() -> None:
    """Return the database connection to its pool while the sender waits for a tenant's server."""
    if not connection.in_atomic_block:
        connection.close()


def _record(claimed: _Claimed, response: WebhookResponse, now: datetime) -> bool:
    """Store the attempt and its result. Returns whether the endpoint must be disabled.

    NOTE: locks the endpoint before the delivery, as the actions do. A sender that has lost its lease stores its
    attempt, and changes the delivery only if it was successful.
    """
    before = claimed.delivery
    with all_tenants_scope(BypassReason.WEBHOOKS):
        endpoints = WebhookEndpoint.objects.all_tenants().select_for_update(no_key=True)
        endpoint = endpoints.filter(pk=claimed.endpoint.pk).first()
        rows = WebhookDelivery.objects.all_tenants().select_for_update(no_key=True)
        row = rows.filter(pk=before.pk).first()
        if endpoint is None or row is None:
            return False  # deleted meanwhile
        WebhookAttempt.objects.create(
            tenant_id=row.tenant_id,
            delivery=row,
            attempted_at=now,
            status=response.status,
            duration_ms=response.duration_ms,
            error=response.error,
            excerpt=response.excerpt,
        )
        if response.is_success:
            row.state, row.leased_until, endpoint.failing_since = State.DELIVERED, None, None
        else:
            endpoint.failing_since = endpoint.failing_since or now
            if row.state == State.PENDING and row.leased_until == before.leased_until:
                _postpone(row, endpoint, now)
        row.save(update_fields=["state", "next_attempt_at", "leased_until"])
        endpoint.save(update_fields=["failing_since"])
        since = endpoint.failing_since
        failed_long = row.state == State.FAILED and since and now - since >= DISABLE_AFTER
        return endpoint.active and (bool(failed_long) or response.status == GONE)


def _reason(response: WebhookResponse) -> str:
    if response.status == GONE:
        return "The endpoint responded with 410 Gone."
    return f"No delivery succeeded for {DISABLE_AFTER.days} days. {response.error}"[:200]


def _postpone(row: WebhookDelivery, endpoint: WebhookEndpoint, now: datetime) -> None:
    row.leased_until = None
    if row.attempt_count > len(RETRY_SECONDS) or not endpoint.active:
        row.state = State.FAILED
        return
    jitter = 1 + JITTER * random.uniform(-1, 1)  # noqa: S311  (not a secret)
    row.next_attempt_at = now + timedelta(seconds=RETRY_SECONDS[row.attempt_count - 1] * jitter)
