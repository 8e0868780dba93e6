"""VAT report, EC sales list and OSS report of a billing entity."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void, do_write_off
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.purchases import do_sell_credit
from billing.ledger.booking import booking
from billing.ledger.ledger import PostedEntry, post
from billing.models import (
    Account,
    BillingEntity,
    BillingProfile,
    ExchangeRate,
    Invoice,
    LedgerEntry,
    TaxRule,
    UsageEvent,
)
from billing.periods import default_entity
from billing.taxes.vat_reports import EcSalesRow, OssRow, VatRow, ec_sales_list, oss_report, vat_report
from tenants.actions import do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, over, price, take_back, use
from tests.support.billing.books import period as make_period
from tests.support.billing.clocks import at
from tests.support.billing.currencies import in_currency
from tests.support.billing.prepaid_credit import MULTI, SINGLE, pay
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
NANO_A_CENT = 10**7
ISSUED = "2026-11"  # by the entity's clocks: October's invoices are issued on 31 October at 23:00 UTC
LATER = datetime(2027, 1, 15, 12, tzinfo=UTC)
BUYERS = {  # country and VAT ID by slug
    "nl-shop": ("NL", ""),
    "nl-firm": ("NL", "NL123456789B13"),
    "de-shop": ("DE", ""),
    "de-firm": ("DE", "DE136695976"),
    "gr-firm": ("GR", "EL094259216"),
    "fr-shop": ("FR", ""),
    "us-firm": ("US", ""),
}
RULES = (  # country, buyer, category, rate
    *(("NL", "", "S", 210_000), ("DE", "consumer", "S", 190_000), ("DE", "business", "AE", 0)),
    *(("GR", "business", "AE", 0), ("FR", "consumer", "S", 200_000), ("US", "", "G", 0)),
)


@pytest.fixture
def entity(acme: Tenant) -> BillingEntity:
    """Return a Dutch billing entity with tax rules, whose tax currency is the euro."""
    with all_tenants_scope(BypassReason.BILLING):
        row = default_entity()
        BillingEntity.objects.filter(pk=row.pk).update(
            **{"name": "Northgate", "country": "NL", "vat_id": "NL123456789B13", "time_zone": "Europe/Amsterdam"},
            **{"tax_currency": "EUR", "max_rate_age_days": 1000},
        )
        for country, buyer, category, rate in RULES:
            TaxRule.objects.create(
                entity=row, country=country, buyer=buyer, category=category, rate_ppm=rate, starts_on=date(2026, 1, 1)
            )
        ExchangeRate.objects.create(currency="EUR", on=date(2026, 1, 1), micro_per_usd=900_000)
        row.refresh_from_db()
        return row


@pytest.fixture
def bills(entity: BillingEntity) -> dict[str, Invoice]:
    """Return an invoice of $100 in October for each buyer, by slug."""
    tenants = {slug: make_buyer(entity, slug) for slug in BUYERS}
    charge = price("100")
    for tenant in tenants.values():
        use(tenant, OCTOBER, (charge, MILLION))
    return {slug: invoiced(tenant, OCTOBER) for slug, tenant in tenants.items()}


def make_buyer(entity: BillingEntity, slug: str) -> Tenant:
    country, vat_id = BUYERS[slug]
    tenant = do_create_tenant(slug, slug)
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.create(tenant=tenant, entity=entity, name=slug, country=country, vat_id=vat_id)
    return tenant


def report(function: Callable[[BillingEntity, str], list[Any]], entity: BillingEntity, period: str) -> list[Any]:
    with all_tenants_scope(BypassReason.BILLING):
        return function(entity, period)


def assert_ledger(entity: BillingEntity, *periods: str) -> None:
    """Compare the tax of the periods with the ledger's tax accounts, in each currency."""
    reported: dict[str, int] = defaultdict(int)
    for period in periods:
        for row in report(vat_report, entity, period):
            reported[row.currency] += round(float(row.tax) * 100)
    booked: dict[str, int] = defaultdict(int)
    with all_tenants_scope(BypassReason.BILLING):
        taxes = LedgerEntry.objects.all_tenants().filter(account=Account.TAX)
        for nano, currency in taxes.values_list("nano", "transaction__currency"):
            booked[currency] -= nano // NANO_A_CENT
    assert {key: value for key, value in reported.items() if value} == dict(booked)


