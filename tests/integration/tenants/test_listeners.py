"""Listeners: they fetch a tenant's webhook events, each at least once, and the platform sends nothing to their URLs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tenants import actions
from tenants.actions import listeners
from tenants.actions.common import Conflict, FieldRefused
from tenants.actions.listeners import ListenerResult, do_open_listener, do_poll_listener
from tenants.actions.webhooks import (
    MAX_ENDPOINTS,
    do_create_endpoint,
    do_replay,
    do_rotate_webhook_secret,
    do_send_test_event,
    do_update_endpoint,
)
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import AuditEntry, Tenant, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.tasks import LISTENER_RETENTION, purge_expired
from tenants.webhooks.event_types import INVOICE_PAID, InvoiceData
from tenants.webhooks.outbox import LISTENS, enqueue
from tenants.webhooks.sending import WEBHOOKS
from tests.support.outbox import send_webhooks
from tests.support.rows import of
from tests.support.tenants.concurrency import at_once
from tests.support.tenants.webhook_receiver import Received, is_genuine, receiving

pytestmark = pytest.mark.django_db
URL = "http://localhost:3000/hooks"
PAID: dict[str, Any] = dict.fromkeys(INVOICE_PAID.fields) | {"number": "INV-2026-000001"}


def paid(tenant: Tenant, key: str) -> WebhookEvent:
    with tenant_scope(tenant):
        event = enqueue(tenant.pk, INVOICE_PAID, key, InvoiceData(**PAID))
    assert event is not None
    return event


def succeeded(delivery: listeners.ListenerDelivery) -> ListenerResult:
    return ListenerResult(delivery.id, delivery.attempt, 200, 12, "", "ok")


def only_delivery(tenant: Tenant) -> WebhookDelivery:
    (row,) = of(WebhookDelivery, tenant)
    return row


def test_an_event_is_polled_once_and_its_result_is_stored(acme):
    listener, secret = do_open_listener(acme, URL, "laptop")
    event = paid(acme, "1")
    (delivery,) = do_poll_listener(listener)
    assert is_genuine(secret, Received("", delivery.headers, delivery.body.encode()))
    assert (delivery.event_type, delivery.headers["webhook-id"]) == ("invoice.paid", event.public_id)
    assert do_poll_listener(listener) == []  # it is leased
    assert do_poll_listener(listener, [succeeded(delivery)]) == []
    assert only_delivery(acme).state == "delivered"
    (attempt,) = of(WebhookAttempt, acme)
    assert (attempt.status, attempt.duration_ms, attempt.excerpt) == (200, 12, "ok")
    do_poll_listener(listener, [succeeded(delivery)])  # repeated, since the response was lost
    assert len(of(WebhookAttempt, acme)) == 1
    assert do_poll_listener(listener, now=datetime.now(UTC) + timedelta(days=1)) == []


def test_the_platform_sends_nothing_to_a_listener(acme, settings):
    with receiving() as (receiver, port):
        listener, _ = do_open_listener(acme, f"http://127.0.0.1:{port}/", "laptop")
        paid(acme, "1")
        do_send_test_event(listener)
        assert WEBHOOKS.senders_wanted() == 0
        assert (send_webhooks(), receiver.received) == (0, [])
    assert [delivery.event_type for delivery in do_poll_listener(listener)] == ["invoice.paid", "webhook.test"]


def test_a_listener_that_is_killed_receives_the_delivery_again(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    paid(acme, "1")
    (first,) = do_poll_listener(listener)
    later = datetime.now(UTC) + WEBHOOKS.lease
    again, _ = do_open_listener(acme, URL, "laptop")  # the command was started again
    assert again.pk == listener.pk
    (second,) = do_poll_listener(again, now=later)
    assert (second.id, second.attempt, second.body) == (first.id, 2, first.body)
    assert second.headers["webhook-id"] == first.headers["webhook-id"]
    do_poll_listener(listener, [succeeded(first)])  # another one has the lease
    assert only_delivery(acme).state == "waiting"
    do_poll_listener(listener, [succeeded(second)])
    assert only_delivery(acme).state == "delivered"
    assert len(of(AuditEntry, acme, action="webhook.created")) == 1


def test_failed_attempts_are_repeated_as_for_webhooks(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    paid(acme, "1")
    now = datetime.now(UTC)
    for number, seconds in enumerate((*WEBHOOKS.retry_seconds, None), 1):
        (delivery,) = do_poll_listener(listener, now=now)
        result = ListenerResult(delivery.id, number, None if number == 1 else 500, 3, "refused" if number == 1 else "")
        assert do_poll_listener(listener, [result], now=now) == []
        if seconds is not None:
            assert only_delivery(acme).state == "waiting"
            now += timedelta(seconds=seconds * (1 + WEBHOOKS.jitter))
    assert only_delivery(acme).state == "failed"
    first, *others = sorted(of(WebhookAttempt, acme), key=lambda row: row.pk)
    assert first.error == "The connection failed: refused."
    assert {row.error for row in others} == {"The response status was 500."}
    (endpoint,) = of(WebhookEndpoint, acme)
    assert (endpoint.active, endpoint.failing_since) == (True, None)  # no user is notified of a local server
    do_replay(only_delivery(acme))
    assert [delivery.attempt for delivery in do_poll_listener(listener)] == [1]


def test_a_delivery_that_kills_its_listener_fails_at_last(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    paid(acme, "1")
    now = datetime.now(UTC)
    polls = [do_poll_listener(listener, now=now + number * WEBHOOKS.lease) for number in range(10)]
    assert list(map(len, polls)) == [1] * 8 + [0] * 2
    assert only_delivery(acme).state == "failed"


def test_a_listener_receives_its_event_types_of_its_tenant(acme):
    other = actions.do_create_tenant("other", "Other")
    listener, secret = do_open_listener(acme, URL, "laptop", event_types=["invoice.paid"])
    elsewhere, other_secret = do_open_listener(other, URL, "laptop", event_types=["alert.resolved"])
    assert (listener.pk == elsewhere.pk, secret == other_secret) == (False, False)
    paid(other, "1")
    event = paid(acme, "1")
    assert [delivery.headers["webhook-id"] for delivery in do_poll_listener(listener)] == [event.public_id]
    assert do_poll_listener(elsewhere) == []
    again, same_secret = do_open_listener(other, URL, "laptop")  # all types from now on
    assert (again.pk, same_secret) == (elsewhere.pk, other_secret)
    paid(other, "2")
    assert len(do_poll_listener(elsewhere)) == 1
    (changed,) = of(AuditEntry, other, action="webhook.updated")
    assert (changed.before["event_types"], changed.after["event_types"]) == (["alert.resolved"], [])


def test_a_poll_returns_at_most_ten_deliveries_oldest_first(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    events = [paid(acme, str(number)).public_id for number in range(12)]
    polled = [[delivery.headers["webhook-id"] for delivery in do_poll_listener(listener)] for _ in range(3)]
    assert polled == [events[:10], events[10:], []]
    paid(acme, "last")
    assert do_poll_listener(listener, max_deliveries=0) == []


def test_a_listener_that_stopped_polling_receives_no_new_events_and_is_removed(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    _note_poll(listener, LISTENS + timedelta(minutes=1))
    paid(acme, "1")
    assert of(WebhookDelivery, acme) == []
    do_poll_listener(listener)
    paid(acme, "2")
    assert len(of(WebhookDelivery, acme)) == 1
    _note_poll(listener, LISTENER_RETENTION - timedelta(hours=1))
    purge_expired()
    assert len(of(WebhookEndpoint, acme)) == 1
    _note_poll(listener, LISTENER_RETENTION + timedelta(hours=1))
    purge_expired()
    assert (of(WebhookEndpoint, acme), of(WebhookDelivery, acme), len(of(WebhookEvent, acme))) == ([], [], 2)


def _note_poll(listener: WebhookEndpoint, ago: timedelta) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        rows = WebhookEndpoint.objects.all_tenants().filter(pk=listener.pk)
        rows.update(polled_at=datetime.now(UTC) - ago)


def test_a_disabled_listener_ends(acme):
    listener, _ = do_open_listener(acme, URL, "laptop")
    paid(acme, "1")
    do_update_endpoint(listener, active=False)
    assert only_delivery(acme).state == "failed"
    with pytest.raises(Conflict, match="is disabled"):
        do_poll_listener(listener)
    do_open_listener(acme, URL, "laptop")
    assert do_poll_listener(listener) == []
    with pytest.raises(FieldRefused, match="URL of a listener"):
        do_update_endpoint(listener, url="https://example.com/")
    assert do_rotate_webhook_secret(listener).startswith("whsec_")


def test_listeners_are_limited_apart_from_endpoints(acme, monkeypatch):
    monkeypatch.setattr(listeners, "MAX_LISTENERS", 1)
    do_open_listener(acme, URL, "laptop")
    do_open_listener(acme, URL, "laptop")
    with pytest.raises(Conflict, match="maximum of 1 listeners"):
        do_open_listener(acme, URL, "desktop")
    for number in range(MAX_ENDPOINTS):
        do_create_endpoint(acme, f"https://hooks{number}.example/")
    with pytest.raises(Conflict, match=f"maximum of {MAX_ENDPOINTS} endpoints"):
        do_create_endpoint(acme, "https://hooks.example/")


@pytest.mark.django_db(transaction=True)
def test_concurrent_polls_share_deliveries():
    tenant = actions.do_create_tenant("acme", "Acme")
    listener, _ = do_open_listener(tenant, URL, "laptop")
    for number in range(12):
        paid(tenant, str(number))
    results = [succeeded(delivery) for delivery in do_poll_listener(listener)]
    first, second, *_ = at_once(
        lambda: do_poll_listener(listener, results),
        lambda: do_poll_listener(listener, reversed(results)),
        lambda: do_open_listener(tenant, URL, "laptop"),
        lambda: do_update_endpoint(listener, description="mine"),
    )
    assert sorted(map(len, (first, second))) == [0, 2]
    assert len(of(WebhookAttempt, tenant)) == len(results) == 10
