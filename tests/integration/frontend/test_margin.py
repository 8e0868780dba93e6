"""The operators' margin screen: sums, filters and the export agree, and the health page reports losses."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from django.test import Client

from billing.metering import rollups
from billing.models import CompiledRateCard, CostCard, PriceBook, PriceBookAssignment
from frontend.core.numbers import Money
from millrace.apps.health.health_checks import find_issues
from millrace.apps.health.issues import IssueType
from tenants.actions import do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.execution_costs import FULL, PAID, PRICE, cost_card, settle_all
from tests.support.billing.usage_events import make_event
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("op@example.com"))
    remembered(client.session)
    return client


def test_the_margin_screen_shows_the_sums_of_its_export(operator: Client, tenant: Tenant) -> None:
    other, version = do_create_tenant("other", "Other"), unscoped(CompiledRateCard).get().pk
    cost_card()
    given = {"at": datetime.now(UTC), "price_version": version, "usage_source": "upstream", **FULL}
    settle_all(
        make_event(tenant_id=tenant.pk, **given),
        make_event(tenant_id=tenant.pk, **(given | {"reserved_nano": PRICE // 2 // 10**6})),
        make_event(tenant_id=other.pk, **(given | {"outcome": "failed"})),
        make_event(tenant_id=other.pk, **(given | {"model": "uncosted"})),
    )
    rollups.build()
    url = "/operator/margin/"
    page = operator.get(url).content.decode()
    assert "smollm2-135m" in page
    assert "Acme" in page
    for query, rows in (({}, 2), ({"group": "both"}, 3), ({"tenant": "other"}, 2), ({"model": "uncosted"}, 1)):
        text = operator.get(f"{url}csv", query).content.decode()
        found = list(csv.DictReader(io.StringIO(text)))
        assert len(found) == rows
        for row in found:
            costed = Decimal(row["revenue_usd"]) - Decimal(row["uncosted_revenue_usd"])
            assert costed - Decimal(row["cost_usd"]) == Decimal(row["margin_usd"])
    total = sum(
        Decimal(row["cost_usd"]) for row in csv.DictReader(io.StringIO(operator.get(f"{url}csv").content.decode()))
    )
    assert total == Decimal(3 * PAID) / 10**15
    assert operator.get(url, {"month": "2020-01"}).content.decode().count("No usage in this month") == 1
    assert operator.get(url, {"tenant": "nobody"}).status_code == 404
    member = Client()
    member.force_login(User.objects.create_user("member@example.com"))
    assert member.get(url).status_code == member.get(f"{url}csv").status_code == 404
    with all_tenants_scope(BypassReason.OPERATOR):
        issues = {issue.issue_type: issue for issue in find_issues(None)}
    assert issues[IssueType.OVERAGE].subject == "smollm2-135m"
    assert issues[IssueType.OVERAGE].todo.startswith("$0.003 was not billed.")
    with all_tenants_scope(BypassReason.OPERATOR):
        book = PriceBook.objects.create(name="eur", currency="EUR")
        PriceBookAssignment.objects.create(tenant=other, book=book)
    settle_all(make_event(tenant_id=other.pk, **(given | {"reserved_nano": PRICE // 4 // 10**6})))
    with all_tenants_scope(BypassReason.OPERATOR):
        issues = {issue.issue_type: issue for issue in find_issues(None)}
    assert issues[IssueType.OVERAGE].todo.startswith("€0.0045 + $0.003 was not billed.")
    assert ": 2 executions" in issues[IssueType.OVERAGE].title
    assert issues[IssueType.COST].subject == "uncosted"


def figure(page: str, label: str) -> str:
    """Return a key figure as text."""
    found = re.search(rf'<dt>{label}</dt><dd><span class="stat-value[^>]*>(.*?)</dd>', page, re.S)
    assert found
    return re.sub(r"<[^>]+>", "", found[1]).strip()


def test_revenue_is_all_billed_usage_and_costs_are_set_on_the_page(operator: Client, tenant: Tenant) -> None:
    version = unscoped(CompiledRateCard).get().pk
    first = datetime.now(UTC)
    given = {"at": first, "tenant_id": tenant.pk, "price_version": version, **FULL}
    settle_all(make_event(**given), make_event(**given))
    rollups.build()
    url, month = "/operator/margin/", f"{first:%b %Y}"
    billed = Money(2 * PRICE, "USD").text
    page = operator.get(url).content.decode()
    assert month in page
    assert f"{first:%Y-%m}</a>" not in page
    assert (figure(page, "Revenue"), figure(page, "No cost known"), figure(page, "Margin")) == (billed, billed, "$0.00")
    assert "100.0% of revenue" in page
    assert 'data-label="Cost"><span class="cell-lines"><span class="badge warn">No cost known</span>' in page

    form_url = f"{url}costs/smollm2-135m"
    assert f'href="{form_url}"' in page
    assert "Enter at least one cost." in operator.post(form_url, {}).content.decode()
    refused = operator.post(form_url, {"uncached": "1", "output": "x"}).content.decode()
    assert 'value="x"' in refused
    assert unscoped(CostCard).count() == 0
    sent = {"uncached": "1", "cache_read": "0.10", "output": "$5", "note": "contract"}
    assert operator.post(form_url, sent).url == url
    card = unscoped(CostCard).get()
    assert {rate.component: rate.nano_per_million for rate in card.decode().rates} == {
        "uncached": 10**9,
        "cache_read": 10**8,
        "output": 5 * 10**9,
    }
    shown = operator.get(form_url).content.decode()
    for value in ("1.00", "0.10", "5.00"):
        assert f'value="{value}"' in shown
    assert operator.get(f"{url}costs/unknown").status_code == 404

    at = datetime.now(UTC)  # the card applies from now on
    settle_all(make_event(**(given | {"at": at, "request_id": "req_later"})))
    rollups.build()
    row = next(csv.DictReader(io.StringIO(operator.get(f"{url}csv?month={at:%Y-%m}").content.decode())))
    assert Decimal(row["cost_usd"]).scaleb(15) == PAID
    assert Decimal(row["revenue_usd"]).scaleb(15) == 3 * PRICE

    early = {"at": first, "tenant_id": tenant.pk, "price_version": version, "request_id": "req_early"}
    settle_all(make_event(**early))  # before the card, within its reservation
    rollups.build()
    page = re.sub(r"<[^>]+>", "", operator.get(f"{url}?month={at:%Y-%m}").content.decode())
    assert page.count("2 of 4 executions") == 2  # of the row and of the sums
    assert "A cost is booked for 2 of 4 executions." in page
