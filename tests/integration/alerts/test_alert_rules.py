"""Alert rules: their conditions, and alerts that are sent once, also with concurrent and killed checks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core import mail as outbox
from django.db import IntegrityError, connection, transaction

from millrace.apps.alerts import checks, conditions
from millrace.apps.alerts.actions import (
    MAX_RULES,
    do_acknowledge_rule_alert,
    do_change_alert_rule,
    do_create_alert_rule,
    do_remove_alert_rule,
)
from millrace.apps.alerts.checks import check_rules, purge_expired
from millrace.apps.alerts.models import AlertRule, RuleAlert
from millrace.apps.deployments.models import Deployment
from millrace.apps.health.models import HealthEvent
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.actions.common import ActionRefused, Conflict, FieldRefused
from tenants.actions.webhooks import do_create_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import AuditEntry, OutboxEmail, Tenant, User, WebhookDelivery, WebhookEvent
from tenants.webhooks.channels import pagerduty_body, summary
from tenants.webhooks.event_types import ALERT_TRIGGERED
from tests.support.emails import check_email
from tests.support.outbox import send_emails
from tests.support.rows import of, only_project, unscoped

pytestmark = pytest.mark.django_db
NOW = datetime.now(UTC) + timedelta(minutes=1)  # rules are created before it
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


@pytest.fixture
def tenant() -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme", owner=User.objects.create_user("owner@acme.example"))
    for role in ("billing", "developer", "readonly"):
        actions.do_add_member(tenant, User.objects.create_user(f"{role}@acme.example"), role)
    return tenant


def send_requests(tenant: Tenant, count: int, at: datetime = NOW - MINUTE, **fields: Any) -> None:
    """Create records of requests."""
    given = {
        **{"project_id": 1, "key_id": 1, "gateway_id": "g", "endpoint": "chat", "requested_model": "m"},
        **{"served_model": "m", "stream": False, "status": "200", "code": "", "outcome": "completed"},
        **{"total_ms": 100, "ttft_ms": 50},
    } | fields
    with all_tenants_scope(BypassReason.COMMAND):
        taken = RequestRecord.objects.all_tenants().count()
        RequestRecord.objects.all_tenants().bulk_create(
            RequestRecord(tenant_id=tenant.pk, started_at=at, request_id=f"req_{taken + number}", **given)
            for number in range(count)
        )


def error_rule(tenant: Tenant, **fields: Any) -> AlertRule:
    return do_create_alert_rule(tenant, **({"metric": "error_rate", "threshold": 500} | fields))


def alerts(tenant: Tenant) -> list[RuleAlert]:
    return sorted(of(RuleAlert, tenant), key=lambda row: row.pk)


# Conditions


def events(tenant: Tenant) -> list[str]:
    return [event.event_type for event in sorted(of(WebhookEvent, tenant), key=lambda row: row.pk)]


def test_an_error_rate_above_the_threshold_alerts_once(tenant):
    do_create_endpoint(tenant, "https://hooks.example/", event_types=["alert.triggered"])
    error_rule(tenant)
    send_requests(tenant, 90)
    send_requests(tenant, 10, outcome="failed", status="500")
    assert [check_rules(NOW), check_rules(NOW)] == [1, 0]
    (alert,) = alerts(tenant)
    assert alert.summary == "Error rate is 10.00%, above 5.00%: 10 of 100 requests failed in 15 minutes"
    assert (alert.value, alert.threshold, alert.samples, alert.resolved_at) == (1000, 500, 100, None)
    (event,) = of(WebhookEvent, tenant)
    assert (event.event_type, event.payload["alert_id"], alert.event_id) == ("alert.triggered", alert.pk, event.pk)
    assert len(of(WebhookDelivery, tenant)) == 1
    (mail,) = of(OutboxEmail, tenant)
    assert (mail.pk, mail.subject) == (alert.email_id, "Error rate is 10.00%, above 5.00%")
    assert "10 of 100 requests failed in 15 minutes" in mail.body
    assert mail.body.endswith("/t/acme/alerts/rules/")
    assert mail.roles == ["owner", "admin", "developer"]
    assert send_emails() == 1
    check_email(outbox.outbox[0], "10 of 100 requests failed in 15 minutes")


@pytest.mark.parametrize(
    ("failed", "completed", "fields"),
    [
        (5, 95, {}),  # not above the threshold
        (9, 10, {}),  # below the minimum of requests
        (10, 0, {"min_requests": 11}),
    ],
)
def test_an_error_rate_at_the_threshold_or_of_few_requests_does_not_alert(tenant, failed, completed, fields):
    error_rule(tenant, **fields)
    send_requests(tenant, completed)
    send_requests(tenant, failed, outcome="failed")
    assert check_rules(NOW) == 0


def test_only_accepted_requests_in_the_window_and_scope_count(tenant):
    project = only_project(tenant)
    error_rule(tenant, project=project, model="m", min_requests=10, window_minutes=5)
    failed = {"outcome": "failed", "project_id": project.pk}
    send_requests(tenant, 50, **failed, at=NOW - 6 * MINUTE)  # before the window
    send_requests(tenant, 50, outcome="failed", project_id=project.pk + 1)  # of another project
    send_requests(tenant, 50, **failed, served_model="n", requested_model="n")  # of another model
    send_requests(tenant, 50, **failed, replay_of="req_0")  # returned again
    send_requests(tenant, 9, **failed)
    for outcome in ("limited", "refused"):
        send_requests(tenant, 50, outcome=outcome, project_id=project.pk)
    assert check_rules(NOW) == 0
    send_requests(tenant, 1, **failed, requested_model="alias")  # served by the model
    assert check_rules(NOW) == 1
    assert f"10 of 10 requests of project {project.name} to m failed in 5 minutes" in alerts(tenant)[0].summary


def test_requests_of_other_tenants_do_not_count(tenant):
    error_rule(tenant, min_requests=1)
    send_requests(actions.do_create_tenant("other", "Other"), 50, outcome="failed")
    assert check_rules(NOW) == 0


def test_a_check_reads_a_bounded_number_of_requests(tenant, monkeypatch):
    monkeypatch.setattr(conditions, "MAX_REQUESTS", 30)
    error_rule(tenant)
    send_requests(tenant, 50, outcome="failed", at=NOW - 5 * MINUTE)
    send_requests(tenant, 30)
    assert check_rules(NOW) == 0
    send_requests(tenant, 10, outcome="failed", at=NOW - MINUTE / 2)
    assert check_rules(NOW) == 1
    assert alerts(tenant)[0].samples == 30


def test_the_95th_percentile_of_ttft_alerts(tenant):
    do_create_alert_rule(tenant, metric="ttft_p95", threshold=2000, min_requests=20)
    send_requests(tenant, 100, ttft_ms=None)  # without a token
    send_requests(tenant, 19, ttft_ms=2000)
    send_requests(tenant, 1, ttft_ms=9000)
    assert check_rules(NOW) == 0
    send_requests(tenant, 1, ttft_ms=9000)
    assert check_rules(NOW) == 1
    assert alerts(tenant)[0].summary == "TTFT p95 is 9,000 ms, above 2,000 ms: of 21 requests in 15 minutes"


def test_keys_alert_once_each_before_they_expire(tenant):
    project = only_project(tenant)
    soon, _ = actions.do_create_api_key(project, "soon", expires_at=NOW + 3 * DAY)
    actions.do_create_api_key(project, "late", expires_at=NOW + 8 * DAY)
    actions.do_create_api_key(project, "never")
    revoked, _ = actions.do_create_api_key(project, "revoked", expires_at=NOW + 3 * DAY)
    actions.do_revoke_api_key(revoked)
    do_create_alert_rule(tenant, metric="key_expiry", threshold=7)
    assert [check_rules(NOW), check_rules(NOW)] == [1, 0]
    (alert,) = alerts(tenant)
    assert (alert.subject, alert.value) == (str(soon.pk), 3)
    assert alert.summary.startswith(f"API key soon ({soon.prefix}…) expires on ")
    assert check_rules(NOW + 2 * DAY) == 1  # the other one
    assert check_rules(NOW + 4 * DAY) == 0
    assert [row.resolved_at is not None for row in alerts(tenant)] == [True, False]


def test_credit_below_the_threshold_alerts_and_a_tenant_without_credit_does_not(tenant):
    do_create_alert_rule(tenant, metric="credit", threshold=10 * 10**9)
    assert check_rules(NOW) == 0
    give(tenant, 9_120_000_000)
    give(tenant, 5 * 10**9, expires_at=NOW + DAY)
    assert check_rules(NOW) == 0
    assert check_rules(NOW + 2 * DAY) == 1
    assert alerts(tenant)[0].summary == "Credit balance is $9.12, below $10.00"
    assert of(OutboxEmail, tenant)[0].roles == ["owner", "admin", "billing"]


def give(tenant: Tenant, nano: int, **fields: Any) -> None:
    from billing.models import CreditGrant

    with all_tenants_scope(BypassReason.COMMAND):
        CreditGrant.objects.create(tenant=tenant, nano=nano, grant_type="promotional", starts_at=NOW - DAY, **fields)


def test_the_balance_of_a_prepaid_tenant_alerts(tenant):
    """It counts usage at the tenant's own prices, and what is due beside usage."""
    from billing.invoicing.one_off_lines import do_add_one_off_line
    from billing.invoicing.price_terms import do_add_price_term
    from billing.invoicing.setup import do_set_prepaid
    from billing.rates.terms import TermRule, TermType
    from tests.support.billing.books import price, use

    do_create_alert_rule(tenant, metric="credit", threshold=10 * 10**9)
    month = f"{NOW:%Y-%m}"
    half = TermRule(TermType.DISCOUNT, ppm=500_000)
    do_add_price_term(tenant, half, description="Half", first_month=month)
    do_set_prepaid(tenant, is_prepaid=True)
    give(tenant, 20 * 10**9)
    use(tenant, NOW, (price("20"), 10**6))
    assert check_rules(NOW) == 0
    do_add_one_off_line(tenant, month=month, description="Setup", cents=1)
    assert check_rules(NOW) == 1
    assert alerts(tenant)[0].summary == "Credit balance is $9.99, below $10.00"


