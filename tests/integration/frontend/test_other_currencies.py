"""Pages, exports and emails of a tenant that is billed in EUR name this currency."""

from __future__ import annotations

import csv
import io
from html import unescape
from typing import Any

import pytest
from django.test import Client

from billing.budgets.alerts import _text
from billing.budgets.budgets import do_make_budget
from billing.invoicing.exports import as_csv
from billing.invoicing.setup import do_set_profile
from billing.models import Invoice, InvoiceLine
from billing.pricing.prices import do_discard_prices, do_propose_prices
from billing.rates.price_book import Proposal
from billing.rates.price_files import read_csv
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.billing.euros import CSV, bill_in_euros
from tests.support.billing.invoice_forms import document_of
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True, roles=["owner"], password=PASSWORD)]


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    bill_in_euros(acme)
    return acme


@pytest.fixture
def invoice(acme: Tenant) -> Invoice:
    use(acme, OCTOBER, (price("10", model="m", book="eur", currency="EUR", number=10), 10**6))
    return invoiced(acme, OCTOBER)


@pytest.fixture
def owner(acme: Tenant) -> Client:
    return logged_in("owner@example.com")


@pytest.fixture
def operator(acme: Tenant) -> Client:
    User.objects.create_superuser("op@example.com", PASSWORD)
    return logged_in("op@example.com")


def logged_in(email: str) -> Client:
    client = Client()
    client.force_login(User.objects.get(email=email))
    remembered(client.session)
    return client


def text(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return unescape(response.content.decode())


def lines_of(invoice: Invoice) -> list[InvoiceLine]:
    return list(unscoped(InvoiceLine).filter(invoice=invoice, price_id__isnull=False))


def test_an_invoice_and_its_lines(owner: Client, operator: Client, invoice: Invoice) -> None:
    (line,) = lines_of(invoice)
    for client, url in ((owner, f"/t/acme/invoices/{invoice.pk}"), (operator, f"/operator/billing/{invoice.pk}")):
        page = text(client, url)
        assert "<dd>EUR</dd>" in page and "USD" not in page
        page = text(client, f"{url}/lines/{line.position}")
        assert "€10.00" in page and "$" not in page and "USD" not in page


def test_the_csv_of_an_invoice(invoice: Invoice) -> None:
    (row,) = csv.DictReader(io.StringIO(as_csv(document_of(invoice))))
    assert (row["eur_per_million"], row["eur_exact"], row["eur"]) == ("10", "10", "10.00")
    assert not [name for name in row if "usd" in name]


def test_the_settings(owner: Client, acme: Tenant) -> None:
    assert "<dt>Currency</dt><dd>EUR</dd>" in text(owner, "/t/acme/settings/")
    do_set_profile(acme, currency="CHF")
    assert "<dt>Currency</dt><dd>EUR, also shown in CHF</dd>" in text(owner, "/t/acme/settings/")


def test_budgets(owner: Client, operator: Client, acme: Tenant) -> None:
    budget = do_make_budget(acme, name="b", unit="money", period="month", amount=12 * 10**9)
    page = text(owner, f"/t/acme/budgets/{budget.pk}/raise")
    assert "In EUR." in page and "USD" not in page
    with all_tenants_scope(BypassReason.BILLING):
        assert _text(budget.amount, budget) == "€12.00"
    for client, path in ((owner, "/t/acme/audit/"), (operator, "/operator/audit/")):
        page = text(client, path)
        assert "€12.00" in page and "$12.00" not in page


def test_prices(owner: Client, operator: Client, acme: Tenant) -> None:
    page = text(owner, "/t/acme/prices/")
    assert "EUR per 1M tokens" in page and "USD" not in page
    for query in ("book=eur", "tenant=acme"):
        assert "EUR per 1M tokens." in text(operator, f"/operator/prices/?{query}")
    assert "€10.00" in text(operator, "/operator/prices/?book=eur")
    assert "USD per 1M tokens." in text(operator, "/operator/prices/")


def test_the_api_of_own_prices(operator: Client, acme: Tenant) -> None:
    own: Any = do_propose_prices(read_csv(CSV), tenant=acme)
    shared = do_propose_prices(Proposal(read_csv(CSV).prices))
    client = by_person(User.objects.get(email="op@example.com"))
    rows = client.get("/api/operator/prices?state=draft").json()["results"]
    assert {row["id"]: row["currency"] for row in rows} == {own.pk: "EUR", shared.pk: "USD"}
    assert client.get(f"/api/operator/prices/{own.pk}").json()["currency"] == "EUR"
    page = text(operator, f"/operator/prices/{own.pk}/")
    assert "€10.00" in page and "$10.00" not in page
    do_discard_prices(own, by=None)


def test_the_playground_shows_costs_in_the_currency_of_the_tenant(owner: Client) -> None:
    response = owner.get("/t/acme/playground/")
    assert response.context["page"]["data"]["symbol"] == "€"
