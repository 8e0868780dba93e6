"""Alert rules in the console: sentences, forms, states, history, and the operators' rules of the platform."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from html import unescape

import pytest
from django.test import Client
from django.utils import translation

from frontend.tenant.alerts.rules import SENTENCES, in_words
from millrace.apps.alerts.actions import do_create_alert_rule
from millrace.apps.alerts.models import AlertRule, RuleAlert
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.frontend.console import remembered
from tests.support.rows import of, only_project

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acme(signed_in="owner", reauthenticated=True)]
NEW = "/t/acme/alerts/rules/new"


@pytest.fixture
def operator(acme: Tenant) -> Client:
    operator = Client()
    operator.force_login(User.objects.create_superuser("op@example.com"))
    remembered(operator.session)
    return operator


def page_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    page = unescape(response.content.decode())
    assert "did not load" not in page
    return page


def rule_of(tenant: Tenant) -> AlertRule:
    (row,) = of(AlertRule, tenant)
    return row


def trigger(rule: AlertRule) -> RuleAlert:
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.COMMAND):
        return RuleAlert.objects.create(
            tenant_id=rule.tenant_id, rule=rule, summary="It is bad", threshold=1, created_at=now, last_seen_at=now
        )


@pytest.mark.parametrize(
    ("metric", "fields", "stored", "sentence"),
    [
        (
            "error_rate",
            {"threshold": "2.5", "window": "60", "min_requests": "50", "project": "", "model": ""},
            {"threshold": 250, "window_minutes": 60, "min_requests": 50},
            "Alert when more than 2.5 % of the requests of all projects to all models fail within 1 hour, if there are"
            " at least 50 requests.",
        ),
        (
            "ttft_p95",
            {"threshold": "2,000", "window": "5", "min_requests": "20", "project": "", "model": ""},
            {"threshold": 2000, "window_minutes": 5, "min_requests": 20},
            "Alert when the TTFT p95 of all projects on all models is above 2,000 ms within 5 minutes, if there are at"
            " least 20 requests.",
        ),
        ("key_expiry", {"threshold": "14", "project": ""}, {"threshold": 14}, "Alert 14 days before an API key of all"),
        ("credit", {"threshold": "$12.50"}, {"threshold": 12_500_000_000}, "credit balance is below $12.50."),
    ],
)
def test_a_rule_is_created_by_its_sentence(client, acme, metric, fields, stored, sentence):
    form = page_of(client, f"{NEW}?metric={metric}")
    assert all(f'name="{name}"' in form for name in fields)
    response = client.post(f"{NEW}?metric={metric}", fields)
    assert (response.status_code, response["location"]) == (303, "/t/acme/alerts/rules/")
    row = rule_of(acme)
    assert {name: getattr(row, name) for name in stored} == stored
    assert sentence in page_of(client, "/t/acme/alerts/rules/")
    assert of(AuditEntry, acme, action="alert_rule.created")


def test_a_rule_of_a_project_names_it(client, acme):
    project = only_project(acme)
    client.post(f"{NEW}?metric=key_expiry", {"threshold": "7", "project": str(project.pk)})
    assert rule_of(acme).project_id == project.pk
    assert f"of {project.name} expires" in page_of(client, "/t/acme/alerts/rules/")


@pytest.mark.parametrize(
    ("metric", "fields", "error"),
    [
        ("error_rate", {"threshold": "100", "window": "5", "min_requests": "20"}, "Enter a percentage below 100"),
        ("error_rate", {"threshold": "x", "window": "5", "min_requests": "20"}, "Enter a percentage below 100"),
        ("error_rate", {"threshold": "5", "window": "7", "min_requests": "20"}, "Window"),
        ("error_rate", {"threshold": "5", "window": "5", "min_requests": "0"}, "Minimum requests"),
        ("key_expiry", {"threshold": "400"}, "Enter a number from 1 to 365."),
        ("key_expiry", {"threshold": "7", "project": "999999"}, "Project"),
        ("credit", {"threshold": "-1"}, "Enter a positive amount"),
    ],
)
def test_errors_are_below_the_sentence(client, acme, metric, fields, error):
    response = client.post(f"{NEW}?metric={metric}", fields)
    assert response.status_code == 422
    assert error in unescape(response.content.decode())
    assert of(AlertRule, acme) == []


def test_a_rule_is_changed_muted_and_removed(client, acme):
    row = do_create_alert_rule(acme, metric="error_rate", threshold=500)
    base = f"/t/acme/alerts/rules/{row.pk}"
    page_of(client, f"{base}/edit")
    client.post(f"{base}/edit", {"threshold": "10", "window": "360", "min_requests": "5"})
    row = rule_of(acme)
    assert (row.threshold, row.window_minutes, row.min_requests) == (1000, 360, 5)
    client.post(f"{base}/mute", {"hours": "8"})
    assert rule_of(acme).is_muted(datetime.now(UTC) + timedelta(hours=7))
    assert "muted until" in page_of(client, "/t/acme/alerts/rules/")
    client.post(f"{base}/mute", {"hours": "0"})
    assert rule_of(acme).muted_until is None
    assert "sends no more alerts" in page_of(client, f"{base}/remove")
    client.post(f"{base}/remove")
    assert not rule_of(acme).active
    assert "No alert rules yet" in page_of(client, "/t/acme/alerts/rules/")
    assert client.get(f"{base}/edit").status_code == 404


def test_an_open_alert_is_shown_and_acknowledged(client, acme):
    alert = trigger(do_create_alert_rule(acme, metric="error_rate", threshold=500))
    page = page_of(client, "/t/acme/alerts/rules/?state=open")
    assert "It is bad" in page
    assert "It is bad" not in page_of(client, "/t/acme/alerts/rules/?state=resolved")
    assert "It is bad" not in page_of(client, "/t/acme/alerts/rules/?metric=credit")
    response = client.post(f"/t/acme/alerts/rules/alerts/{alert.pk}/acknowledge")
    assert response.status_code == 303
    assert "owner@example.com" in page_of(client, "/t/acme/alerts/rules/")


def test_readers_see_rules_and_change_none(client, acme):
    row = do_create_alert_rule(acme, metric="error_rate", threshold=500)
    alert = trigger(row)
    reader = User.objects.create_user("reader@example.com")
    actions.do_add_member(acme, reader, "readonly")
    client.force_login(reader)
    assert "New rule" not in page_of(client, "/t/acme/alerts/rules/")
    for path in ("new", f"{row.pk}/edit", f"{row.pk}/mute", f"{row.pk}/remove", f"alerts/{alert.pk}/acknowledge"):
        assert client.post(f"/t/acme/alerts/rules/{path}").status_code == 403


def test_rules_of_other_tenants_are_not_found(client, acme):
    other = do_create_alert_rule(actions.do_create_tenant("other", "Other"), metric="error_rate", threshold=500)
    for verb in ("edit", "mute", "remove"):
        assert client.get(f"/t/acme/alerts/rules/{other.pk}/{verb}").status_code == 404
    assert client.post(f"/t/acme/alerts/rules/alerts/{trigger(other).pk}/acknowledge").status_code == 404


def test_operators_give_rules_of_the_platform_to_a_tenant(client, acme, operator):
    new = "/operator/alerts/rules/new?metric=upstream_down"
    page_of(operator, new)
    response = operator.post(new, {"threshold": "5", "model": "", "tenant": str(acme.pk)})
    assert (response.status_code, response["location"]) == (303, "/operator/alerts/?show=rules")
    row = rule_of(acme)
    assert (row.metric, row.threshold) == ("upstream_down", 5)
    alert = trigger(row)
    page = page_of(operator, "/operator/alerts/?show=rules")
    assert "Alert Acme when the upstream of all models is down or fails for 5 minutes." in page
    assert "It is bad" in page
    base = f"/operator/alerts/rules/{row.pk}"
    operator.post(f"{base}/edit", {"threshold": "7"})
    assert rule_of(acme).threshold == 7
    operator.post(f"{base}/mute", {"hours": "1"})
    assert rule_of(acme).muted_until is not None
    operator.post(f"/operator/alerts/rules/alerts/{alert.pk}/acknowledge")
    assert of(RuleAlert, acme)[0].acknowledged_by == "op@example.com"
    operator.post(f"{base}/remove")
    assert not rule_of(acme).active


def test_a_tenant_sees_and_mutes_rules_of_the_platform_only(client, acme):
    row = do_create_alert_rule(acme, metric="replica_down", threshold=5)
    assert "set by the operator" in page_of(client, "/t/acme/alerts/rules/")
    base = f"/t/acme/alerts/rules/{row.pk}"
    assert client.post(f"{base}/mute", {"hours": "1"}).status_code == 303
    for verb in ("edit", "remove"):
        assert client.post(f"{base}/{verb}", {"threshold": "1"}).status_code == 404
    assert client.get(f"{NEW}?metric=replica_down").status_code == 404


def test_users_cannot_open_the_forms_of_operators(client, acme):
    assert client.get("/operator/alerts/rules/new").status_code == 404


@pytest.mark.parametrize("metric", list(SENTENCES))
def test_every_rule_has_a_sentence_in_german(acme, metric):
    row = do_create_alert_rule(acme, metric=metric, threshold=5)
    english = in_words(row)
    with translation.override("de"):
        german = in_words(row)
    assert german != english
    assert "{" not in german