def test_the_vat_report_has_a_row_for_each_country_category_and_rate(entity, bills):
    dollars, euros = ("USD", "100.00"), ("EUR", "90.00")
    assert report(vat_report, entity, ISSUED) == [
        VatRow("DE", "AE", "0", 1, *dollars, "0.00", *euros, "0.00"),
        VatRow("DE", "S", "19", 1, *dollars, "19.00", *euros, "17.10"),
        VatRow("FR", "S", "20", 1, *dollars, "20.00", *euros, "18.00"),
        VatRow("GR", "AE", "0", 1, *dollars, "0.00", *euros, "0.00"),
        VatRow("NL", "S", "21", 2, "USD", "200.00", "42.00", "EUR", "180.00", "37.80"),
        VatRow("US", "G", "0", 1, *dollars, "0.00", *euros, "0.00"),
    ]
    assert report(vat_report, entity, "2026-Q4") == report(vat_report, entity, ISSUED)
    assert [report(vat_report, entity, period) for period in ("2026-10", "2026-12", "2026-Q3")] == [[], [], []]
    assert_ledger(entity, ISSUED)


def test_other_entities_have_reports_of_their_own(entity, bills):
    with all_tenants_scope(BypassReason.BILLING):
        other = BillingEntity.objects.create(slug="other", name="Other", country="DE")
    assert [report(function, other, "2026-Q4") for function in (vat_report, ec_sales_list, oss_report)] == [[]] * 3


def test_drafts_are_not_reported(entity, bills):
    tenant = bills["nl-shop"].tenant
    use(tenant, NOVEMBER, (price("5", number=11, model="beta"), MILLION))
    month = make_period(NOVEMBER)
    do_close_period(month, now=over(month))
    assert [row.state for row in do_draft(month, tenant)] == ["draft"]
    assert_ledger(entity, ISSUED)
    assert sum(row.documents for row in report(vat_report, entity, "2026-Q4")) == len(BUYERS)


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_credit_is_reported_when_it_is_taxed(entity, voucher_type, monkeypatch):
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(voucher_type=voucher_type)
    tenant = make_buyer(entity, "nl-shop")
    with at(monkeypatch, OCTOBER):
        pay(12_100, tenant=tenant.slug)
        do_sell_credit(tenant, 10_000 * NANO_A_CENT)
    (bought,) = unscoped(Invoice).all()
    found = [(row.category, row.taxable, row.tax) for row in report(vat_report, entity, "2026-10")]
    assert bought.total == (12_100 if voucher_type == SINGLE else 10_000)
    assert found == ([("S", "100.00", "21.00")] if voucher_type == SINGLE else [])
    assert_ledger(entity, "2026-10")


def test_notes_and_voids_count_in_the_month_of_their_date(entity, bills, monkeypatch):
    with at(monkeypatch, LATER):
        do_issue_credit_note(bills["de-shop"], [("SLA", 4_000)], "SLA")
        do_issue_debit_note(bills["nl-firm"], [("Support", 1_000)], "Support")
        do_void(bills["fr-shop"], "Wrong address")
        do_void(bills["de-firm"], "Wrong address")
    assert len(report(vat_report, entity, ISSUED)) == 6
    assert report(vat_report, entity, "2027-01") == [
        VatRow("DE", "AE", "0", 1, "USD", "-100.00", "0.00", "EUR", "-90.00", "0.00"),
        VatRow("DE", "S", "19", 1, "USD", "-40.00", "-7.60", "EUR", "-36.00", "-6.84"),
        VatRow("FR", "S", "20", 1, "USD", "-100.00", "-20.00", "EUR", "-90.00", "-18.00"),
        VatRow("NL", "S", "21", 1, "USD", "10.00", "2.10", "EUR", "9.00", "1.89"),
    ]
    assert report(ec_sales_list, entity, "2027-Q1") == [
        EcSalesRow("DE", "DE136695976", "de-firm", 1, "EUR", "-90.00"),
    ]
    assert report(oss_report, entity, "2027-Q1") == [
        OssRow("DE", "19", "2026-Q4", 1, "EUR", "-36.00", "-6.84"),
        OssRow("FR", "20", "2026-Q4", 1, "EUR", "-90.00", "-18.00"),
    ]
    assert_ledger(entity, ISSUED, "2027-01")


