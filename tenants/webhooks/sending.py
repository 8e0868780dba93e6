"""The outbox of webhook deliveries. A tenant has one sender at a time."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import connection

from inference_worker.contract.texts import Text
from tenants.actions.webhooks import do_disable_endpoint
from tenants.credentials.encryption import NoEncryptionKey, decrypt_secret
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.notifications.events import notify_failing
from tenants.outbox.delivery import Outbox, register, release_connection
from tenants.webhooks.channels import pagerduty_body, resolving_key, slack_body
from tenants.webhooks.outbox import secrets_of
from tenants.webhooks.posting import WebhookResponse, post
from tenants.webhooks.signing import signature

DISABLE_AFTER = timedelta(days=3)  # without a success, a permanently failed delivery disables the endpoint
NOTIFY_AFTER = timedelta(hours=1)  # time without a success
SENDERS = 8  # concurrent, in all processes
GONE = 410
OUTDATED = Text("It was not sent: the alert has been resolved, and a late event would reopen its incident.")

_WANTED = """
SELECT count(*) FROM (
    SELECT DISTINCT tenant_id FROM tenants_webhookdelivery WHERE state = 'pending' AND next_attempt_at <= %s LIMIT %s
) AS waiting
"""


class WebhookOutbox(Outbox[WebhookDelivery, WebhookResponse]):
    """The deliveries of webhook events to endpoints."""

    name = "webhook"
    reason = BypassReason.WEBHOOKS
    model = WebhookDelivery
    waiting, sent = "pending", "delivered"
    retry_seconds = (30, 120, 600, 1800, 7200, 21600, 50400)  # 23 hours in total
    jitter = 0.2
    lease = timedelta(minutes=2)  # a DNS query can take 30 s, the rest 10 s
    related = ("event", "endpoint")
    claim_lock = 0x77656268  # unique in the database; a tenant has one claim at a time
    # A tenant has one sender at a time, so that a slow server does not delay other tenants.
    claim_condition = f"""
        (SELECT count(*) FROM tenants_webhookdelivery o WHERE o.state = 'pending' AND o.leased_until > %(now)s)
            < {SENDERS}
        AND NOT EXISTS (SELECT FROM tenants_webhookdelivery o
            WHERE o.state = 'pending' AND o.tenant_id = d.tenant_id AND o.leased_until > %(now)s)"""  # noqa: S608

    def senders_wanted(self) -> int:
        """Return the number of senders with work: one for each tenant with a due delivery, at most SENDERS."""
        with all_tenants_scope(self.reason), connection.cursor() as cursor:
            cursor.execute(_WANTED, [datetime.now(UTC), SENDERS])
            wanted = int(cursor.fetchone()[0])
        release_connection()
        return wanted

    def attempt(self, row: WebhookDelivery) -> WebhookResponse:
        if self._is_outdated(row):
            return WebhookResponse(None, 0, OUTDATED, is_outdated=True)
        release_connection()
        if not row.endpoint.active:
            return WebhookResponse(None, 0, Text("The endpoint is disabled."))
        if row.endpoint.kind != WebhookEndpoint.Kind.WEBHOOK:
            return _post_to_channel(row.endpoint, row.event)
        now = datetime.now(UTC)
        body = body_of(row.event)
        headers = headers_of(row.endpoint, row.event, body, now)
        return post(row.endpoint.url, headers, body, private_hosts=settings.MILLRACE.webhook_allowed_private_hosts)

    def _is_outdated(self, row: WebhookDelivery) -> bool:
        """Return whether the event would open an incident of PagerDuty again, which a sent event has resolved.

        A resolving event that is still to be sent follows this one. A tenant has one sender, so they do not overtake.
        """
        key = resolving_key(row.event.event_type, row.event.payload)
        if not key or row.endpoint.kind != WebhookEndpoint.Kind.PAGERDUTY:
            return False
        with all_tenants_scope(self.reason):
            resolving = WebhookDelivery.objects.for_tenant(row.tenant_id).filter(
                endpoint=row.endpoint, event__deduplication_key=key, state=self.sent
            )
            return bool(resolving.exists())

    def failure(self, error: str) -> WebhookResponse:
        return WebhookResponse(None, 0, error)

    def lock_parent(self, row: WebhookDelivery) -> bool:
        """Lock the endpoint before the delivery, as the actions do."""
        rows = WebhookEndpoint.objects.all_tenants().select_for_update(no_key=True)
        endpoint = rows.filter(pk=row.endpoint_id).first()
        if endpoint is None:
            return False
        row.endpoint = endpoint
        return True

    def is_final(self, row: WebhookDelivery, result: WebhookResponse) -> bool:
        return result.is_outdated or not row.endpoint.active

    def store(self, row: WebhookDelivery, current: WebhookDelivery, result: WebhookResponse, now: datetime) -> None:
        """Store the attempt, also that of a sender which has lost its lease."""
        WebhookAttempt.objects.create(
            tenant_id=row.tenant_id,
            delivery=current,
            attempted_at=now,
            status=result.status,
            duration_ms=result.duration_ms,
            error=result.error,
            excerpt=result.excerpt,
        )
        if result.is_outdated:
            return
        row.endpoint.failing_since = None if result.is_success else row.endpoint.failing_since or now
        row.endpoint.save(update_fields=["failing_since"])
        if row.endpoint.failing_since is not None and now - row.endpoint.failing_since >= NOTIFY_AFTER:
            notify_failing(row.endpoint, row.endpoint.failing_since)

    def after(self, row: WebhookDelivery, result: WebhookResponse, outcome: str) -> None:
        """Disable an endpoint that has failed for days, or is gone."""
        since = row.endpoint.failing_since
        if result.is_outdated:
            return
        has_failed_long = outcome == "failed" and since and datetime.now(UTC) - since >= DISABLE_AFTER
        if row.endpoint.active and (has_failed_long or result.status == GONE):
            do_disable_endpoint(row.endpoint, because=_reason(result))


WEBHOOKS = WebhookOutbox()
register(WEBHOOKS)


def body_of(event: WebhookEvent) -> bytes:
    """Return the body of the event's POST, identical in every attempt."""
    message = {"type": event.event_type, "timestamp": event.created_at.isoformat(), "data": event.payload}
    return json.dumps(message, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def headers_of(endpoint: WebhookEndpoint, event: WebhookEvent, body: bytes, now: datetime) -> dict[str, str]:
    """Return the headers of the event's POST, with its signatures."""
    at = int(now.timestamp())
    return {
        "Content-Type": "application/json",
        "User-Agent": "Millrace-Webhooks/1",
        "webhook-id": event.public_id,
        "webhook-timestamp": str(at),
        "webhook-signature": signature(secrets_of(endpoint, now), event.public_id, at, body),
    }


def _post_to_channel(endpoint: WebhookEndpoint, event: WebhookEvent) -> WebhookResponse:
    try:
        secret = decrypt_secret(endpoint)
    except NoEncryptionKey:
        error = Text("The channel's secret cannot be decrypted. Create the channel again.")
        return WebhookResponse(None, 0, error)
    if endpoint.kind == WebhookEndpoint.Kind.SLACK:
        url, body = secret, slack_body(event.event_type, event.payload)
    else:
        at = event.created_at.isoformat()
        url, body = endpoint.url, pagerduty_body(secret, event.public_id, event.event_type, event.payload, at)
    headers = {"Content-Type": "application/json", "User-Agent": "Millrace-Webhooks/1"}
    return post(url, headers, body, private_hosts=settings.MILLRACE.webhook_allowed_private_hosts)


def _reason(response: WebhookResponse) -> str:
    if response.status == GONE:
        return Text("The endpoint responded with 410 Gone.")
    return Text("No delivery succeeded for %(days)s days. %(error)s", days=DISABLE_AFTER.days, error=response.error)
