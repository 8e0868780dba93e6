"""Alert channels: Slack-compatible webhooks and PagerDuty, with the outbox, checks and log of webhooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tenants import actions
from tenants.actions.channels import do_create_pagerduty_channel, do_create_slack_channel
from tenants.actions.common import ActionRefused, Conflict, FieldRefused
from tenants.actions.credentials import do_reencrypt_credentials
from tenants.actions.webhooks import do_replay, do_rotate_webhook_secret, do_send_test_event, do_update_endpoint
from tenants.credentials.encryption import decrypt_secret
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import AuditEntry, Tenant, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from tenants.webhooks.channels import PAGERDUTY_URLS, summary
from tenants.webhooks.event_types import BUDGET_THRESHOLD_REACHED, EVENT_TYPES, AlertData, BudgetAlertData
from tenants.webhooks.outbox import enqueue
from tenants.webhooks.sending import OUTDATED
from tests.support.outbox import send_webhooks
from tests.support.rows import of
from tests.support.tenants.webhook_receiver import Receiver, receiving

pytestmark = pytest.mark.django_db
KEY = "R0ut1ngKey" * 3 + "ab"
BUDGET = {"id": 7, "name": "Prod <!here> & co", "unit": "money", "period": "month", "mode": "hard"}
ALERT: dict[str, Any] = {
    **{"alert_id": 3, "budget": BUDGET, "period_start": "2026-11-01T00:00:00+00:00", "period_end": None},
    **{"threshold": "80", "used": 400_250_000_000, "limit": 500 * 10**9, "percent": 80, "forecast": None},
    "currency": "USD",
}


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
        yield receiver, f"http://127.0.0.1:{port}"


def alert(tenant: Tenant, key: str = "a", **changes: Any) -> Any:
    with tenant_scope(tenant):
        return enqueue(tenant.pk, BUDGET_THRESHOLD_REACHED, key, BudgetAlertData(**ALERT | changes))


def test_slack_receives_a_message_and_its_url_stays_secret(tenant, server):
    receiver, url = server
    row = do_create_slack_channel(tenant, f"{url}/services/T0/secret", event_types=["budget.threshold_reached"])
    alert(tenant)
    assert send_webhooks() == 1
    (got,) = receiver.received
    assert got.path == "/services/T0/secret"
    text = "Budget Prod &lt;!here&gt; &amp; co: 80% reached. $400.25 of $500.00 used."
    assert json.loads(got.body) == {"text": text}
    assert "webhook-signature" not in got.headers
    assert of(WebhookDelivery, tenant)[0].state == "delivered"
    written = [row.url, str(row), *(json.dumps(entry.after) for entry in of(AuditEntry, tenant))]
    assert not any("secret" in text for text in written)
    assert b"secret" not in bytes(row.ciphertext)


def test_pagerduty_groups_the_alerts_of_a_period(tenant, server, monkeypatch):
    receiver, url = server
    monkeypatch.setitem(PAGERDUTY_URLS, "eu", f"{url}/v2/enqueue")
    row = do_create_pagerduty_channel(tenant, KEY, region="eu")
    for threshold in ("80", "100"):
        alert(tenant, threshold, threshold=threshold)
    alert(tenant, "next", threshold="80", period_start="2026-12-01T00:00:00+00:00")
    for _ in range(3):
        send_webhooks()
    bodies = [json.loads(got.body) for got in receiver.received]
    assert [body["payload"]["severity"] for body in bodies] == ["warning", "critical", "warning"]
    assert {body["routing_key"] for body in bodies} == {KEY}
    first, second, third = (body["dedup_key"] for body in bodies)
    assert first == second != third
    assert bodies[0]["event_action"] == "trigger"
    assert bodies[0]["payload"]["summary"].startswith("Budget Prod <!here> & co: 80% reached.")
    assert KEY not in str(row.__dict__)


def rule_alert(tenant: Tenant, event_type: str, alert_id: int = 5) -> None:
    data = AlertData(
        alert_id=alert_id,
        rule={"metric": "error_rate"},
        summary="Error rate is 9%",
        value=900,
        samples=40,
        triggered_at="2026-11-01T00:00:00+00:00",
        resolved_at=None,
    )
    with tenant_scope(tenant):
        enqueue(tenant.pk, EVENT_TYPES[event_type], f"{event_type}:{alert_id}", data)


def send_later() -> None:
    """Send the due deliveries, and those that failed without waiting for their next attempt."""
    with all_tenants_scope(BypassReason.COMMAND):
        WebhookDelivery.objects.all_tenants().filter(state="pending").update(
            next_attempt_at=datetime.now(UTC) - timedelta(seconds=1)
        )
    send_webhooks()


@pytest.fixture
def incidents(tenant, server, monkeypatch) -> Receiver:
    """A PagerDuty service."""
    receiver, url = server
    monkeypatch.setitem(PAGERDUTY_URLS, "eu", f"{url}/v2/enqueue")
    do_create_pagerduty_channel(tenant, KEY, region="eu")
    return receiver


def trigger_in_vain(tenant: Tenant, receiver: Receiver) -> None:
    """Trigger an alert whose event the receiver rejects, so that it is sent again later."""
    receiver.status = 500
    rule_alert(tenant, "alert.triggered")
    send_webhooks()
    receiver.status = 200


def actions_of(receiver: Receiver) -> list[str]:
    return [json.loads(got.body)["event_action"] for got in receiver.received]


def test_a_late_trigger_does_not_open_a_resolved_incident_again(tenant, incidents):
    trigger_in_vain(tenant, incidents)
    rule_alert(tenant, "alert.resolved")
    send_webhooks()
    send_later()
    assert actions_of(incidents) == ["trigger", "resolve"]
    late, resolving = sorted(of(WebhookDelivery, tenant), key=lambda row: row.pk)
    assert (late.state, resolving.state) == ("failed", "delivered")
    assert of(WebhookAttempt, tenant, delivery=late)[-1].error == OUTDATED
    assert of(WebhookEndpoint, tenant)[0].failing_since is None  # what was sent last has arrived
    do_replay(late)
    send_webhooks()
    assert actions_of(incidents) == ["trigger", "resolve"]


def test_a_late_trigger_is_sent_before_an_unsent_resolve(tenant, incidents):
    """The incident is opened and resolved, although the alert was resolved before its trigger arrived."""
    trigger_in_vain(tenant, incidents)
    rule_alert(tenant, "alert.resolved")
    send_later()
    assert actions_of(incidents) == ["trigger", "trigger", "resolve"]
    assert {row.state for row in of(WebhookDelivery, tenant)} == {"delivered"}


def test_a_late_trigger_is_sent_if_only_another_alert_is_resolved(tenant, incidents):
    trigger_in_vain(tenant, incidents)
    rule_alert(tenant, "alert.resolved", alert_id=6)
    send_webhooks()
    send_later()
    assert actions_of(incidents) == ["trigger", "resolve", "trigger"]


def test_slack_receives_a_late_trigger_of_a_resolved_alert(tenant, server):
    receiver, url = server
    do_create_slack_channel(tenant, f"{url}/x")
    trigger_in_vain(tenant, receiver)
    rule_alert(tenant, "alert.resolved")
    send_webhooks()
    send_later()
    assert len(receiver.received) == 3


@pytest.mark.parametrize(
    "url", ["http://hooks.slack.com/x", "https://10.0.0.8/x", "https://localhost/x", "ftp://a.b/c"]
)
def test_internal_targets_are_rejected(tenant, url):
    with pytest.raises(FieldRefused):
        do_create_slack_channel(tenant, url)
    assert of(WebhookEndpoint, tenant) == []


def test_wrong_keys_and_events_are_rejected(tenant):
    for key in ("short", "x" * 33, "ä" * 32, "a" * 31 + "\n"):
        with pytest.raises(FieldRefused, match="integration key"):
            do_create_pagerduty_channel(tenant, key)
    with pytest.raises(FieldRefused, match="region"):
        do_create_pagerduty_channel(tenant, KEY, region="moon")
    with pytest.raises(ActionRefused, match="Unknown event type"):
        do_create_pagerduty_channel(tenant, KEY, event_types=["none"])


def test_a_channel_has_no_signing_secret_and_keeps_its_target(tenant, server):
    row = do_create_slack_channel(tenant, f"{server[1]}/x")
    with pytest.raises(Conflict, match="no signing secret"):
        do_rotate_webhook_secret(row)
    with pytest.raises(FieldRefused, match="cannot be changed"):
        do_update_endpoint(row, url=f"{server[1]}/y")
    assert do_update_endpoint(row, description="#ops").description == "#ops"


def test_without_its_encryption_key_a_delivery_fails_and_is_retried(tenant, server, settings):
    receiver, url = server
    row = do_create_slack_channel(tenant, f"{url}/x")
    keys = settings.READ_CREDENTIAL_KEYS()
    settings.READ_CREDENTIAL_KEYS = lambda: ("another key of at least thirty-two characters",)
    do_send_test_event(row)
    send_webhooks()
    assert receiver.received == []
    (attempt,) = of(WebhookAttempt, tenant)
    assert "cannot be decrypted" in attempt.error
    assert of(WebhookDelivery, tenant)[0].state == "pending"
    settings.READ_CREDENTIAL_KEYS = lambda: ("a new key of at least thirty-two characters", *keys)
    assert do_reencrypt_credentials() == 1
    settings.READ_CREDENTIAL_KEYS = lambda: ("a new key of at least thirty-two characters",)
    assert decrypt_secret(of(WebhookEndpoint, tenant)[0]) == f"{url}/x"


def test_without_encryption_keys_no_channel_is_created(tenant, server, settings):
    settings.READ_CREDENTIAL_KEYS = lambda: ()
    with pytest.raises(Conflict, match="encryption key"):
        do_create_slack_channel(tenant, f"{server[1]}/x")
    assert of(WebhookEndpoint, tenant) == []


@pytest.mark.parametrize(
    ("event_type", "payload", "text", "level"),
    [
        ("budget.threshold_reached", ALERT | {"threshold": "forecast"}, "the forecast exceeds", "warning"),
        (
            "budget.threshold_reached",
            ALERT | {"threshold": "100", "budget": BUDGET | {"mode": "soft"}},
            "100%",
            "warning",
        ),
        (
            "budget.threshold_reached",
            ALERT | {"budget": BUDGET | {"unit": "tokens"}},
            "250,000,000 tokens of",
            "warning",
        ),
        ("budget.threshold_reached", ALERT | {"currency": "EUR"}, "€400.25 of €500.00 used.", "warning"),
        ("budget.threshold_reached", ALERT | {"currency": "JPY"}, "JPY 400 of JPY 500 used.", "warning"),
        ("budget.threshold_reached", ALERT | {"currency": "KWD"}, "KWD 400.250 of KWD 500.000", "warning"),
        (
            "budget.threshold_reached",
            ALERT | {"used": 1_234_569_999_999, "currency": None},
            "$1,234.56 of $500.00",
            "warning",
        ),
        ("payment.recorded", {"amount_cents": -1234}, "−$12.34", "info"),
        ("payment.recorded", {"amount_cents": 1234, "currency": "JPY"}, "of JPY 1,234 recorded", "info"),
        ("invoice.paid", {"number": "INV-2", "total_cents": 1234, "currency": "KWD"}, "INV-2, KWD 1.234.", "info"),
        (
            "invoice.past_due",
            {"number": "INV-1", "total_cents": 100_005},
            "Invoice past due: INV-1, $1,000.05.",
            "warning",
        ),
        ("webhook.test", {"text": "This is a test."}, "Millrace test: This is a test.", "info"),
    ],
)
def test_events_in_words(event_type, payload, text, level):
    assert text in summary(event_type, payload)
    assert EVENT_TYPES[event_type].severity(payload) == level
