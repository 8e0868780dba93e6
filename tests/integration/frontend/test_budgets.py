"""Budgets and limits in the console: exact amounts, previews, temporary increases and isolation of tenants."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from smtplib import SMTPServerDisconnected
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import translation
from hypothesis import given
from hypothesis import strategies as st

from billing.budgets.alerts import check_thresholds
from billing.budgets.budgets import do_make_budget
from billing.currencies.amounts import MAX_BUDGET
from billing.metering import rollups
from billing.models import Budget, BudgetAlert, BudgetPeriod, UsageEvent
from frontend.core.numbers import exact
from frontend.tenant.budgets.alerts import deliveries_of
from frontend.tenant.budgets.amounts import BudgetAmount, input_text, parse
from frontend.tenant.budgets.effect import effect_of
from millrace.apps.policy_results.budget_replays import replay_budget
from millrace.apps.policy_results.dry_runs import DryRunScope
from tenants import actions
from tenants.actions.webhooks import do_create_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import (
    AuditEntry,
    LimitSet,
    OutboxEmail,
    Tenant,
    User,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
)
from tenants.outbox import propagation
from tests.support.billing import books
from tests.support.frontend.console import meter
from tests.support.outbox import send_emails
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.acme(signed_in="owner", reauthenticated=True)
NEW = {
    **{"name": "One cent", "owner": "account", "counts": "money", "period": "day", "amount": "0.01", "mode": "hard"},
    **{"rollover_limit": "", "thresholds": "50, 80", "alert_forecast": "on"},
}
db = pytest.mark.django_db(transaction=True)


def get(client: Any, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    page: str = response.content.decode()
    assert "did not load" not in page
    return page


@given(value=st.integers(0, MAX_BUDGET), unit=st.sampled_from(["money", "tokens", "requests"]))
def test_amounts_are_shown_as_stored(value, unit):
    assert parse(input_text(value, unit), unit) == value


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("0.01", 10**7),
        ("$1,200.50", 1_200_500_000_000),
        ("0.000000001", 1),
        ("5", 5 * 10**9),
        (" 7. ", 7 * 10**9),
        ("€1,200", 12 * 10**11),
        ("£ 3", 3 * 10**9),
    ],
)
def test_dollars_are_exact(text, nano):
    assert parse(text, "money") == nano


@pytest.mark.parametrize(
    "text", ["", "-1", "1e3", "0.0000000001", "1.2.3", "٣", "nan", "999999999", "12,50", "1,2000", "0,125"]
)
def test_invalid_amounts_of_money_are_rejected(text):
    with pytest.raises(ValueError, match=r"Enter a positive amount|or less"):
        parse(text, "money")


@pytest.mark.parametrize("text", ["12.5,3", "1,200.50", "1,200,50", "1.20,5", "12,50,"])
def test_invalid_amounts_in_german_are_rejected(text):
    with translation.override("de"), pytest.raises(ValueError, match="Geben Sie einen positiven Betrag ein"):
        parse(text, "money")


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("12,50", "money", 12_500_000_000),
        ("12.50", "money", 12_500_000_000),
        ("1.200,50 €", "money", 1_200_500_000_000),
        ("1.200", "money", 1_200_000_000_000),
        ("0,125", "money", 125_000_000),
        ("1.000.000", "tokens", 1_000_000),
    ],
)
def test_amounts_are_read_in_german(text, unit, value):
    with translation.override("de"):
        assert parse(text, unit) == value


@pytest.mark.parametrize("language", ["en", "de"])
@given(value=st.integers(0, MAX_BUDGET))
def test_a_form_reads_the_amount_that_it_shows(language, value):
    with translation.override(language):
        assert parse(input_text(value, "money"), "money") == value
        assert parse(exact(value), "tokens") == value


def test_fractions_of_a_token_are_rounded_up():
    assert BudgetAmount("tokens", 1_000_001).text == "2 tokens"


def test_the_toast_names_the_gateways_that_applied_a_change():
    budget = Budget()
    assert effect_of(budget) == "The change takes effect in every gateway within a second."
    budget.pending_gateways = ()
    assert effect_of(budget) == "The change has taken effect in every gateway."
    budget.pending_gateways = ("gw-a", "gw-b")
    assert "do not respond: gw-a, gw-b." in effect_of(budget)


@db
def test_a_new_budget_names_the_gateways_that_have_not_applied_it(client, acme, monkeypatch):
    monkeypatch.setattr(propagation, "wait_for_gateways", lambda _: ("gw-silent",))
    assert "do not respond: gw-silent." in client.post("/t/acme/budgets/new", NEW, follow=True).content.decode()
    path = f"/t/acme/budgets/{unscoped(Budget).get().pk}"
    assert "gw-silent" in client.post(f"{path}/edit", NEW | {"amount": "0.02"}, follow=True).content.decode()


@db
def test_a_budget_is_created_raised_and_deleted(client, acme):
    assert client.post("/t/acme/budgets/new", NEW).status_code == 303
    row = unscoped(Budget).get()
    assert (row.amount, row.unit, row.period, row.mode, row.thresholds) == (10**7, "money", "day", "hard", [50, 80])
    until = (datetime.now(UTC) + timedelta(days=2)).date()
    path = f"/t/acme/budgets/{row.pk}"
    assert client.post(f"{path}/raise", {"more": "0.05", "until": "2001-01-01"}).status_code == 422
    assert client.post(f"{path}/raise", {"more": "0.05", "until": until.isoformat()}).status_code == 303
    row = unscoped(Budget).get()
    assert (row.temporary_increase, row.increase_expires_at.date()) == (5 * 10**7, until + timedelta(days=1))
    assert "0.06" in get(client, f"{path}/")
    assert client.post(f"{path}/lower").status_code == 303
    assert unscoped(Budget).get().temporary_increase == 0
    assert client.post(f"{path}/edit", NEW | {"amount": "0.02", "mode": "soft", "thresholds": ""}).status_code == 303
    row = unscoped(Budget).get()
    assert (row.amount, row.mode, row.thresholds) == (2 * 10**7, "soft", [])
    assert client.post(f"{path}/remove").status_code == 303
    assert not unscoped(Budget).get().active
    assert client.get(f"{path}/edit").status_code == 404
    assert "was removed" in get(client, f"{path}/")


@db
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"amount": "a lot"}, "Enter a positive amount"),
        ({"amount": "12,50"}, "Enter a positive amount"),
        ({"amount": "1.5", "counts": "tokens"}, "Enter a whole number"),
        ({"owner": "key:999999"}, "not one of the available choices"),
        ({"thresholds": "50, lots"}, "Enter whole percentages"),
        ({"thresholds": "5000"}, "thresholds from 1 to"),
        ({"counts": "requests", "amount": "5", "reduce_max_tokens": "on"}, "max_tokens can only be reduced"),
        ({"period": "lifetime", "rollover_limit": "1"}, "cannot roll over"),
    ],
)
def test_a_form_shows_its_errors(client, acme, changes, said):
    response = client.post("/t/acme/budgets/new", NEW | changes)
    assert response.status_code == 422
    assert said in response.content.decode()
    assert unscoped(Budget).count() == 0


@db
def test_the_preview_of_a_budget(client, acme):
    """The preview has ten requests with the same cost, and a budget for four of them."""
    version, key = books.rate_card(), actions.do_create_api_key(only_project(acme), "k")[0]
    for hour in range(10):
        at = datetime.now(UTC) - timedelta(hours=hour + 1)
        meter(acme, at=at, key_id=key.pk, uncached=1000, price_version=version, project_id=key.project_id)
    cost = int(unscoped(UsageEvent).first().cost_femto) // 10**6
    assert cost > 0
    query = f"counts=money&period=lifetime&amount={input_text(4 * cost, 'money')}"
    said = get(client, f"/t/acme/budgets/try?owner=account&mode=hard&{query}")
    assert "Blocks" in said
    assert "429 budget_exceeded" in said
    assert "6 of the 10 requests from the last 7 days (60.0%)" in said
    assert "Does not block" in get(client, f"/t/acme/budgets/try?owner=account&mode=dry_run&{query}")
    assert "would have rejected" not in get(client, f"/t/acme/budgets/try?owner=project:999999&mode=hard&{query}")
    assert "Enter a positive amount" in get(client, "/t/acme/budgets/try?owner=account&mode=hard&counts=money&amount=x")
    said = get(client, "/t/acme/limits/try?owner=account&mode=hard&requests_per_day=3&concurrency=x")
    assert "of the 10 requests from the last 7 days" in said
    assert "Enter a whole number" in said


@pytest.fixture
def previous_month(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> datetime:
    """Usage of the previous month: on four days, of one key, 10 requests of 1,000 tokens each."""
    version, key = books.rate_card(), actions.do_create_api_key(only_project(acme), "k")[0]
    start = (datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)).replace(
        day=1
    )
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [[start.date()]])
    for number in range(40):
        at = start + timedelta(days=4 * (number // 10), hours=number % 10)
        meter(acme, at=at, key_id=key.pk, uncached=1000, price_version=version, project_id=key.project_id)
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))
    rollups.build()
    return start


@db
@pytest.mark.parametrize(
    ("period", "amount", "rejected", "passed"),
    [
        ("month", 25_000, 15_000, {50: 98, 80: 105, 100: 196}),  # hours after the month's start
        ("day", 4_000, 24_000, {50: 1, 80: 3, 100: 3}),
        ("lifetime", 40_000, 0, {50: 105, 80: 289, 100: 297}),
        ("day", 10_000, 0, {50: 4, 80: 7, 100: 9}),
    ],
)
def test_the_previous_month_is_replayed(acme, previous_month, period, amount, rejected, passed):
    with tenant_scope(acme):
        found = replay_budget(DryRunScope(acme.pk), "tokens", period, amount, [100, 50, 80])
        nothing = replay_budget(DryRunScope(acme.pk, project_id=10**6), "tokens", period, amount)
    assert (found.used, found.requests, found.rejected_amount, found.rejected) == (
        40_000,
        40,
        rejected,
        rejected // 1000,
    )
    assert found.peak == (10_000 if period == "day" else 40_000)
    assert {share: (at - previous_month) // timedelta(hours=1) for share, at in found.passed} == passed
    last = [day for day in found.days if day.accepted + day.rejected][-1]
    assert last.accepted + last.rejected == found.peak
    assert last.rejected == (rejected // 4 if period == "day" else rejected)
    assert (
        len(found.days) == (previous_month + timedelta(days=32)).replace(day=1).toordinal() - previous_month.toordinal()
    )
    assert (nothing.used, nothing.rejected, nothing.passed) == (0, 0, ())


@db
def test_the_form_shows_the_previous_month_and_a_limit_that_fits(client, acme, previous_month):
    query = "owner=account&mode=hard&counts=tokens&period=month&thresholds=50"
    said = unescape(get(client, f"/t/acme/budgets/try?{query}&amount=25000"))
    assert "≈ 15 of 40 requests would have been rejected." in said
    assert "50% alert" in said
    assert "Use 44,000 tokens" in said
    (url,) = re.findall(r'href="([^"]*budgets/new[^"]*)"', said)
    page = get(client, url)
    assert 'value="44000"' in page
    assert '<option value="tokens" selected>' in page
    assert "All 40 requests would have passed." in get(client, f"/t/acme/budgets/try?{query}&amount=44000")
    assert "Use" not in get(client, f"/t/acme/budgets/try?{query}&amount=44000")
    assert "Type a limit" in get(client, f"/t/acme/budgets/try?{query}&amount=x")


@db
def test_a_budget_without_a_name_is_named_by_its_sentence(client, acme):
    assert client.post("/t/acme/budgets/new", NEW | {"name": ""}).status_code == 303
    assert unscoped(Budget).get().name == "The organization, daily"


@db
def test_advanced_limits_are_open_only_if_they_are_used(client, acme):
    opened = '<details class="form-section" open>'
    assert opened not in get(client, "/t/acme/limits/new")
    row = actions.do_set_limits(acme, {"requests_per_minute": 8})
    assert opened not in get(client, f"/t/acme/limits/{row.pk}/edit")
    row = actions.do_set_limits(acme, {"requests_per_day": 8})
    assert opened in get(client, f"/t/acme/limits/{row.pk}/edit")
    response = client.post("/t/acme/limits/new", {"owner": "account", "mode": "hard", "tokens_per_day": "x"})
    assert opened in response.content.decode()


@db
def test_an_exhausted_budget_has_a_banner(client, acme):
    row = do_make_budget(acme, name="Tiny", unit="money", period="lifetime", amount=10**7)
    assert "hard limit reached" not in get(client, "/t/acme/budgets/")
    with all_tenants_scope(BypassReason.BILLING):
        BudgetPeriod.objects.create(
            tenant_id=acme.pk,
            budget_id=row.pk,
            unit="money",
            period_start=datetime(1970, 1, 1, tzinfo=UTC),
            used=10**13,
        )
    page = get(client, "/t/acme/budgets/")
    assert "Tiny: hard limit reached." in page
    assert "429 budget_exceeded" in page
    assert f"/t/acme/budgets/{row.pk}/raise" in page


@db
def test_limits_are_set_changed_and_removed(client, acme):
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    form = {"owner": f"key:{key.pk}", "model": "", "mode": "hard", "requests_per_minute": "1,200", "concurrency": "4"}
    assert client.post("/t/acme/limits/new", form).status_code == 303
    row = unscoped(LimitSet).get()
    assert (row.key_id, row.requests_per_minute, row.concurrency, row.tokens_per_day) == (key.pk, 1200, 4, None)
    response = client.post("/t/acme/limits/new", form | {"concurrency": "9"})
    assert response.status_code == 422
    assert "already has limits" in response.content.decode()
    path = f"/t/acme/limits/{row.pk}"
    assert client.post(f"{path}/edit", {"mode": "dry_run", "concurrency": "9"}).status_code == 303
    row = unscoped(LimitSet).get()
    assert (row.dry_run, row.requests_per_minute, row.concurrency) == (True, None, 9)
    path = f"/t/acme/limits/{row.pk}"
    assert client.post(f"{path}/edit", {"mode": "dry_run"}).status_code == 422
    assert client.post(f"{path}/remove").status_code == 303
    assert unscoped(LimitSet).count() == 0


@db
def test_limits_of_the_operator_are_read_only(client, acme):
    row = actions.do_set_limits(acme, {"concurrency": 8}, set_by_operator=True)
    assert "set by the operator" in get(client, "/t/acme/budgets/")
    for what in ("edit", "remove"):
        assert client.get(f"/t/acme/limits/{row.pk}/{what}").status_code == 404


@db
def test_a_member_with_read_permission_cannot_change_budgets(client, acme):
    row = do_make_budget(acme, name="All", unit="money", period="month", amount=10**9)
    reader = User.objects.create_user("reader@example.com")
    actions.do_add_member(acme, reader, "readonly")
    client.force_login(reader)
    page = get(client, "/t/acme/budgets/")
    assert "All" in page
    assert "/raise" not in page
    for path in ("budgets/new", f"budgets/{row.pk}/raise", f"budgets/{row.pk}/remove", "limits/new"):
        assert client.post(f"/t/acme/{path}", NEW).status_code == 403


@db
def test_an_alert_shows_the_state_of_its_email_and_webhooks(client, acme, monkeypatch):
    for number in range(3):
        do_create_endpoint(acme, f"https://hooks.example/{number}", event_types=["budget.threshold_reached"])
    budget, now = do_make_budget(acme, name="All", unit="tokens", period="lifetime", amount=1000), datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        fields = {"tenant_id": acme.pk, "unit": "tokens", "period_start": now, "used": 600 * 10**6}
        BudgetPeriod.objects.create(budget_id=budget.pk, **fields)
    check_thresholds()
    operator = Client()
    operator.force_login(User.objects.create_superuser("op@example.com"))

    def alert_states() -> list[tuple[str, str]]:
        pages = get(client, "/t/acme/budgets/panels/alerts"), get(operator, "/operator/alerts/?show=budgets")
        with all_tenants_scope(BypassReason.OPERATOR):
            (row,) = BudgetAlert.objects.all_tenants().select_related("email")
            found = deliveries_of([row], None)[row.pk]
        assert all(one.text in unescape(page) and one.reason in unescape(page) for one in found for page in pages)
        return [(one.text, one.reason) for one in found]

    def change(model: Any, **fields: Any) -> None:
        with all_tenants_scope(BypassReason.WEBHOOKS):
            model.objects.all_tenants().update(**fields)

    assert alert_states() == [("Email queued", ""), ("3 webhooks pending", "")]
    with monkeypatch.context() as patch:
        patch.setattr("django.core.mail.EmailMessage.send", lambda self: (_ for _ in ()).throw(SMTPServerDisconnected))
        send_emails()
    assert alert_states()[0] == ("Email queued", "The mail server could not be reached.")
    change(OutboxEmail, state=OutboxEmail.State.FAILED)
    assert alert_states()[0] == ("Email failed", "The mail server could not be reached.")
    change(OutboxEmail, state=OutboxEmail.State.QUEUED, next_attempt_at=now)
    send_emails()
    assert alert_states()[0] == ("Email sent", "")

    with all_tenants_scope(BypassReason.WEBHOOKS):
        first, *others = WebhookDelivery.objects.all_tenants().order_by("pk")
        for one, status, error in ((first, 500, "The answer was 500."), (others[0], None, "it takes too long")):
            tried = {"tenant_id": acme.pk, "attempted_at": now, "duration_ms": 5, "status": status, "error": error}
            WebhookAttempt.objects.create(delivery=one, **tried)
        WebhookDelivery.objects.all_tenants().filter(pk=first.pk).update(state="failed")
        WebhookDelivery.objects.all_tenants().filter(pk=others[1].pk).update(state="delivered")
    assert alert_states()[1:] == [
        ("Webhook delivered", ""),
        ("Webhook failed", "The answer was 500."),
        ("Webhook pending", "it takes too long"),
    ]
    change(WebhookDelivery, state="delivered")
    assert alert_states()[1:] == [("3 webhooks delivered", "")]
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        OutboxEmail.objects.all_tenants().delete()  # as they are after 90 days
    assert alert_states()[0] == ("Email", "no longer stored")


@db
def test_a_muted_budget_records_its_alerts_and_sends_none(client, acme):
    do_create_endpoint(acme, "https://hooks.example/1")
    budget, now = do_make_budget(acme, name="All", unit="tokens", period="lifetime", amount=1000), datetime.now(UTC)
    path = f"/t/acme/budgets/{budget.pk}/mute"
    assert client.post(path, {"hours": "8"}).status_code == 303
    until = unscoped(Budget).get().alerts_muted_until
    assert timedelta(hours=7) < until - now < timedelta(hours=9)
    assert "Alerts are muted" in get(client, f"/t/acme/budgets/{budget.pk}/")
    with all_tenants_scope(BypassReason.BILLING):
        fields = {"tenant_id": acme.pk, "unit": "tokens", "period_start": now, "used": 600 * 10**6}
        BudgetPeriod.objects.create(budget_id=budget.pk, **fields)
    assert check_thresholds() == 1
    assert ">Muted</span>" in get(client, "/t/acme/alerts/")
    assert (unscoped(OutboxEmail).count(), unscoped(WebhookDelivery).count()) == (0, 0)
    assert client.post(path, {"hours": "0"}).status_code == 303
    assert unscoped(Budget).get().alerts_muted_until is None
    assert check_thresholds() == 0  # a threshold alerts once, also if it was muted
    with all_tenants_scope(BypassReason.BILLING):
        BudgetPeriod.objects.all_tenants().update(used=900 * 10**6)
    assert check_thresholds() == 1
    assert unscoped(OutboxEmail).count() == 1


@db
def test_an_alert_is_acknowledged_once_and_filtered(client, acme):
    budget, now = do_make_budget(acme, name="All", unit="tokens", period="lifetime", amount=1000), datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        fields = {"tenant_id": acme.pk, "unit": "tokens", "period_start": now, "used": 600 * 10**6}
        BudgetPeriod.objects.create(budget_id=budget.pk, **fields)
    check_thresholds()
    alert = unscoped(BudgetAlert).get()
    assert "50% reached" in get(client, "/t/acme/alerts/?state=open")
    for _ in range(2):
        assert client.post(f"/t/acme/alerts/{alert.pk}/acknowledge").status_code == 303
    assert unscoped(BudgetAlert).get().acknowledged_by == "owner@example.com"
    assert len(unscoped(AuditEntry).filter(action="budget_alert.acknowledged")) == 1
    assert "No alert matches" in get(client, "/t/acme/alerts/?state=open")
    assert "owner@example.com" in get(client, "/t/acme/alerts/?state=acknowledged")
    reader = User.objects.create_user("reader@example.com")
    actions.do_add_member(acme, reader, "readonly")
    client.force_login(reader)
    assert client.post(f"/t/acme/alerts/{alert.pk}/acknowledge").status_code == 403


@db
def test_channels_are_added_in_the_console(client, acme):
    form = {"routing_key": "k" * 32, "region": "eu", "description": "On call"}
    assert client.post("/t/acme/alerts/pagerduty", form | {"routing_key": "x"}).status_code == 422
    assert client.post("/t/acme/alerts/pagerduty", form).status_code == 303
    assert client.post("/t/acme/alerts/slack", {"url": "https://10.0.0.1/x"}).status_code == 422
    row = unscoped(WebhookEndpoint).get()
    page = get(client, "/t/acme/alerts/")
    assert "On call" in page and "PagerDuty" in page
    detail = get(client, f"/t/acme/webhooks/{row.pk}/")
    assert "Rotate secret" not in detail and "k" * 32 not in detail
    change = {"description": "Night", "event_types": ["invoice.paid"]}
    assert client.post(f"/t/acme/webhooks/{row.pk}/edit", change).status_code == 303
    assert (unscoped(WebhookEndpoint).get().description, unscoped(WebhookEndpoint).get().kind) == ("Night", "pagerduty")
    assert "Night" not in get(client, "/t/acme/alerts/")  # it receives no budget alerts
    assert get(client, "/t/acme/webhooks/?kind=invoice.paid")