# Health of the platform


def open_event(issue_type: str, subject: str, minutes: int, closed: int | None = None) -> HealthEvent:
    """Create a health event that was found `minutes` ago, and closed `closed` minutes ago."""
    with all_tenants_scope(BypassReason.COMMAND):
        return HealthEvent.objects.create(
            issue_type=issue_type,
            subject=subject,
            urgent=True,
            title=f"{subject} is down",
            opened_at=NOW - minutes * MINUTE,
            closed_at=None if closed is None else NOW - closed * MINUTE,
        )


def health_rule(tenant: Tenant, metric: str, **fields: Any) -> AlertRule:
    row = do_create_alert_rule(tenant, **({"metric": metric, "threshold": 3} | fields))
    with all_tenants_scope(BypassReason.COMMAND):
        AlertRule.objects.all_tenants().filter(pk=row.pk).update(created_at=NOW - DAY)
    return row


def test_a_replica_without_heartbeat_alerts_after_some_minutes(tenant):
    health_rule(tenant, "replica_down")
    event = open_event("replica", "w1/m", 2)
    open_event("model", "m", 30)
    assert check_rules(NOW) == 0
    assert [check_rules(NOW + MINUTE), check_rules(NOW + 2 * MINUTE)] == [1, 0]
    (alert,) = alerts(tenant)
    assert alert.summary.startswith("w1/m is down (since ")
    with all_tenants_scope(BypassReason.COMMAND):
        HealthEvent.objects.filter(pk=event.pk).update(closed_at=NOW + 3 * MINUTE)
    assert check_rules(NOW + 4 * MINUTE) == 0
    assert alerts(tenant)[0].resolved_at is not None
    assert check_rules(NOW + 5 * MINUTE) == 0  # nothing repeats


