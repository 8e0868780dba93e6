"""Webhooks from the event to a receiver: recorded once, sent at least once, signed, retried, replayed and failed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client

from inference_worker.contract import ip_addresses
from tenants import actions
from tenants.actions.common import ActionRefused, Conflict
from tenants.actions.webhooks import (
    do_create_endpoint,
    do_delete_endpoint,
    do_replay,
    do_rotate_webhook_secret,
    do_send_test_event,
    do_update_endpoint,
)
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import (
    AuditEntry,
    OutboxEmail,
    Project,
    Tenant,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
)
from tenants.tasks import EVENT_RETENTION, deliver, purge_expired
from tenants.webhooks import sending, targets
from tenants.webhooks.event_types import INVOICE_PAID, INVOICE_PAST_DUE, InvoiceData
from tenants.webhooks.outbox import enqueue
from tenants.webhooks.queries import endpoints_with_last
from tests.support.code_blocks import blocks_of
from tests.support.outbox import send_webhooks
from tests.support.rows import of, unscoped
from tests.support.tenants.webhook_receiver import Receiver, is_genuine, receiving

pytestmark = pytest.mark.django_db
PAID: dict[str, Any] = dict.fromkeys(INVOICE_PAID.fields) | {"number": "INV-2026-000001"}


@pytest.fixture(autouse=True)
def _private(settings: Any) -> None:
    """Allow webhooks to this machine."""
    settings.MILLRACE = replace(settings.MILLRACE, webhook_allowed_private_hosts=("127.0.0.1",))


@pytest.fixture
def tenant() -> Tenant:
    return actions.do_create_tenant("acme", "Acme")


@pytest.fixture
def server() -> Iterator[tuple[Receiver, str]]:
    with receiving() as (receiver, port):
        yield receiver, f"http://127.0.0.1:{port}/hook?a=1"


def enqueue_event(tenant: Tenant, key: str = "paid:1") -> WebhookEvent | None:
    with tenant_scope(tenant):
        return enqueue(tenant.pk, INVOICE_PAID, key, InvoiceData(**PAID))


def later(*, hours: float = 25) -> None:
    """Make all pending deliveries and expired leases due."""
    with all_tenants_scope(BypassReason.COMMAND):
        rows = WebhookDelivery.objects.all_tenants()
        for row in rows:
            row.next_attempt_at -= timedelta(hours=hours)
            row.leased_until = row.leased_until and row.leased_until - timedelta(hours=hours)
            row.save()


def only_delivery(tenant: Tenant) -> WebhookDelivery:
    (row,) = of(WebhookDelivery, tenant)
    return row


def test_a_delivery_is_signed_and_logged(tenant, server):
    receiver, url = server
    endpoint, secret = do_create_endpoint(tenant, url)
    event = enqueue_event(tenant)
    assert send_webhooks() == 1
    (got,) = receiver.received
    assert got.path == "/hook?a=1"
    assert is_genuine(secret, got)
    assert got.headers["webhook-id"] == event.public_id
    assert abs(int(got.headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60
    assert json.loads(got.body) == {"type": "invoice.paid", "timestamp": event.created_at.isoformat(), "data": PAID}
    assert only_delivery(tenant).state == "delivered"
    (attempt,) = of(WebhookAttempt, tenant)
    assert (attempt.status, attempt.error, attempt.excerpt) == (200, "", "thanks")
    with tenant_scope(tenant):
        assert endpoints_with_last(tenant.pk).get(pk=endpoint.pk).last_status == 200
    assert send_webhooks() == 0


def test_the_standards_test_vector():
    """Check the test vector of the Standard Webhooks specification."""
    from tenants.webhooks.signing import signature

    secret, uid, at = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature([secret], uid, at, b'{"test": 2432232314}') == expected


def test_the_same_event_is_recorded_once(tenant, server):
    do_create_endpoint(tenant, server[1])
    assert enqueue_event(tenant) is not None
    assert enqueue_event(tenant) is None
    other = actions.do_create_tenant("other", "Other")
    assert enqueue_event(other) is not None  # keys belong to a tenant
    assert len(of(WebhookDelivery, tenant)) == 1
    with pytest.raises(TypeError, match=r"invoice.past_due needs PastDueInvoiceData, not InvoiceData"):
        enqueue(tenant.pk, INVOICE_PAST_DUE, "x", InvoiceData(**PAID))


def test_a_rolled_back_event_is_not_sent(tenant, server):
    do_create_endpoint(tenant, server[1])
    with pytest.raises(RuntimeError), tenant_scope(tenant), transaction.atomic():
        enqueue(tenant.pk, INVOICE_PAID, "k", InvoiceData(**PAID))
        raise RuntimeError
    assert unscoped(WebhookEvent).count() == 0
    assert send_webhooks() == 0


def test_endpoints_receive_their_event_types(tenant, server):
    _, url = server
    do_create_endpoint(tenant, url, event_types=["invoice.finalized"])
    every, _ = do_create_endpoint(tenant, url)
    off, _ = do_create_endpoint(tenant, url)
    do_update_endpoint(off, active=False)
    enqueue_event(tenant)
    assert only_delivery(tenant).endpoint_id == every.pk


def test_a_failed_delivery_is_retried_with_the_same_id(tenant, server):
    receiver, url = server
    receiver.status = 500
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    assert [send_webhooks(), send_webhooks()] == [1, 0]
    row = only_delivery(tenant)
    wait = (row.next_attempt_at - datetime.now(UTC)).total_seconds()
    assert 0.75 * sending.WEBHOOKS.retry_seconds[0] < wait < 1.25 * sending.WEBHOOKS.retry_seconds[0]
    assert of(WebhookEndpoint, tenant)[0].failing_since is not None
    receiver.status = 204
    later()
    assert send_webhooks() == 1
    assert len(set(receiver.ids)) == 1
    assert receiver.received[0].body == receiver.received[1].body
    assert only_delivery(tenant).state == "delivered"
    assert of(WebhookEndpoint, tenant)[0].failing_since is None


def test_a_delivery_fails_after_eight_attempts_and_can_be_replayed(tenant, server):
    receiver, url = server
    receiver.status, receiver.answer = 503, b"\x00\xff" + b"y" * 5000
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    for _ in range(10):
        send_webhooks()
        later()
    assert len(receiver.received) == 8
    assert only_delivery(tenant).state == "failed"
    assert len(of(WebhookAttempt, tenant)[0].excerpt) == 1024
    assert of(WebhookEndpoint, tenant)[0].active  # it has failed for a short time only
    receiver.status = 200
    do_replay(only_delivery(tenant))
    assert send_webhooks() == 1
    assert only_delivery(tenant).state == "delivered"
    assert len(set(receiver.ids)) == 1
    do_replay(only_delivery(tenant))  # also delivered events
    assert send_webhooks() == 1


def test_redirects_are_not_followed(tenant, server):
    receiver, url = server
    receiver.status, receiver.headers = 302, {"Location": url}
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    send_webhooks()
    assert len(receiver.received) == 1
    assert of(WebhookAttempt, tenant)[0].error == "The response status was 302."


def fail_for_good(tenant: Tenant) -> None:
    for _ in range(8):
        send_webhooks()
        later()


def test_an_endpoint_that_fails_for_days_is_disabled_with_an_email(tenant, server):
    receiver, url = server
    receiver.status = 500
    endpoint, _ = do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    send_webhooks()
    with all_tenants_scope(BypassReason.COMMAND):
        WebhookEndpoint.objects.all_tenants().update(failing_since=datetime.now(UTC) - timedelta(days=4))
    later()
    enqueue_event(tenant, "another")
    fail_for_good(tenant)
    row = of(WebhookEndpoint, tenant)[0]
    assert not row.active
    assert row.disabled_because.startswith("No delivery succeeded for 3 days.")
    assert {each.state for each in of(WebhookDelivery, tenant)} == {"failed"}
    failing, mail = sorted(of(OutboxEmail, tenant), key=lambda row: row.pk)
    assert failing.subject.startswith(f"Deliveries to {url} have failed since")
    assert mail.subject == "Webhook of Acme disabled"
    assert url in mail.body
    assert {row.notification_kind for row in (failing, mail)} == {"webhook_failing"}
    assert {tuple(row.roles) for row in (failing, mail)} == {("admin", "owner")}
    with pytest.raises(Conflict):
        do_replay(of(WebhookDelivery, tenant)[0])
    with pytest.raises(Conflict):
        do_send_test_event(endpoint)
    assert do_update_endpoint(endpoint, active=True).disabled_because == ""
    assert of(WebhookEndpoint, tenant)[0].failing_since is None


def test_an_endpoint_that_returns_410_is_disabled_immediately(tenant, server):
    receiver, url = server
    receiver.status = 410
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    send_webhooks()
    assert not of(WebhookEndpoint, tenant)[0].active
    assert only_delivery(tenant).state == "failed"


def test_a_rotated_secret_stays_valid_for_a_day(tenant, server):
    receiver, url = server
    endpoint, old = do_create_endpoint(tenant, url)
    new = do_rotate_webhook_secret(endpoint)
    assert new != old
    do_send_test_event(endpoint)
    send_webhooks()
    assert is_genuine(old, receiver.received[0])
    assert is_genuine(new, receiver.received[0])
    with all_tenants_scope(BypassReason.COMMAND):
        WebhookEndpoint.objects.all_tenants().update(previous_expires_at=datetime.now(UTC))
    do_send_test_event(endpoint)
    send_webhooks()
    assert not is_genuine(old, receiver.received[1])
    assert is_genuine(new, receiver.received[1])
    dumped = repr(list(unscoped(WebhookEndpoint).values()))
    assert old not in dumped
    assert new not in dumped


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://example.com/"},
        {"url": "https://user@example.com/"},
        {"url": "https://10.0.0.1/"},
        {"url": "https://[::1]/"},
        {"url": "https://2130706433/"},
        {"url": "ftp://127.0.0.1/"},
        {"url": "https://example.com/a b"},
        {"url": "https://example.com/", "event_types": ["nothing"]},
    ],
)
def test_forbidden_urls_are_rejected(tenant, fields):
    with pytest.raises(ActionRefused):
        do_create_endpoint(tenant, **fields)
    assert of(WebhookEndpoint, tenant) == []


@pytest.fixture
def inside(monkeypatch) -> list[bool]:
    """Resolve every name to an internal address. Return, for each lookup, whether a transaction was open."""
    open_then: list[bool] = []
    look_up = targets.check_url

    def noted(url: str, private_hosts: tuple[str, ...]) -> str:
        open_then.append(connection.in_atomic_block)
        return look_up(url, private_hosts)

    monkeypatch.setattr("tenants.actions.webhooks.check_url", noted)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 443))]
    resolver = SimpleNamespace(SOCK_STREAM=socket.SOCK_STREAM, getaddrinfo=lambda *_, **__: found)
    monkeypatch.setattr(ip_addresses, "socket", resolver)
    return open_then


@pytest.mark.django_db(transaction=True)
def test_a_url_of_an_internal_host_is_rejected_when_it_is_set(tenant, server, inside):
    with pytest.raises(ActionRefused, match=r"hooks\.example has an internal address\. Use a host"):
        do_create_endpoint(tenant, "https://hooks.example/")
    endpoint, _ = do_create_endpoint(tenant, server[1])
    with pytest.raises(ActionRefused, match=r"hooks\.example has an internal address"):
        do_update_endpoint(endpoint, url="https://hooks.example/")
    do_update_endpoint(endpoint, active=False)
    assert [row.url for row in of(WebhookEndpoint, tenant)] == [server[1]]
    assert inside == [False] * 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}])
def test_the_api_rejects_an_internal_url_with_400(tenant, server, inside, headers):
    with tenant_scope(tenant):
        project = Project.objects.for_tenant(tenant).get()
    _, secret = actions.do_create_api_key(project, "k", scopes=("manage",))
    client = Client(headers={"Authorization": f"Bearer {secret}"} | headers)
    body = {"url": "https://hooks.example/", "event_types": ["invoice.paid"]}
    response = client.post("/api/webhooks", body, content_type="application/json")
    assert (response.status_code, response.json()["code"]) == (400, "webhook_url_refused")
    assert "Use a host with a public address" in response.json()["errors"]["url"][0]
    made = client.post("/api/webhooks", body | {"url": server[1]}, content_type="application/json")
    assert made.status_code == 201
    changed = client.patch(f"/api/webhooks/{made.json()['id']}", body, content_type="application/json")
    assert (changed.status_code, changed.json()["code"]) == (400, "webhook_url_refused")
    assert [row.url for row in of(WebhookEndpoint, tenant)] == [server[1]]
    assert inside == [False] * 3


def test_actions_are_audited_without_secrets(tenant, server):
    endpoint, secret = do_create_endpoint(tenant, server[1])
    do_update_endpoint(endpoint, description="Books")
    do_rotate_webhook_secret(endpoint)
    do_replay(do_send_test_event(endpoint))
    do_delete_endpoint(endpoint)
    entries = [entry for entry in of(AuditEntry, tenant) if entry.action.startswith("webhook")]
    verbs = [
        "webhook.created",
        "webhook.updated",
        "webhook.secret_rotated",
        "webhook.tested",
        "webhook.replayed",
        "webhook.deleted",
    ]
    assert sorted(entry.action for entry in entries) == sorted(verbs)
    nonces = [row.nonce for row in unscoped(WebhookEndpoint).all()]
    assert not any(word in f"{entry.before}{entry.after}" for entry in entries for word in [secret, *nonces])
    with pytest.raises(Conflict):
        do_rotate_webhook_secret(endpoint)


def test_old_events_are_deleted(tenant, server):
    do_send_test_event(do_create_endpoint(tenant, server[1])[0])
    send_webhooks()
    enqueue_event(tenant)
    with all_tenants_scope(BypassReason.COMMAND):
        WebhookEvent.objects.all_tenants().filter(event_type="webhook.test").update(
            created_at=datetime.now(UTC) - EVENT_RETENTION
        )
    purge_expired()
    assert [event.event_type for event in of(WebhookEvent, tenant)] == ["invoice.paid"]
    assert of(WebhookAttempt, tenant) == []


# With real commits: concurrent and killed senders


@pytest.mark.django_db(transaction=True)
def test_concurrent_senders_send_each_delivery_once(server):
    receiver, url = server
    tenants = [actions.do_create_tenant(f"t{number}", "T") for number in range(4)]
    for tenant in tenants:
        do_create_endpoint(tenant, url)
        for number in range(5):
            enqueue_event(tenant, f"k{number}")
    with ThreadPoolExecutor(3) as pool:
        tried = list(pool.map(lambda _: deliver("webhook"), range(3)))
    tried.append(deliver("webhook"))  # deliveries for which no sender was free
    assert sum(tried) == len(receiver.received) == len(set(receiver.ids)) == 20


@pytest.mark.django_db(transaction=True)
def test_one_tenants_hanging_server_delays_no_other(server):
    receiver, url = server
    slow, quick = (actions.do_create_tenant(name, name) for name in ("slow", "quick"))
    go = threading.Event()
    with receiving() as (hanging, port):
        hanging.before = lambda: go.wait(20)
        for tenant, where in ((slow, f"http://127.0.0.1:{port}/"), (quick, url)):
            do_create_endpoint(tenant, where)
            for number in range(3):
                enqueue_event(tenant, f"k{number}")
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(deliver, "webhook")
            while len(receiver.received) < 3:
                assert not busy.done()
            assert len(hanging.received) == 1  # it keeps one sender busy, not all
            go.set()
            busy.result()
    assert len(hanging.received) == 3


@pytest.mark.django_db(transaction=True)
def test_concurrent_calls_record_an_event_once():
    tenant = actions.do_create_tenant("acme", "Acme")
    start = threading.Barrier(4)

    def note(_: int) -> bool:
        start.wait()
        try:
            return enqueue_event(tenant) is not None
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(note, range(4))) == [False, False, False, True]


class Killed(BaseException):
    """An error that simulates a kill."""


@pytest.mark.parametrize("place", ["attempt", "record"])
def test_another_sender_takes_over_from_a_killed_one(tenant, server, monkeypatch, place):
    receiver, url = server
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sending.WebhookOutbox, place, die)
        send_webhooks()
    assert send_webhooks() == 0  # its lease is active
    later(hours=0.1)
    assert send_webhooks() == 1
    assert len(receiver.received) == (2 if place == "record" else 1)
    assert len(set(receiver.ids)) == 1
    assert only_delivery(tenant).state == "delivered"


def test_a_sender_with_an_expired_lease_does_not_postpone_anothers_delivery(tenant, server):
    """Its lease expired and another sender took over. Its attempt is logged, and the other continues."""
    _, url = server
    do_create_endpoint(tenant, url)
    enqueue_event(tenant)
    slow = sending.WEBHOOKS.claim(datetime.now(UTC))
    later(hours=0.1)
    other = sending.WEBHOOKS.claim(datetime.now(UTC))
    sending.WEBHOOKS.record(slow, sending.WebhookResponse(500, 1, "slow"), datetime.now(UTC))
    assert only_delivery(tenant).leased_until == other.leased_until
    sending.WEBHOOKS.record(other, sending.WebhookResponse(200, 1), datetime.now(UTC))
    sending.WEBHOOKS.record(slow, sending.WebhookResponse(500, 1, "slow"), datetime.now(UTC))
    assert only_delivery(tenant).state == "delivered"
    assert len(of(WebhookAttempt, tenant)) == 3


def test_an_endpoint_deleted_during_a_delivery(tenant, server):
    endpoint, _ = do_create_endpoint(tenant, server[1])
    enqueue_event(tenant)
    claimed = sending.WEBHOOKS.claim(datetime.now(UTC))
    do_delete_endpoint(endpoint)
    assert not sending.WEBHOOKS.record(claimed, sending.WebhookResponse(200, 1), datetime.now(UTC))
    assert of(WebhookAttempt, tenant) == []


def test_the_documented_example_verifies(tenant, server):
    """Run the code of docs/reference/webhooks.md unchanged."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "webhooks.md").read_text(encoding="utf-8")
    found: dict[str, Callable[..., bool]] = {}
    exec(next(block.code for block in blocks_of(text) if block.language == "python"), found)  # noqa: S102
    receiver, url = server
    endpoint, secret = do_create_endpoint(tenant, url)
    do_send_test_event(endpoint)
    send_webhooks()
    (got,) = receiver.received
    genuine = found["is_genuine"]
    assert genuine(secret, got.headers, got.body)
    assert not genuine(secret, got.headers, got.body + b" ")
    assert not genuine("whsec_" + "A" * 44, got.headers, got.body)
    assert not genuine(secret, got.headers | {"webhook-timestamp": "1"}, got.body)