def test_a_note_corrects_the_country_of_its_invoice(entity, bills, monkeypatch):
    """The buyer has moved since."""
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().filter(tenant__slug="de-shop").update(country="FR")
    with at(monkeypatch, NOVEMBER):
        note = do_issue_credit_note(bills["de-shop"], [("SLA", 10_000)], "SLA")
    assert note.buyer["country"] == "FR"
    rows = [row for row in report(vat_report, entity, ISSUED) if (row.country, row.category) == ("DE", "S")]
    assert rows == [VatRow("DE", "S", "19", 2, "USD", "0.00", "0.00", "EUR", "0.00", "0.00")]
    assert OssRow("DE", "19", "", 2, "EUR", "0.00", "0.00") in report(oss_report, entity, "2026-Q4")


def test_a_change_of_tax_without_a_document_is_reported_when_it_is_booked(entity, bills, monkeypatch):
    """Such as tax of a claim that was written off: half of the invoice."""
    billed = bills["de-shop"]
    with at(monkeypatch, LATER), booking(billed.tenant_id):
        nano = 950 * NANO_A_CENT
        entries = [PostedEntry(Account.TAX, nano, billed.pk), PostedEntry(Account.BAD_DEBT, -nano, billed.pk)]
        post(billed.tenant_id, f"bad-debt:{billed.pk}", entries, billed.currency)
    expected = VatRow("DE", "S", "19", 1, "USD", "-50.00", "-9.50", "EUR", "-45.00", "-8.55")
    assert report(vat_report, entity, "2027-01") == [expected]
    assert report(oss_report, entity, "2027-Q1") == [OssRow("DE", "19", "2026-Q4", 1, "EUR", "-45.00", "-8.55")]
    assert_ledger(entity, ISSUED, "2027-01")


def test_write_offs_and_what_follows_change_the_tax_when_they_are_booked(entity, bills, monkeypatch):
    billed = bills["de-shop"]
    with at(monkeypatch, LATER):
        do_write_off(billed, "Insolvent")
    expected = VatRow("DE", "S", "19", 1, "USD", "-100.00", "-19.00", "EUR", "-90.00", "-17.10")
    assert report(vat_report, entity, "2027-01") == [expected]
    assert_ledger(entity, ISSUED, "2027-01")
    (event,) = [row for row in unscoped(UsageEvent).all() if row.tenant_id == billed.tenant_id]
    take_back(event, NOVEMBER)
    month = make_period(NOVEMBER)
    do_close_period(month, now=over(month))
    with at(monkeypatch, datetime(2027, 2, 15, 12, tzinfo=UTC)):
        (note,) = [do_finalize(draft) for draft in do_draft(month, billed.tenant)]
    assert note.total == 11_900
    expected = VatRow("DE", "S", "19", 2, "USD", "0.00", "0.00", "EUR", "0.00", "0.00")  # the note and the restored tax
    assert report(vat_report, entity, "2027-02") == [expected]
    assert_ledger(entity, ISSUED, "2027-01", "2027-02")


def test_the_ec_sales_list_has_the_buyers_with_reverse_charge(entity, bills):
    assert report(ec_sales_list, entity, "2026-Q4") == [
        EcSalesRow("DE", "DE136695976", "de-firm", 1, "EUR", "90.00"),
        EcSalesRow("EL", "EL094259216", "gr-firm", 1, "EUR", "90.00"),
    ]