def test_an_event_that_is_over_before_the_check_still_alerts_once(tenant):
    health_rule(tenant, "replica_down")
    open_event("replica", "w1/m", 20, closed=10)
    open_event("replica", "w2/m", 12, closed=10)  # too short
    assert [check_rules(NOW), check_rules(NOW)] == [1, 0]
    assert alerts(tenant)[0].resolved_at is not None
    assert events(tenant) == ["alert.triggered", "alert.resolved"]


def test_deployments_and_upstreams_alert_by_their_name(tenant):
    with all_tenants_scope(BypassReason.COMMAND):
        Deployment.objects.create(name="far", source="https://up.example", engine="openai", pools={}, state="loaded")
    health_rule(tenant, "deployment_down", model="m")
    health_rule(tenant, "upstream_down")
    for issue_type, subject in (("model", "m"), ("model", "n"), ("failures", "far"), ("failures", "m")):
        open_event(issue_type, subject, 5)
    assert check_rules(NOW) == 2
    assert sorted(row.summary.split(" ")[0] for row in alerts(tenant)) == ["far", "m"]
    open_event("upstream", "far", 5)
    open_event("upstream", "m", 5)  # no upstream
    assert check_rules(NOW) == 1


def test_events_from_before_the_rule_that_are_over_do_not_alert(tenant):
    do_create_alert_rule(tenant, metric="replica_down", threshold=3)
    open_event("replica", "w1/m", 30, closed=10)
    assert check_rules(NOW) == 0


