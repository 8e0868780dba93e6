"""Budget alerts: each threshold once per period, also with concurrent and killed checkers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from smtplib import SMTPAuthenticationError, SMTPDataError, SMTPRecipientsRefused
from typing import Any

import pytest
from django.core import mail as outbox
from django.db import connection

from billing.budgets import alerts, forecast
from billing.budgets.alerts import alerts_of, check_forecasts, check_thresholds
from billing.budgets.budgets import do_change_budget, do_make_budget, do_remove_budget
from billing.models import BillingEntity, BillingProfile, Budget, BudgetAlert, BudgetPeriod, UsageRollup
from tenants import actions
from tenants.actions.common import ActionRefused
from tenants.actions.webhooks import do_create_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, Notification, OutboxEmail, Tenant, User, WebhookDelivery, WebhookEvent
from tenants.webhooks.channels import summary
from tests.support.billing.euros import bill_in_euros
from tests.support.emails import check_email
from tests.support.outbox import send_emails
from tests.support.rows import of, only_project, unscoped

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOVEMBER, DECEMBER = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def tenant() -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme", owner=User.objects.create_user("owner@acme.example"))
    actions.do_add_member(tenant, User.objects.create_user("books@acme.example"), "billing")
    actions.do_add_member(tenant, User.objects.create_user("dev@acme.example"), "developer")
    return tenant


def make(tenant: Tenant, **fields: Any) -> Budget:
    return do_make_budget(
        tenant, **{"name": "b", "unit": "tokens", "period": "month", "amount": 1000, "mode": "soft", **fields}
    )


def use(budget: Budget, used: int, *, start: datetime = NOVEMBER, end: datetime | None = DECEMBER) -> BudgetPeriod:
    """Create a period of the budget with this number of whole units used."""
    with all_tenants_scope(BypassReason.COMMAND):
        return BudgetPeriod.objects.all_tenants().update_or_create(
            budget_id=budget.pk,
            period_start=start,
            defaults={
                "tenant_id": budget.tenant_id,
                "unit": budget.unit,
                "period_end": end,
                "used": used * 10**6,
            },
        )[0]


def thresholds_of(tenant: Tenant) -> list[str]:
    return [row.threshold for row in sorted(of(BudgetAlert, tenant), key=lambda row: row.pk)]


def test_a_threshold_alerts_once_by_webhook_and_email(tenant):
    do_create_endpoint(tenant, "https://hooks.example/", event_types=["budget.threshold_reached"])
    budget = make(tenant)
    use(budget, 499)
    assert check_thresholds(NOW) == 0
    budget_period = use(budget, 500)
    assert [check_thresholds(NOW), check_thresholds(NOW)] == [1, 0]
    (row,) = of(BudgetAlert, tenant)
    assert (row.threshold, row.used, row.limit, row.forecast) == ("50", 500, 1000, None)
    (event,) = of(WebhookEvent, tenant)
    assert row.event_id == event.pk
    assert event.payload["budget"]["id"] == budget.pk
    assert {name: event.payload[name] for name in ("threshold", "used", "limit", "percent", "period_end")} == {
        **{"threshold": "50", "used": 500, "limit": 1000, "percent": 50},
        "period_end": budget_period.period_end.isoformat(),
    }
    assert len(of(WebhookDelivery, tenant)) == 1
    assert (send_emails(), send_emails()) == (1, 0)
    (message,) = outbox.outbox
    assert message.to == ["books@acme.example", "owner@acme.example"]
    check_email(message, "500 tokens of 1,000 tokens", "/t/acme/budgets/")
    use(budget, 1200)
    assert check_thresholds(NOW) == 2
    assert thresholds_of(tenant) == ["50", "80", "100"]


def test_thresholds_passed_together_send_one_email_and_an_event_each(tenant):
    do_create_endpoint(tenant, "https://hooks.example/", event_types=["budget.threshold_reached"])
    budget = make(tenant)
    use(budget, 1200)
    assert [check_thresholds(NOW), check_thresholds(NOW)] == [3, 0]
    assert thresholds_of(tenant) == ["50", "80", "100"]
    (mail,) = of(OutboxEmail, tenant)
    assert mail.subject == "b: 120% of the budget used"
    assert "The highest alert threshold reached is 100%. 50% and 80% are also reached." in mail.body
    assert {row.email_id for row in of(BudgetAlert, tenant)} == {mail.pk}
    assert sorted(event.payload["threshold"] for event in of(WebhookEvent, tenant)) == ["100", "50", "80"]
    assert len({row.event_id for row in of(BudgetAlert, tenant)}) == 3
    assert send_emails() == 1
    use(make(tenant, thresholds=[50, 60]), 700)
    check_thresholds(NOW)
    assert "The highest alert threshold reached is 60%. 50% is also reached." in of(OutboxEmail, tenant)[-1].body


def test_earlier_alerts_are_not_in_the_next_email(tenant):
    budget = make(tenant)
    use(budget, 500)
    check_thresholds(NOW)
    use(budget, 1000)
    assert check_thresholds(NOW) == 2
    first, second = sorted(of(OutboxEmail, tenant), key=lambda mail: mail.pk)
    assert "The 50% alert threshold was reached." in first.body
    assert "The highest alert threshold reached is 100%. 80% is also reached." in second.body


def test_an_email_formats_dollars_and_days(tenant):
    use(make(tenant, name="All", unit="money", amount=1_200 * 10**9), 970 * 10**9)
    check_thresholds(NOW)
    mail = of(OutboxEmail, tenant)[-1]
    assert mail.subject == "All: 80% of the budget used"
    assert "$970.00 of $1,200.00 of the budget" in mail.body
    assert "The period ends on 1 December 2026, 00:00 UTC." in mail.body
    assert of(WebhookEvent, tenant)[-1].payload["currency"] == "USD"


@pytest.mark.parametrize(
    ("currency", "text"), [("EUR", "€970.00 of €1,200.00"), ("JPY", "JPY 970 of JPY 1,200"), ("KWD", "KWD 970.000 of")]
)
def test_an_alert_is_in_the_currency_of_the_tenant(tenant, currency, text):
    bill_in_euros(tenant, currency)
    do_create_endpoint(tenant, "https://hooks.example/", event_types=["budget.threshold_reached"])
    use(make(tenant, unit="money", amount=1_200 * 10**9), 970 * 10**9)
    use(make(tenant, unit="tokens"), 500)
    check_thresholds(NOW)
    mails = [mail.body for mail in of(OutboxEmail, tenant)]
    assert any(text in body for body in mails)
    assert not any("$" in body for body in mails)
    payloads = [event.payload for event in of(WebhookEvent, tenant)]
    assert {(each["budget"]["unit"], each["currency"]) for each in payloads} == {("money", currency), ("tokens", None)}
    words = [summary("budget.threshold_reached", each) for each in payloads]
    assert any(text in each for each in words)
    assert not any("$" in each for each in words)


def test_a_new_period_alerts_again(tenant):
    budget = make(tenant)
    use(budget, 600)
    check_thresholds(NOW)
    use(budget, 600, start=DECEMBER, end=DECEMBER + 31 * DAY)
    assert check_thresholds(NOW) == 0  # it has not started
    assert check_thresholds(DECEMBER + 3 * DAY) == 1
    assert thresholds_of(tenant) == ["50", "50"]


def test_the_last_requests_of_a_period_still_alert(tenant):
    use(make(tenant), 600)
    assert check_thresholds(DECEMBER + timedelta(minutes=30)) == 1
    use(make(tenant), 600)
    assert check_thresholds(DECEMBER + timedelta(hours=2)) == 0


def test_lifetime_budgets_and_money_budgets_alert(tenant):
    use(make(tenant, period="lifetime", unit="money", amount=10**9), 5 * 10**8, end=None)
    assert check_thresholds(NOW) == 1
    assert "$0.50 of $1.00" in of(OutboxEmail, tenant)[0].body


def test_a_raised_limit_does_not_repeat_an_alert(tenant):
    budget = make(tenant)
    use(budget, 900)
    assert check_thresholds(NOW) == 2
    do_change_budget(budget, amount=2000)
    assert check_thresholds(NOW) == 0
    use(budget, 1700)
    assert check_thresholds(NOW) == 0  # 85%, and the alert of 80% was sent
    use(budget, 2000)
    assert check_thresholds(NOW) == 1
    assert thresholds_of(tenant) == ["50", "80", "100"]


def test_temporary_increases_and_rollovers_count_in_the_limit(tenant):
    budget = make(tenant, thresholds=[100], temporary_increase=500, increase_expires_at=NOW + DAY)
    budget_period = use(budget, 1499)
    assert check_thresholds(NOW) == 0
    with all_tenants_scope(BypassReason.COMMAND):
        BudgetPeriod.objects.all_tenants().filter(pk=budget_period.pk).update(rolled_over=700)
    assert check_thresholds(NOW + 2 * DAY) == 0
    with all_tenants_scope(BypassReason.COMMAND):
        BudgetPeriod.objects.all_tenants().filter(pk=budget_period.pk).update(rolled_over=0)
    assert check_thresholds(NOW + 2 * DAY) == 1


def test_a_hard_budget_is_exhausted_when_almost_no_request_fits(tenant):
    use(make(tenant, mode="hard", thresholds=[100]), 989)
    assert check_thresholds(NOW) == 0
    use(make(tenant, mode="hard", thresholds=[100]), 990)
    assert check_thresholds(NOW) == 1


def test_budgets_without_thresholds_and_deleted_budgets_do_not_alert(tenant):
    use(make(tenant, thresholds=[]), 1000)
    removed = make(tenant)
    use(removed, 1000)
    do_remove_budget(removed)
    use(make(tenant, amount=0), 5)
    assert check_thresholds(NOW) == 0


@pytest.mark.parametrize("thresholds", [[0], [-5], [1001], list(range(1, 12))])
def test_invalid_thresholds_are_rejected(tenant, thresholds):
    with pytest.raises(ActionRefused):
        make(tenant, thresholds=thresholds)


# Killed and concurrent checkers


class Killed(BaseException):
    """An error that simulates a kill."""


@pytest.mark.parametrize("place", ["enqueue", "enqueue_email", "notify", "_mail"])
def test_a_checker_killed_at_any_line_writes_all_or_nothing(tenant, monkeypatch, place):
    use(make(tenant), 900)

    def die(*_: object, **__: object) -> None:
        raise Killed

    written = (BudgetAlert, WebhookEvent, OutboxEmail, Notification)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(alerts, place, die)
        check_thresholds(NOW)
    assert [unscoped(model).count() for model in written] == [0, 0, 0, 0]
    assert check_thresholds(NOW) == 2
    assert [unscoped(model).count() for model in written] == [2, 2, 1, 1]


@pytest.mark.django_db(transaction=True)
def test_concurrent_checkers_alert_once(monkeypatch):
    tenant = actions.do_create_tenant("acme", "Acme")
    for _ in range(3):
        use(make(tenant), 2000)
    start = threading.Barrier(4)
    real = alerts._alert

    def together(budget_period_id: int, thresholds: list[str], now: datetime) -> int:
        start.wait(20)
        return real(budget_period_id, thresholds, now)

    monkeypatch.setattr(alerts, "_alert", together)

    def check(_: int) -> int:
        try:
            return check_thresholds(NOW)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(check, range(4))) == 9
    assert [unscoped(model).count() for model in (BudgetAlert, WebhookEvent, OutboxEmail)] == [9, 9, 3]


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (OSError("10.0.0.7 is down"), "The mail server could not be reached."),
        (SMTPAuthenticationError(535, b"smtp-user"), "The mail server rejected the platform’s login."),
        (SMTPRecipientsRefused({"owner@acme.example": (550, b"no")}), "The mail server rejected the recipients."),
        (SMTPDataError(451, b"of 10.0.0.7"), "The mail server responded with 451."),
    ],
)
def test_an_emails_error_is_stored_until_it_is_sent(tenant, monkeypatch, raised, why):
    use(make(tenant), 600)
    check_thresholds(NOW)
    now = datetime.now(UTC)
    with monkeypatch.context() as patch:
        patch.setattr("django.core.mail.EmailMessage.send", lambda self: (_ for _ in ()).throw(raised))
        assert send_emails(now) == 0
    (row,) = of(OutboxEmail, tenant)
    assert (row.state, row.error) == (OutboxEmail.State.QUEUED, why)
    assert send_emails(now + timedelta(minutes=10)) == 1
    (row,) = of(OutboxEmail, tenant)
    assert (row.state, row.error) == (OutboxEmail.State.SENT, "")
    assert of(BudgetAlert, tenant)[0].email_id == row.pk


def test_an_email_without_recipients_is_not_sent():
    use(make(actions.do_create_tenant("lonely", "Lonely")), 600)
    check_thresholds(NOW)
    assert send_emails() == 0
    (row,) = unscoped(OutboxEmail).filter()
    assert (row.state, row.error) == (OutboxEmail.State.FAILED, "No member has a role that receives this email.")


def test_an_email_is_retried_with_the_same_id(tenant, monkeypatch):
    from tenants.outbox import delivery

    use(make(tenant), 600)
    check_thresholds(NOW)
    now = datetime.now(UTC)

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("django.core.mail.EmailMessage.send", die)
        send_emails(now)
    assert send_emails(now + timedelta(minutes=1)) == 0  # its sender may still be running
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(delivery.log, "warning", die)
        patch.setattr("django.core.mail.EmailMessage.send", lambda self: (_ for _ in ()).throw(OSError("down")))
        send_emails(now + timedelta(minutes=10))
    assert send_emails(now + timedelta(minutes=30)) == 1
    (message,) = outbox.outbox
    first = message.extra_headers["Message-ID"]
    with all_tenants_scope(BypassReason.COMMAND):
        # As if killed before the result was stored.
        OutboxEmail.objects.all_tenants().update(sent_at=None, state="queued")
    send_emails(now + timedelta(hours=9))
    assert [each.extra_headers["Message-ID"] for each in outbox.outbox] == [first, first]


# Forecasts


def used_daily(tenant: Tenant, amounts: dict[datetime, int], key_id: int = 1, project_id: int = 1) -> None:
    """Create rollups of these days, each with this number of tokens at a nano-dollar per token."""
    zero = dict.fromkeys(
        (
            *("cancelled", "failed", "cache_read", "cache_write_5m", "cache_write_1h", "answer_hit_input"),
            *("answer_hit_output", "unpinned_tokens", "saved_femto", "output"),
        ),
        0,
    )
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().bulk_create(
            UsageRollup(
                tenant_id=tenant.pk,
                project_id=project_id,
                key_id=key_id,
                model="m",
                tier="standard",
                miss_reason="",
                completed=1,
                uncached=amount,
                cost_femto=amount * 10**6,
                bucket=bucket,
                start=day,
                **zero,
            )
            for day, amount in amounts.items()
            for bucket in ("day", "hour")
        )


def steady(amount: int = 100) -> dict[datetime, int]:
    """Create the same usage for each day from 28 days ago until today."""
    return {NOW.replace(hour=0) - number * DAY: amount for number in range(29)}


def test_the_forecast_continues_from_the_used_amount(tenant):
    budget = make(tenant, amount=10_000)
    used_daily(tenant, steady())
    budget_period = use(budget, 2050)
    with tenant_scope(tenant):
        found = forecast.forecast_budget_period(budget, budget_period, NOW)
    assert found.point == 2050 + 50 + 900
    assert found.low <= found.point <= found.high
    path = {day.day.day: day for day in found.path}
    assert [day.day.day for day in found.path] == list(range(1, 31))
    assert (path[20].actual, path[20].point, path[21].actual, path[22].actual) == (1950, None, 2050, None)
    assert path[30][2:] == found[:3]


@pytest.mark.parametrize("period", ["day", "lifetime"])
def test_other_periods_have_no_forecast(tenant, period):
    used_daily(tenant, steady())
    budget = make(tenant, period=period)
    with tenant_scope(tenant):
        assert forecast.forecast_budget_period(budget, use(budget, 5), NOW) is None


def test_two_days_are_too_few_for_a_forecast(tenant):
    used_daily(tenant, {day: 5 for day in list(steady())[:3]})
    with tenant_scope(tenant):
        assert forecast.forecast_tenant(tenant.pk, NOW) is None
        assert forecast.forecast_tenant(tenant.pk, NOW + DAY) is not None


def test_budgets_of_projects_keys_and_members_count_only_their_usage(tenant):
    project = only_project(tenant)
    owner = User.objects.get(email="owner@acme.example")
    with all_tenants_scope(BypassReason.COMMAND):
        key, _ = actions.do_create_api_key(project, "k", created_by=owner)
    used_daily(tenant, steady(7), key_id=key.pk, project_id=project.pk)
    used_daily(tenant, steady(1000), key_id=key.pk + 1, project_id=project.pk + 1)
    assert isinstance(key, ApiKey)
    for scope in ({"key": key}, {"project": project}, {"member": owner}):
        budget = make(tenant, **scope)
        with tenant_scope(tenant):
            assert forecast.forecast_budget_period(budget, use(budget, 0), NOW).point == round(7 * 9.5)


def test_the_tenants_month_is_in_nano_dollars(tenant):
    used_daily(tenant, steady())
    with tenant_scope(tenant):
        assert forecast.forecast_tenant(tenant.pk, NOW).point == 2100 + 50 + 900


def test_the_tenants_month_is_in_the_billing_entitys_time_zone(tenant):
    """A tenant's scope does not show the entity."""
    used_daily(tenant, steady())
    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.create(slug="ny", name="New York", country="US", time_zone="America/New_York")
        BillingProfile.objects.create(tenant=tenant, entity=entity, name="Acme", country="US")
    first = datetime(2026, 12, 1, 3, tzinfo=UTC)  # still November there
    with tenant_scope(tenant):
        found = forecast.forecast_tenant(tenant.pk, first)
    assert found is not None
    assert found.path[0].day == NOVEMBER.date()


