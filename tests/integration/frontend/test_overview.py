"""The tenant's overview: exact values of only this tenant, budgets and metering."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.conf import settings
from django.db import connection

from billing.budgets.budgets import do_make_budget
from billing.budgets.forecast import Day, Forecast, forecast_tenant
from billing.metering import rollups, status
from billing.models import BillingEntity, BillingProfile, Budget
from frontend.core.charts import ChartRow
from frontend.tenant.budgets.amounts import BudgetAmount
from frontend.tenant.budgets.page import BudgetUsage
from frontend.tenant.overview import keys, spend, usage
from millrace.environment.configuration import platform_settings
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User
from tests.support.billing.books import rate_card
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db
NOW = datetime.now(UTC)
TODAY = NOW.replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture
def member(client: Any, acme: Tenant) -> User:
    user = User.objects.create_user("dev@example.com")
    actions.do_add_member(acme, user, "readonly")
    client.force_login(user)
    return user


def page_of(client: Any, slug: str = "acme", query: str = "") -> str:
    response = client.get(f"/t/{slug}/{query}")
    assert response.status_code == 200
    page: str = response.content.decode()
    assert "did not load" not in page
    return page


def panel_of(client: Any, name: str, query: str = "") -> Any:
    response = client.get(f"/t/acme/panels/{name}{query}", headers={"HX-Request": "true"})
    assert response.status_code == 200
    panel = response.context["panel"]
    return SimpleNamespace(**panel) if isinstance(panel, dict) else panel


def usage_of(budget: Budget, used_nano: int) -> BudgetUsage:
    used, limit = (BudgetAmount.from_units("money", amount) for amount in (used_nano, budget.amount))
    return BudgetUsage(budget, None, used, BudgetAmount("money", 0), limit, None, None)


def test_the_overview_is_shown(client, acme, member, use):
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    use(acme, key_id=key.pk, price_version=rate_card(), uncached=1_000_000, cache_read=1_000_000, output=100_000)
    page = page_of(client)
    for text in ("prod", key.prefix, '$4<span class="cents">.80', '$2<span class="cents">.70', "50.0%", "Read only"):
        assert text in page, text
    assert "Send your first request" not in page


def test_the_sums_of_many_keys_are_loaded_after_the_page(client, acme, member, use, monkeypatch):
    monkeypatch.setattr(keys, "MANY_KEYS", 1)
    made = [actions.do_create_api_key(only_project(acme), "prod")[0]]
    use(acme, key_id=made[0].pk, uncached=1000)
    assert made[0].prefix in page_of(client)
    made.append(actions.do_create_api_key(only_project(acme), "next")[0])
    page = page_of(client)
    assert made[0].prefix not in page
    found = re.search(r'id="panel-keys" hx-get="([^"]+)" hx-trigger="load, every 30s"', page)
    assert found
    assert made[0].prefix in client.get(found[1]).content.decode()


def test_a_panel_that_fails_leaves_the_others_intact(client, acme, member, use, monkeypatch):
    """Also if its statement failed, after which no other can run in the transaction."""
    use(acme, uncached=123_456)

    def broken(*_args: Any, **_options: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    monkeypatch.setattr(usage, "total_rates", broken)
    page = client.get("/t/acme/").content.decode()
    assert re.findall(r'<section class="[^"]*" id="panel-(\w+)"[^>]*><div class="panel-error', page) == ["stats"]
    assert "123,456" in page


def test_other_tenants_overviews_return_404(client, acme, member, use):
    other = actions.do_create_tenant("other", "Other")
    use(other, uncached=987_654)
    use(acme)
    assert "987,654" not in page_of(client)
    assert client.get("/t/other/").status_code == 404
    theirs, unknown = (client.get(f"/t/{slug}/").content.decode() for slug in ("other", "unknown"))
    tokens = r'name="csrfmiddlewaretoken" value="\w+"'
    assert re.sub(tokens, "", theirs) == re.sub(tokens, "", unknown)
    assert client.get("/t/other/panels/spend").status_code == 404


def test_an_anonymous_user_is_redirected_to_the_login(client, acme):
    assert client.get("/t/acme/").url == "/login?next=/t/acme/"


def test_a_panel_asks_to_sign_in(client, acme):
    response = client.get("/t/acme/panels/spend", headers={"HX-Request": "true"})
    assert (response.status_code, response.headers["X-Sign-In"]) == (401, "/login?next=%2Faccount%2Fsigned-in")


def test_an_operator_must_give_a_reason_first(client, acme):
    client.force_login(User.objects.create_superuser("op@example.com"))
    assert client.get("/t/acme/").url == f"/operator/tenants/{acme.pk}/view?next=%2Ft%2Facme%2F"


def test_a_user_without_permission_sees_no_keys(client, acme, use):
    user = User.objects.create_user("books@example.com")
    actions.do_add_member(acme, user, "billing")
    client.force_login(user)
    use(acme)
    assert "Top API keys" not in page_of(client)
    assert client.get("/t/acme/panels/keys").status_code == 404


def test_an_empty_tenant_sees_a_command_to_run(client, acme, member):
    _, secret = actions.do_create_api_key(only_project(acme), "k")
    page = page_of(client)
    assert "Bearer $MILLRACE_API_KEY" in page
    assert secret[:12] not in page
    assert f"{platform_settings().base_url}/v1/chat/completions" in page
    assert "smollm2-135m" in page


def test_a_suspended_tenant_has_a_banner(client, acme, member):
    actions.do_suspend_tenant(acme)
    assert "This organization is suspended" in page_of(client)


def test_figures_are_exact(client, acme, member, use):
    counts = {"uncached": 10, "cache_read": 60, "cache_write_5m": 20, "cache_write_1h": 10, "output": 100}
    version = rate_card()
    for outcome in ("completed", "cancelled", "failed"):
        use(acme, at=TODAY, outcome=outcome, price_version=version, **counts)
    femto = 2 * (10 * 3000 + 60 * 300 + 20 * 3750 + 10 * 6000 + 100 * 15000) * 10**6
    spent = panel_of(client, "spend")
    assert (spent.amount.femto, spent.status, spent.gauge) == (femto, None, None)
    assert spent.chart.series[0].values[-1] == femto
    cache = panel_of(client, "cache")
    assert (cache.billed.femto, cache.hit, cache.hit_tokens, cache.input_tokens) == (femto, "60.0%", 120, 200)
    assert cache.without.femto == cache.billed.femto + cache.saved.femto
    tokens = {one.label: one.values[-1] for one in panel_of(client, "tokens").chart.series}
    assert tokens == {"Output": 200, "Uncached input": 20, "Cache writes": 60, "Cached input": 120}
    figures = panel_of(client, "stats")
    assert (figures.accepted, figures.cost.femto) == (3, femto * 1000 // 3)


def test_the_url_has_the_time_range(client, acme, member, use):
    use(acme, at=TODAY - timedelta(days=1), output=7)
    use(acme, at=TODAY, output=1)
    day = f"{TODAY - timedelta(days=1):%F}"
    chart = panel_of(client, "tokens", f"?range=custom&from={day}&to={day}").chart
    assert [one.values for one in chart.series if one.label == "Output"] == [(7,)]
    week = panel_of(client, "tokens", "?range=7d").chart
    assert [one.values[-2:] for one in week.series if one.label == "Output"] == [(7, 1)]
    assert "The start date is after the end date." in page_of(
        client, query="?range=custom&from=2026-02-02&to=2026-02-01"
    )
    assert "YYYY-MM-DD" in page_of(client, query="?range=custom&from=x")


def test_a_budget_of_the_tenant_is_the_limit(client, acme, member, use):
    use(acme)
    for amount in (12 * 10**9, 90 * 10**9):
        do_make_budget(acme, name=str(amount), unit="money", period="month", amount=amount)
    do_make_budget(acme, name="soft", unit="money", period="month", amount=1, mode="soft")
    spent = panel_of(client, "spend")
    assert (spent.status.limit.text, spent.status.left.text, spent.used) == ("$12.00", "$12.00", "0.00%")
    assert [mark.label for mark in spent.gauge.marks] == ["Limit $12.00", "50% alert", "80% alert"]


def test_an_exhausted_budget_has_a_banner(client, acme, member, use, monkeypatch):
    use(acme)
    budget = do_make_budget(acme, name="All", unit="money", period="month", amount=10**10)
    full = usage_of(budget, 99 * 10**8)
    monkeypatch.setattr(spend, "hard_budgets", lambda visit: [full])
    assert "hard limit reached" in page_of(client)
    monkeypatch.setattr(spend, "hard_budgets", lambda visit: [full] * 1210)
    page = page_of(client)
    assert page.count("hard limit reached") == 10
    assert "1,200 more hard limits reached." in page
    half = usage_of(budget, 10**9)
    monkeypatch.setattr(spend, "hard_budgets", lambda visit: [half])
    days = tuple(Day((TODAY + timedelta(days=i)).date(), None, (i + 1) * 4 * 10**9, 0, 10**11) for i in range(5))
    monkeypatch.setattr(spend, "forecast_tenant", lambda *_: Forecast(10**11, 0, 10**11, days))
    notice = panel_of(client, "notices")[0]
    assert (notice["kind"], notice["title"]) == ("warn", f"Hard limit likely on {TODAY + timedelta(days=2):%-d %B}.")


def test_the_forecast_continues_the_spend(client, acme, member, use, monkeypatch):
    use(acme, at=TODAY, price_version=rate_card(), output=1_000_000)
    last = (TODAY.replace(day=1) + timedelta(days=32)).replace(day=1) - timedelta(days=1)
    days = [TODAY + timedelta(days=i) for i in range((last - TODAY).days + 1)]
    path = tuple(Day(day.date(), None, 16 * 10**9, 15 * 10**9, 18 * 10**9) for day in days)
    monkeypatch.setattr(spend, "forecast_tenant", lambda *_: Forecast(16 * 10**9, 15 * 10**9, 18 * 10**9, path))
    spent = panel_of(client, "spend")
    by = {one.label: one.values for one in spent.chart.series}
    today = NOW.day - 1
    assert by["Forecast"][today] == by["Spend so far"][today] == spent.amount.femto == 15 * 10**15
    assert by["Spend so far"][today + 1 :] == (None,) * (last.day - NOW.day)
    assert {one.label: one.total for one in spent.chart.series}["Forecast"] == "$16.00"
    assert spent.chart.band is not None
    assert all(label in by for label in spent.chart.band)


@pytest.mark.parametrize("name", ["America/New_York", "Asia/Kolkata", "UTC"])
def test_at_a_months_end_the_month_is_in_the_billing_entitys_time_zone(client, acme, member, use, monkeypatch, name):
    """Spend, forecast and figures have the same start, and the chart has every day of the forecast."""
    zone, version = ZoneInfo(name), rate_card()
    with all_tenants_scope(BypassReason.COMMAND):
        entity = BillingEntity.objects.create(slug="far", name="Far", country="US", time_zone=name)
        BillingProfile.objects.create(tenant=acme, entity=entity, name="Acme", country="US")
    first = NOW.astimezone(zone).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month, late = (first - timedelta(days=1)).replace(day=1), first - timedelta(hours=2)  # two hours before its end
    before = (month - timedelta(days=1)).replace(day=1)
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        made = [(before - timedelta(days=1)).replace(day=1).date(), before.date(), month.date()]
        cursor.execute("SELECT billing_create_partitions(%s)", [made])
    counted = [month, *(month + timedelta(days=number) for number in range(20, 26)), late - timedelta(minutes=90)]
    for at in (month - timedelta(minutes=30), *counted, before):
        use(acme, at=at.astimezone(UTC), price_version=version, output=1_000_000)
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))
    rollups.build()

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return late.astimezone(tz)

    monkeypatch.setattr("frontend.core.page_context.datetime", Then)
    spent, figures = panel_of(client, "spend"), panel_of(client, "stats")
    assert spent.amount.femto == len(counted) * 15 * 10**15
    with tenant_scope(acme):
        expected = forecast_tenant(acme.pk, late)
    assert expected is not None
    now = next(day for day in expected.path if day.point is not None)
    assert now.actual == spent.amount.femto // 10**6
    assert [at.date() for at in spent.chart.at] == [day.day for day in expected.path]
    by = {one.label: one.values for one in spent.chart.series}
    done = [value for value in by["Spend so far"] if value is not None]
    assert (len(done), done[-1]) == (len([day for day in expected.path if day.actual is not None]), spent.amount.femto)
    assert figures.accepted == len(counted)
    as_long = before.astimezone(UTC) + (late.astimezone(UTC) - month.astimezone(UTC))  # of the previous month
    then = 2 if as_long > month - timedelta(minutes=30) else 1
    assert figures.accepted_delta.text == f"{(len(counted) - then) * 100 // then}.0%"
    assert figures.before == f"vs 1 – {min(late.day, (month - timedelta(days=1)).day)} {before:%b}"
    assert f"1 – {late:%-d %B %Y}, {name}" in page_of(client)


def test_the_table_has_the_charts_values(client, acme, member, use):
    use(acme, at=TODAY, output=1234)
    chart = panel_of(client, "tokens").chart
    assert chart.rows[-1] == ChartRow(f"{TODAY:%-d %b %Y}", ["1,234", "0", "0"], [])
    assert "1,234" in page_of(client)


def test_the_time_of_the_last_metered_usage_is_shown(client, acme, member):
    with redis.Redis.from_url(settings.CACHES["default"]["LOCATION"]) as broker:
        broker.delete(status.STATUS_KEY)
        assert "Metering status is unavailable" in page_of(client)
        at = datetime.now(UTC)
        said = status.SettlerStatus(int(at.timestamp() * 1e6), "s", 0, 0, 0, 4, lag_ms=90_000)
        broker.set(status.STATUS_KEY, status.encode(said))
        assert f"{at - timedelta(seconds=90):%H:%M:%S}</time>" in page_of(client)
        assert "metering has stopped" not in page_of(client)
        client.cookies["zone"] = "Asia/Kolkata"
        assert f"{at + timedelta(hours=5, minutes=30) - timedelta(seconds=90):%H:%M:%S}</time>" in page_of(client)
        broker.set(status.STATUS_KEY, status.encode(status.SettlerStatus(0, "s", 0, 0, 0, 0, 0)))
        assert "<b>metering has stopped</b>" in page_of(client)
        broker.delete(status.STATUS_KEY)


def test_the_overview_loads_without_the_broker(client, acme, member, use, settings):
    use(acme)
    settings.CACHES = {"default": settings.CACHES["default"] | {"LOCATION": "redis://127.0.0.1:1/0"}}
    assert "Metering status is unavailable" in page_of(client)