# Life of an alert


def test_an_alert_of_requests_is_resolved_after_a_window_and_can_trigger_again(tenant):
    error_rule(tenant, window_minutes=5)
    send_requests(tenant, 30, outcome="failed")
    assert check_rules(NOW) == 1
    assert check_rules(NOW + 3 * MINUTE) == 0  # still above
    assert check_rules(NOW + 6 * MINUTE) == 0
    assert alerts(tenant)[0].resolved_at is None
    check_rules(NOW + 8 * MINUTE)
    assert alerts(tenant)[0].resolved_at == NOW + 8 * MINUTE
    assert [event.event_type for event in of(WebhookEvent, tenant)].count("alert.resolved") == 1
    send_requests(tenant, 30, outcome="failed", at=NOW + 10 * MINUTE)
    assert check_rules(NOW + 11 * MINUTE) == 1
    assert len(alerts(tenant)) == 2


def test_a_muted_rule_records_its_alerts_and_sends_none(tenant):
    do_create_endpoint(tenant, "https://hooks.example/")
    rule = error_rule(tenant, window_minutes=5)
    do_change_alert_rule(rule, muted_until=NOW + 2 * MINUTE)
    send_requests(tenant, 30, outcome="failed")
    assert check_rules(NOW) == 1
    assert alerts(tenant)[0].is_muted
    check_rules(NOW + 20 * MINUTE)
    assert alerts(tenant)[0].resolved_at is not None
    assert [of(model, tenant) for model in (WebhookEvent, OutboxEmail)] == [[], []]
    send_requests(tenant, 30, outcome="failed", at=NOW + 30 * MINUTE)
    check_rules(NOW + 31 * MINUTE)
    assert len(of(OutboxEmail, tenant)) == 1


def test_an_alert_is_acknowledged_once(tenant):
    error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    (alert,) = alerts(tenant)
    assert [do_acknowledge_rule_alert(alert), do_acknowledge_rule_alert(alert)] == [True, False]
    (entry,) = of(AuditEntry, tenant, action="rule_alert.acknowledged")
    assert entry.object_name.startswith("Error rate is 100.00%")


def test_a_removed_rule_resolves_its_alerts_and_is_not_checked(tenant):
    rule = error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    assert [do_remove_alert_rule(rule), do_remove_alert_rule(rule)] == [True, False]
    assert alerts(tenant)[0].resolved_at is not None
    assert events(tenant) == ["alert.triggered", "alert.resolved"]
    assert check_rules(NOW) == 0
    assert checks._check(rule.pk, NOW) == 0  # if it was removed after the rules were listed
    with pytest.raises(Conflict):
        do_change_alert_rule(rule, threshold=1)


def test_old_alerts_are_removed(tenant):
    rule = error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    assert purge_expired(NOW + 500 * DAY) == 0  # it is open
    do_remove_alert_rule(rule)
    assert purge_expired(NOW + 399 * DAY) == 0
    assert purge_expired(NOW + 500 * DAY) == 1


# Killed, concurrent and failing checks


class Killed(BaseException):
    """An error that simulates a kill."""


@pytest.mark.parametrize("place", ["enqueue_email", "_mail", "enqueue", "_follow"])
def test_a_check_killed_at_any_line_writes_all_or_nothing(tenant, monkeypatch, place):
    error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checks, place, die)
        check_rules(NOW)
    written = RuleAlert, WebhookEvent, OutboxEmail
    assert [unscoped(model).count() for model in written] == [0, 0, 0]
    assert [check_rules(NOW), check_rules(NOW)] == [1, 0]
    assert [unscoped(model).count() for model in written] == [1, 1, 1]


