"""Marks and drill-down of charts: what may explain a change, of this tenant only, and the requests of a point."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.budgets.budgets import do_change_budget, do_make_budget
from billing.models import PriceBook, PriceBookAssignment, PriceVersion
from frontend.core.charts import MAX_MARKS, Chart
from millrace.apps.alerts.actions import do_create_alert_rule
from millrace.apps.alerts.models import RuleAlert
from millrace.apps.deployments.models import Deployment
from tenants import actions, audit
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User

pytestmark = [pytest.mark.django_db, pytest.mark.acme("Acme Robotics", roles=["owner", "billing"])]
POLICY = {"models": ["smollm2-135m"]}


def chart_of(client: Any, panel: str = "tokens", page: str = "", query: str = "?range=7d") -> Chart:
    response = client.get(f"/t/acme/{page}panels/{panel}{query}", headers={"HX-Request": "true"})
    assert response.status_code == 200
    chart = response.context["panel"]["chart"]
    assert isinstance(chart, Chart)
    return chart


def texts_of(chart: Chart) -> list[str]:
    return [mark.text for _index, mark in chart.placed_marks]


@pytest.fixture
def owner(client: Any, acme: Tenant, use: Any) -> Any:
    use(acme, uncached=1000, output=500)
    client.force_login(User.objects.get(email="owner@example.com"))
    return client


def publish_prices(book: PriceBook, number: int, at: datetime, tenant: Tenant | None = None) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        PriceVersion.objects.create(
            book=book,
            tenant_id=tenant and tenant.pk,
            number=number,
            state=PriceVersion.State.PUBLISHED,
            body={},
            effective_from=at,
        )


def change_deployment(action: str, name: str, **after: str) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        audit.record(action, Deployment(pk=1, name=name), tenant_id=None, after=after)


def test_policies_and_budget_raises_are_marked(acme, owner):
    other = actions.do_create_tenant("other", "Other")
    for tenant in (acme, other):
        name = f"fast-{tenant.slug}"
        actions.do_publish_policy(tenant, name, POLICY, check_targets=False)
        actions.do_withdraw_policy(tenant, name)
        budget = do_make_budget(tenant, name=f"All of {tenant.slug}", unit="money", period="month", amount=1000)
        for change in (1500, 1200):  # the second one is no raise
            do_change_budget(budget, amount=change)
        until = datetime.now(UTC) + timedelta(days=1)
        do_change_budget(budget, temporary_increase=50, increase_expires_at=until)
    chart = chart_of(owner)
    assert texts_of(chart) == [
        "Alias fast-acme: version 1 published",
        "Alias fast-acme unpublished",
        "Budget All of acme raised by 50.0%",
        "Budget All of acme raised for a while",
    ]
    assert {index for index, _mark in chart.placed_marks} == {len(chart.at) - 1}
    assert chart.rows[-1].marks == texts_of(chart)
    assert [row.marks for row in chart.rows[:-1]] == [[]] * (len(chart.at) - 1)


def test_marks_need_the_permission_of_their_objects(acme, client, owner):
    actions.do_publish_policy(acme, "fast", POLICY, check_targets=False)
    budget = do_make_budget(acme, name="All", unit="money", period="month", amount=1000)
    do_change_budget(budget, amount=2000)
    client.force_login(User.objects.get(email="billing@example.com"))  # without the permission for policies
    assert texts_of(chart_of(client)) == ["Budget All raised by 100.0%"]


def test_prices_of_the_tenant_are_marked(acme, owner):
    other = actions.do_create_tenant("other", "Other")
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.COMMAND):
        listed = PriceBook.objects.get_or_create(name=PriceBook.LIST)[0]
        own = PriceBook.objects.create(name="own")
    for number, (book, tenant, age) in enumerate(
        [(listed, None, 2), (listed, acme, 1), (listed, other, 1), (own, None, 1), (listed, None, 400)], 900
    ):
        publish_prices(book, number, now - timedelta(days=age), tenant)
    assert texts_of(chart_of(owner)) == ["New prices: version 900", "New prices: version 901"]
    with all_tenants_scope(BypassReason.COMMAND):
        PriceBookAssignment.objects.create(tenant=acme, book=own)
    assert sorted(texts_of(chart_of(owner))) == ["New prices: version 901", "New prices: version 903"]


def test_deployments_and_alerts_are_marked(acme, owner):
    other = actions.do_create_tenant("other", "Other")
    change_deployment("deployment.created", "small")
    change_deployment("deployment.updated", "large", quantization="int8")
    change_deployment("deployment.updated", "idle", idle_seconds="60")  # changes no answer
    change_deployment("deployment.removed", "old")
    for tenant in (acme, other):
        for metric, summary in (("error_rate", f"Errors of {tenant.slug}"), ("key_expiry", "A key expires")):
            rule = do_create_alert_rule(tenant, metric=metric, threshold=5)
            now = datetime.now(UTC)
            fields = {"rule": rule, "summary": summary, "threshold": 5, "created_at": now, "last_seen_at": now}
            with tenant_scope(tenant):
                RuleAlert.objects.create(tenant=tenant, **fields)
    assert texts_of(chart_of(owner)) == [
        "Deployment small added",
        "Deployment large changed",
        "Deployment old removed",
        "Alert: Errors of acme",
    ]
    hours = chart_of(owner, "spend", query="")
    assert texts_of(hours) == texts_of(chart_of(owner))


def test_a_chart_has_a_limited_number_of_marks(acme, owner):
    for _ in range(MAX_MARKS + 3):
        actions.do_publish_policy(acme, "fast", POLICY, check_targets=False)
    found = texts_of(chart_of(owner))
    assert (len(found), found[-1]) == (MAX_MARKS, f"Alias fast: version {MAX_MARKS + 3} published")


def test_a_point_opens_its_requests_with_the_filters_of_the_page(acme, owner):
    assert chart_of(owner).data["requests"] == "/t/acme/requests/"
    chart = chart_of(owner, "tokens", "usage/", "?range=7d&model=smollm2-135m")
    assert chart.data["requests"] == "/t/acme/requests/?model=smollm2-135m"
    explorer = chart_of(owner, "segments", "usage/explorer/", "?range=12w&measure=tokens&model=smollm2-135m")
    assert (explorer.data["requests"], explorer.data["selects"]) == (chart.data["requests"], True)
    assert explorer.data["step"] == 7 * 24 * 3600


@pytest.mark.acme("Acme Robotics", roles=["owner"])
def test_marks_are_in_the_language_of_the_user(acme, owner):
    actions.do_publish_policy(acme, "schnell", POLICY, check_targets=False)
    owner.cookies["language"] = "de"
    response = owner.get("/t/acme/panels/tokens", headers={"HX-Request": "true"})
    assert "Alias schnell: Version 1 veröffentlicht" in response.content.decode()