def test_a_forecast_over_the_limit_alerts_once(tenant):
    used_daily(tenant, steady())
    budget = make(tenant, amount=2900)
    use(budget, 2050)
    assert [check_forecasts(NOW), check_forecasts(NOW)] == [1, 0]
    (row,) = of(BudgetAlert, tenant)
    assert (row.threshold, row.used, row.limit, row.forecast) == ("forecast", 2050, 2900, 3000)
    (event,) = of(WebhookEvent, tenant)
    assert event.payload["forecast"]["point"] == 3000
    assert "amounts to 3,000 tokens of 2,900 tokens" in of(OutboxEmail, tenant)[0].body


@pytest.mark.parametrize("fields", [{"amount": 3001}, {"amount": 2000}, {"amount": 2900, "alert_forecast": False}])
def test_a_forecast_within_the_limit_or_of_an_exceeded_budget_does_not_alert(tenant, fields):
    used_daily(tenant, steady())
    use(make(tenant, **fields), 2050)
    assert check_forecasts(NOW) == 0


def test_the_api_returns_alerts_and_forecasts(tenant, client):
    budget = make(tenant)
    use(budget, 600)
    check_thresholds(NOW)
    _, secret = actions.do_create_api_key(only_project(tenant), "m", scopes=["manage"])
    headers = {"authorization": f"Bearer {secret}"}
    (row,) = client.get(f"/api/budgets/{budget.pk}/alerts", headers=headers).json()["results"]
    assert (row["threshold"], row["used"], row["budget_name"], row["unit"]) == ("50", 600, "b", "tokens")
    event = client.get(f"/api/webhook-events/{row['event_id']}", headers=headers).json()
    assert event["payload"]["alert_id"] == row["id"]
    assert client.get("/api/alerts", headers=headers).json()["results"] == [row]
    with tenant_scope(tenant):
        assert [each.pk for each in alerts_of(tenant.pk, budget.pk)] == [row["id"]]
    empty = {"point": None, "low": None, "high": None, "path": []}
    assert client.get(f"/api/budgets/{budget.pk}/forecast", headers=headers).json() == empty
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    used_daily(tenant, {start - number * DAY: 10 for number in range(20)})
    month = client.get("/api/forecast", headers=headers).json()
    assert month["low"] <= month["point"] <= month["high"] == month["path"][-1]["high"]
