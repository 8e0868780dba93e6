"""The operators' billing entities: the seller, tax rules, the chart of accounts and the journal's files."""

from __future__ import annotations

from datetime import UTC, date, datetime
from html import unescape
from typing import Any

import pytest
from django.test import Client

from billing.models import BillingEntity, ChartOfAccounts, CreditGrant, Payment, TaxRule
from billing.periods import default_entity, ensure_periods
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, User
from tests.support.billing.books import OCTOBER, invoiced, make_months, price, use
from tests.support.billing.charts import CHART, read_datev
from tests.support.downloads import read_download
from tests.support.frontend.billing_run import make_billed_acme
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

SELLER = {
    **{"name": "Mühle GmbH", "street": "Lindenstraße 14", "postcode": "10969", "city": "Berlin", "country": "de"},
    **{"vat_id": "DE136695976", "email": "billing@muehle.example", "iban": "DE75 5121 0800 1245 1261 99"},
    **{"terms_days": "30", "suspend_after_days": "", "invoice_prefix": "RE", "credit_note_prefix": "GS"},
    **{"time_zone": "Europe/Berlin", "voucher_type": "multi_purpose", "tax_currency": "eur"},
    **{"contact_name": "Mia Mühl", "contact_phone": "+49 30 901820", "max_rate_age_days": "5"},
    **{"relief_after_claim": "on", "reminder_days": "10, 3; 10", "reminder_email_text": "Please transfer\nthe amount."},
}
CHART_FORM = {"content": CHART, "consultant": "1001", "client": "7", "first_month": "1", "account_digits": "4"}


@pytest.fixture
def operator(db: None) -> Client:
    User.objects.create_superuser("op@example.com")
    return signed_in("op")


def signed_in(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.get(email=f"{name}@example.com"))
    remembered(client.session)
    return client


def page(browser: Client, path: str, status: int = 200, /, **fields: Any) -> str:
    response = browser.post(path, fields) if fields else browser.get(path)
    text = unescape(response.content.decode())
    assert response.status_code == status, text[-3000:]
    return text


def test_an_operator_creates_and_changes_a_billing_entity(operator: Client) -> None:
    assert "is not a VAT ID of DE" in page(
        operator, "/operator/entities/new", 422, slug="muehle", **SELLER | {"vat_id": "DE123456789"}
    )
    assert "valid IBAN" in page(operator, "/operator/entities/new", 422, slug="muehle", **SELLER | {"iban": "DE00"})
    page(operator, "/operator/entities/new", 303, slug="muehle", **SELLER)
    (row,) = unscoped(BillingEntity).filter(slug="muehle")
    assert (row.country, row.iban, row.tax_currency, row.terms_days) == ("DE", "DE75512108001245126199", "EUR", 30)
    assert (row.suspend_after_days, row.max_rate_age_days, row.relief_after_claim) == (None, 5, True)
    assert row.reminder_days == [3, 10]
    assert "already exists" in page(operator, "/operator/entities/new", 422, slug="muehle", **SELLER)
    for days, text in (
        ("1, soon", "days from 1 to 365"),
        ("0", "days from 1"),
        ("1 2 3 4 5 6 7 8 9 10 11", "at most 10"),
    ):
        fields = SELLER | {"reminder_days": days}
        assert text in page(operator, "/operator/entities/new", 422, slug="other", **fields), days
    path = f"/operator/entities/{row.pk}"
    shown = page(operator, f"{path}/")
    assert "Mia Mühl, +49 30 901820" in shown and "Owed until it is claimed" in shown
    assert "3, 10 days past due" in shown and "10, 3" not in shown
    assert 'value="3, 10"' in page(operator, f"{path}/edit")
    assert "Lindenstraße 14" in shown and "Please transfer<br>the amount." in shown
    page(operator, f"{path}/edit", 303, **SELLER | {"name": "Mühle AG", "suspend_after_days": "45"})
    (row,) = unscoped(BillingEntity).filter(slug="muehle")
    assert (row.name, row.suspend_after_days) == ("Mühle AG", 45)
    assert "Mühle AG" in page(operator, "/operator/entities/")
    actions = [entry.action for entry in unscoped(AuditEntry).filter(action__startswith="billing_entity")]
    assert sorted(actions) == ["billing_entity.created", "billing_entity.updated"]