@pytest.mark.django_db(transaction=True)
def test_concurrent_checks_alert_once(monkeypatch):
    tenant = actions.do_create_tenant("acme", "Acme")
    for number in range(3):
        error_rule(tenant, threshold=number)
    health_rule(tenant, "replica_down")
    send_requests(tenant, 30, outcome="failed")
    open_event("replica", "w1/m", 20, closed=10)  # whose alert is not open
    start = threading.Barrier(4)
    real = checks._check

    def together(rule_id: int, now: datetime) -> int:
        start.wait(20)
        return real(rule_id, now)

    monkeypatch.setattr(checks, "_check", together)

    def check(_: int) -> int:
        try:
            return check_rules(NOW)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(check, range(4))) == 4
    assert [unscoped(model).count() for model in (RuleAlert, WebhookEvent, OutboxEmail)] == [4, 5, 4]


def test_a_rule_whose_check_fails_does_not_affect_the_others(tenant, monkeypatch):
    broken, _ = error_rule(tenant), error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    real = checks.find_breaches

    def find(rule: AlertRule, now: datetime) -> Any:
        if rule.pk == broken.pk:
            raise RuntimeError("broken")
        return real(rule, now)

    monkeypatch.setattr(checks, "find_breaches", find)
    assert check_rules(NOW) == 1


def test_the_database_accepts_one_open_alert_of_a_rule_and_subject(tenant):
    rule = error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    again = {"tenant": tenant, "rule": rule, "summary": "x", "threshold": 1, "created_at": NOW, "last_seen_at": NOW}
    with pytest.raises(IntegrityError), all_tenants_scope(BypassReason.COMMAND), transaction.atomic():
        RuleAlert.objects.create(**again)


# Rules


@pytest.mark.parametrize(
    "fields",
    [
        {"metric": "error_rate", "threshold": 10_000},
        {"metric": "error_rate", "threshold": -1},
        {"metric": "error_rate", "threshold": 1, "window_minutes": 7},
        {"metric": "error_rate", "threshold": 1, "min_requests": 0},
        {"metric": "key_expiry", "threshold": 366},
        {"metric": "key_expiry", "threshold": 1, "window_minutes": 5},
        {"metric": "key_expiry", "threshold": 1, "model": "m"},
        {"metric": "credit", "threshold": 0},
        {"metric": "nothing", "threshold": 1},
    ],
)
def test_invalid_rules_are_rejected(tenant, fields):
    with pytest.raises(ActionRefused):
        do_create_alert_rule(tenant, **fields)


def test_rules_are_limited_and_do_not_name_projects_of_other_tenants(tenant):
    other = only_project(actions.do_create_tenant("other", "Other"))
    with pytest.raises(FieldRefused):
        error_rule(tenant, project=other)
    for _ in range(MAX_RULES):
        error_rule(tenant)
    with pytest.raises(Conflict):
        error_rule(tenant)


def test_a_rule_cannot_have_a_project_of_another_tenant_in_the_database(tenant):
    other = only_project(actions.do_create_tenant("other", "Other"))
    row = error_rule(tenant)
    with pytest.raises(IntegrityError), all_tenants_scope(BypassReason.COMMAND), transaction.atomic():
        AlertRule.objects.all_tenants().filter(pk=row.pk).update(project_id=other.pk)
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


# Channels


def test_channels_describe_and_resolve_an_alert(tenant):
    do_create_endpoint(tenant, "https://hooks.example/")
    error_rule(tenant, window_minutes=5)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    check_rules(NOW + 20 * MINUTE)
    triggered, resolved = sorted(of(WebhookEvent, tenant), key=lambda row: row.pk)
    assert summary(triggered.event_type, triggered.payload).startswith("Error rate is 100.00%, above 5.00%")
    assert summary(resolved.event_type, resolved.payload).startswith("Resolved: Error rate is 100.00%")
    assert ALERT_TRIGGERED.severity(triggered.payload) == "error"
    assert resolved.payload["resolved_at"] == (NOW + 20 * MINUTE).isoformat()

    bodies = [
        json.loads(pagerduty_body("k" * 32, row.public_id, row.event_type, row.payload, "now"))
        for row in (triggered, resolved)
    ]
    assert [body["event_action"] for body in bodies] == ["trigger", "resolve"]
    assert len({body["dedup_key"] for body in bodies}) == 1


# API


@pytest.fixture
def headers(tenant: Tenant) -> dict[str, str]:
    _, secret = actions.do_create_api_key(only_project(tenant), "m", scopes=["manage"])
    return {"authorization": f"Bearer {secret}"}