def test_the_oss_report_has_consumers_in_other_eu_countries(entity, bills):
    assert report(oss_report, entity, "2026-Q4") == [
        OssRow("DE", "19", "", 1, "EUR", "90.00", "17.10"),
        OssRow("FR", "20", "", 1, "EUR", "90.00", "18.00"),
    ]


def test_a_document_in_the_tax_currency_is_not_converted(entity):
    tenant = make_buyer(entity, "nl-shop")
    in_currency(tenant, "EUR")
    book = {"book": "eur", "currency": "EUR", "number": 10, "model": "meur"}
    use(tenant, OCTOBER, (price("100", **book), MILLION))
    invoiced(tenant, OCTOBER)
    assert report(vat_report, entity, ISSUED) == [
        VatRow("NL", "S", "21", 1, "EUR", "100.00", "21.00", "EUR", "100.00", "21.00")
    ]
    assert_ledger(entity, ISSUED)


@pytest.fixture
def operator(db: None) -> APIClient:
    return by_person(User.objects.create_superuser("op@example.com"))


def test_operators_read_the_reports_as_json_and_csv(operator, entity, bills, acme):
    url, owner = f"/api/operator/entities/{entity.pk}", by_role(acme, "owner")
    rows = {name: operator.get(f"{url}/{name}", {"period": "2026-Q4"}) for name in ("vat", "ec-sales", "oss")}
    assert {name: (row.status_code, len(row.json())) for name, row in rows.items()} == {
        **{"vat": (200, 6), "ec-sales": (200, 2), "oss": (200, 2)},
    }
    for name, found in rows.items():
        table = operator.get(f"{url}/{name}", {"period": "2026-Q4", "format": "csv"})
        assert table["content-type"].startswith("text/csv")
        lines = list(csv.DictReader(io.StringIO(table.content.decode())))
        assert lines == [{key: str(value) for key, value in row.items()} for row in found.json()]
        for wrong in ("", "2026", "2026-13", "2026-Q5", "1999-01"):
            assert operator.get(f"{url}/{name}", {"period": wrong}).status_code == 400, wrong
        empty = operator.get(f"{url}/{name}", {"period": "2026-01", "format": "csv"}).content.decode()
        assert empty.split("\r\n") == [",".join(found.json()[0]), ""]
        assert operator.get(f"{url}/{name}").status_code == 400
        assert operator.get(f"/api/operator/entities/0/{name}", {"period": "2026-11"}).status_code == 404
        assert owner.get(f"{url}/{name}", {"period": "2026-11"}).status_code == 404


def test_the_billing_page_links_to_the_reports_of_the_month_and_the_quarter(entity, bills):
    browser = Client()
    browser.force_login(User.objects.create_superuser("op@example.com"))
    panel = browser.get("/operator/billing/panels/runs?month=2026-10").content.decode()
    urls = re.findall(r'href="(/operator/billing/entities/[^"]+)"', panel)
    start = f"/operator/billing/entities/{entity.slug}"
    of_accounts = ("trial-balance/2026-10", "prepaid-credit/2026-10", "prepaid-credit-by-tenant/2026-10")
    reports = (*of_accounts, "vat/2026-10", "vat/2026-Q4", "ec-sales/2026-10", "ec-sales/2026-Q4", "oss/2026-Q4")
    assert urls == [f"{start}/{report}" for report in reports]
    found = [browser.get(url) for url in urls]
    assert [len(response.content.splitlines()) for response in found] == [1, 1, 1, 1, 7, 1, 3, 3]
    assert found[7]["content-disposition"] == f'attachment; filename="oss-{entity.slug}-2026-Q4.csv"'
    for wrong in ("vat/2026", "sales/2026-10", "trial-balance/2026-Q4", "trial-balance/2999-01", "oss/trial-balance"):
        assert browser.get(f"{start}/{wrong}").status_code == 404
    assert browser.get("/operator/billing/entities/unknown/vat/2026-10").status_code == 404
    browser.force_login(User.objects.create_user("user@example.com"))
    assert browser.get(urls[0]).status_code == 404
