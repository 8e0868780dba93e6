"""Sending what is due. Any number of senders may run; one that is killed loses its lease, and another sends again."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import structlog
from django.db import connection

from millrace.conf.environment import platform_settings
from tenants.actions.webhooks import do_disable_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.webhooks.outbox import secrets_of
from tenants.webhooks.posting import WebhookResponse, post
from tenants.webhooks.signing import signature

log = structlog.get_logger(__name__)
State = WebhookDelivery.State

WAITS = (30, 120, 600, 1800, 7200, 21600, 50400)  # seconds after each try but the last; 23 hours in all
JITTER = 0.2  # of each wait, more or less, so that what failed together does not come back together
LEASE = timedelta(minutes=2)  # a sender is done by then: looking a name up may take half a minute, the rest 10 s
GIVE_UP_AFTER = timedelta(days=3)  # without one success, an endpoint is disabled when a delivery fails permanently
SENDERS = 8  # at once, over all processes
GONE = 410
_LOCK = 0x77656268  # any number that is nobody else's advisory lock

_WANTED = """
SELECT count(*) FROM (
    SELECT DISTINCT tenant_id FROM tenants_webhookdelivery WHERE state = 'pending' AND next_at <= %s LIMIT %s
) AS waiting
"""
# A tenant has one sender at a time: one whose server hangs holds up nobody else.
_CLAIM = """
UPDATE tenants_webhookdelivery SET leased_until = %(until)s, next_at = %(until)s, tries = tries + 1
WHERE id = (
    SELECT d.id FROM tenants_webhookdelivery d
    WHERE d.state = 'pending' AND d.next_at <= %(now)s
        AND (SELECT count(*) FROM tenants_webhookdelivery o WHERE o.state = 'pending' AND o.leased_until > %(now)s)
            < %(senders)s
        AND NOT EXISTS (SELECT FROM tenants_webhookdelivery o
            WHERE o.state = 'pending' AND o.tenant_id = d.tenant_id AND o.leased_until > %(now)s)
    ORDER BY d.next_at, d.id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


class _Claimed(NamedTuple):
    delivery: WebhookDelivery
    event: WebhookEvent
    endpoint: WebhookEndpoint


def senders_wanted() -> int:
    """How many senders have something to do: one for each tenant of whom something is due, SENDERS at most."""
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute(_WANTED, [datetime.now(UTC), SENDERS])
        wanted = int(cursor.fetchone()[0])
    _let_go()
    return wanted


def send_all() -> int:
    """Send every delivery that is due, one after another; gives how many were tried."""
    tried = 0
    try:
        while (claimed := _claim(datetime.now(UTC))) is not None:
            answer = _try(claimed)
            if _note(claimed, answer, datetime.now(UTC)):
                do_disable_endpoint(claimed.endpoint, because=_why(answer))
            tried += 1
    finally:
        _let_go()
    return tried


def body_of(event: WebhookEvent) -> bytes:
    """Return what is sent: the same bytes in every try."""
    told = {"type": event.kind, "timestamp": event.at.isoformat(), "data": event.payload}
    return json.dumps(told, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _claim(now: datetime) -> _Claimed | None:
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])  # so that no two claim for one tenant at once
        cursor.execute(_CLAIM, {"now": now, "until": now + LEASE, "senders": SENDERS})
        row = cursor.fetchone()
        if row is None:
            return None
        found = WebhookDelivery.objects.all_tenants().select_related("event", "endpoint").get(pk=row[0])
    return _Claimed(found, found.event, found.endpoint)


def _try(claimed: _Claimed) -> WebhookResponse:
    _let_go()
    if not claimed.endpoint.active:
        return WebhookResponse(None, 0, "The endpoint is disabled.")
    now = datetime.now(UTC)
    at, body = int(now.timestamp()), body_of(claimed.event)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "Millrace-Webhooks/1",
        "webhook-id": claimed.event.uid,
        "webhook-timestamp": str(at),
        "webhook-signature": signature(secrets_of(claimed.endpoint, now), claimed.event.uid, at, body),
    }
    return post(claimed.endpoint.url, headers, body, private_hosts=platform_settings().webhook_allowed_private_hosts)


def _let_go() -> None:
    """Give the connection back to its pool: others need it more while this sender waits for somebody's server."""
    if not connection.in_atomic_block:
        connection.close()


def _note(claimed: _Claimed, answer: WebhookResponse, now: datetime) -> bool:
    """Write down what came of it; whether the endpoint is to be disabled.

    NOTE: endpoint, then delivery, as the verbs lock them. A sender whose lease was taken over writes its try down, and
    of the delivery only that it arrived.
    """
    was = claimed.delivery
    with all_tenants_scope(BypassReason.WEBHOOKS):
        endpoints = WebhookEndpoint.objects.all_tenants().select_for_update(no_key=True)
        endpoint = endpoints.filter(pk=claimed.endpoint.pk).first()
        rows = WebhookDelivery.objects.all_tenants().select_for_update(no_key=True)
        row = rows.filter(pk=was.pk).first()
        if endpoint is None or row is None:
            return False  # deleted meanwhile
        WebhookAttempt.objects.create(
            tenant_id=row.tenant_id,
            delivery=row,
            at=now,
            status=answer.status,
            ms=answer.ms,
            error=answer.error,
            excerpt=answer.excerpt,
        )
        if answer.is_success:
            row.state, row.leased_until, endpoint.failing_since = State.DELIVERED, None, None
        else:
            endpoint.failing_since = endpoint.failing_since or now
            if row.state == State.PENDING and row.leased_until == was.leased_until:
                _put_off(row, endpoint, now)
        row.save(update_fields=["state", "next_at", "leased_until"])
        endpoint.save(update_fields=["failing_since"])
        long = row.state == State.FAILED and endpoint.failing_since and now - endpoint.failing_since >= GIVE_UP_AFTER
        return endpoint.active and (bool(long) or answer.status == GONE)


def _why(answer: WebhookResponse) -> str:
    if answer.status == GONE:
        return "The endpoint responded with 410 Gone."
    return f"No delivery succeeded for {GIVE_UP_AFTER.days} days. {answer.error}"[:200]


def _put_off(row: WebhookDelivery, endpoint: WebhookEndpoint, now: datetime) -> None:
    row.leased_until = None
    if row.tries > len(WAITS) or not endpoint.active:
        row.state = State.FAILED
        return
    jitter = 1 + JITTER * random.uniform(-1, 1)  # noqa: S311  (nobody gains by guessing it)
    row.next_at = now + timedelta(seconds=WAITS[row.tries - 1] * jitter)