def test_the_api_creates_changes_and_removes_rules(tenant, client, headers):
    body = {"metric": "ttft_p95", "threshold": 2000, "project_id": only_project(tenant).pk, "model": "m"}
    made = client.post("/api/alert-rules", body, content_type="application/json", headers=headers)
    assert made.status_code == 201
    rule = made.json()
    assert (rule["window_minutes"], rule["min_requests"], rule["active"]) == (15, 20, True)
    url = f"/api/alert-rules/{rule['id']}"
    change = {"threshold": 100, "muted_until": "2030-01-01T00:00:00Z"}
    changed = client.patch(url, change, content_type="application/json", headers=headers).json()
    assert (changed["threshold"], changed["muted_until"]) == (100, "2030-01-01T00:00:00Z")
    assert client.get(url, headers=headers).json() == changed
    assert client.get("/api/alert-rules?metric=ttft_p95", headers=headers).json()["results"] == [changed]
    assert client.get("/api/alert-rules?metric=credit", headers=headers).json()["results"] == []
    assert client.delete(url, headers=headers).status_code == 204
    assert client.get("/api/alert-rules?active=true", headers=headers).json()["results"] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metric": "nothing", "threshold": 1}, "metric"),
        ({"metric": "error_rate", "threshold": 10_000}, "threshold"),
        ({"metric": "error_rate", "threshold": 1, "project_id": 10**9}, "project_id"),
        ({"metric": "error_rate", "threshold": 1, "window_minutes": 6}, "window_minutes"),
        ({"metric": "error_rate", "threshold": 1, "every": 6}, "every"),
    ],
)
def test_the_api_rejects_invalid_rules_by_field(client, headers, body, field):
    response = client.post("/api/alert-rules", body, content_type="application/json", headers=headers)
    assert response.status_code == 400
    assert field in response.content.decode()


def test_the_api_returns_and_acknowledges_alerts(tenant, client, headers):
    error_rule(tenant)
    send_requests(tenant, 30, outcome="failed")
    check_rules(NOW)
    (row,) = client.get("/api/rule-alerts?open=true", headers=headers).json()["results"]
    assert (row["metric"], row["value"], row["acknowledged_at"]) == ("error_rate", 10_000, None)
    assert client.get("/api/rule-alerts?open=false", headers=headers).json()["results"] == []
    acknowledged = client.post(f"/api/rule-alerts/{row['id']}/acknowledge", headers=headers).json()
    assert acknowledged["acknowledged_at"] is not None
    event = client.get(f"/api/webhook-events/{row['event_id']}", headers=headers).json()
    assert event["payload"]["rule"]["metric"] == "error_rate"


def test_the_api_hides_rules_and_alerts_of_other_tenants(tenant, client, headers):
    other = actions.do_create_tenant("other", "Other")
    rule = error_rule(other)
    send_requests(other, 30, outcome="failed")
    check_rules(NOW)
    (alert,) = alerts(other)
    for method, url in (
        ("get", f"/api/alert-rules/{rule.pk}"),
        ("delete", f"/api/alert-rules/{rule.pk}"),
        ("post", f"/api/rule-alerts/{alert.pk}/acknowledge"),
    ):
        assert getattr(client, method)(url, headers=headers).status_code == 404
    for url in ("/api/alert-rules", "/api/rule-alerts"):
        assert client.get(url, headers=headers).json()["results"] == []
    with tenant_scope(tenant), connection.cursor() as cursor:
        cursor.execute("SELECT (SELECT count(*) FROM alerts_alertrule), (SELECT count(*) FROM alerts_rulealert)")
        assert cursor.fetchone() == (0, 0)


def test_only_operators_change_rules_of_the_platform(tenant, client, headers):
    body = {"metric": "replica_down", "threshold": 5}
    assert client.post("/api/alert-rules", body, content_type="application/json", headers=headers).status_code == 403
    rule = do_create_alert_rule(tenant, **body)
    url = f"/api/alert-rules/{rule.pk}"
    assert client.delete(url, headers=headers).status_code == 403
    patch = {"content_type": "application/json", "headers": headers}
    assert client.patch(url, {"threshold": 1}, **patch).status_code == 403
    assert client.patch(url, {"muted_until": "2030-01-01T00:00:00Z"}, **patch).status_code == 200