def test_an_operator_adds_a_tax_rule(operator: Client) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        entity = default_entity()
    path = f"/operator/entities/{entity.pk}/tax-rules/new"
    rule = {"country": "de", "category": "S", "rate": "19", "label": "USt.", "starts_on": "2026-01-01", "buyer": ""}
    assert "must be positive" in page(operator, path, 422, **rule | {"rate": "0"})
    page(operator, path, 303, **rule)
    (stored,) = unscoped(TaxRule).all()
    assert (stored.country, stored.rate_ppm, stored.label, stored.starts_on) == (
        "DE",
        190_000,
        "USt.",
        date(2026, 1, 1),
    )
    assert "same buyers" in page(operator, path, 422, **rule)
    assert "19 %" in page(operator, f"/operator/entities/{entity.pk}/")


def test_an_operator_downloads_the_journal(db: None) -> None:
    tenant = make_billed_acme()
    operator, owner = signed_in("op"), signed_in("owner")
    make_months()
    use(tenant, OCTOBER, (price("10", model="journal"), 10**6))
    invoice = invoiced(tenant, OCTOBER)
    with all_tenants_scope(BypassReason.COMMAND):
        entity = default_entity()
        ensure_periods(entity, datetime(2026, 11, 2, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC))
    path, month = f"/operator/entities/{entity.pk}", "2026-11"
    journal = page(operator, f"{path}/panels/journal?month={month}")
    assert "Receivables" in journal and "/journal/datev" not in journal
    response = operator.get(f"{path}/journal/datev?month={month}", follow=True)
    assert "has no chart of accounts" in unescape(response.content.decode())
    wrong = page(operator, f"{path}/accounts", 422, **CHART_FORM | {"content": CHART.replace("1200", "")})
    assert "accounts.csv, line 3: The account number of cash is missing" in wrong
    assert not unscoped(ChartOfAccounts).exists()
    page(operator, f"{path}/accounts", 303, **CHART_FORM)
    assert "revenue,S,19,8400,,yes" in page(operator, f"{path}/accounts")
    assert "/journal/datev" in page(operator, f"{path}/panels/journal?month={month}")
    content = operator.get(f"{path}/journal/datev?month={month}")
    assert content.headers["Content-Disposition"].startswith('attachment; filename="EXTF_')
    assert invoice.number in {row["Belegfeld 1"] for row in read_datev(read_download(content))[1]}
    assert str(invoice.number) in read_download(operator.get(f"{path}/journal/csv?month={month}")).decode()
    assert operator.get(f"{path}/journal/xml").status_code == 404
    for closed in (f"{path}/", f"{path}/journal/csv", f"{path}/accounts", "/operator/entities/"):
        assert owner.get(closed).status_code == 404


def test_an_operator_records_a_payment_of_a_tenant(db: None) -> None:
    tenant = make_billed_acme()
    operator = signed_in("op")
    path = f"/operator/billing/tenants/{tenant.slug}/payment"
    fields = {"amount": "25.00", "reference": "W-9", "received_on": "2026-01-02", "typed": tenant.slug}
    page(operator, path, 303, currency="USD", as_credit="on", **fields)
    page(operator, path, 303, currency="USD", as_credit="on", **fields)  # a reference is recorded once
    (payment,) = unscoped(Payment).filter(reference="W-9")
    assert (payment.cents, payment.currency) == (2500, "USD")
    assert len(unscoped(CreditGrant).filter(payment=payment)) == 1
    assert "is billed in USD" in page(operator, path, 422, currency="EUR", **fields | {"reference": "W-10"})
