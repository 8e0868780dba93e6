"""Statements of account and receipts of payments, compared with the ledger."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pypdf
import pytest
from django.db.models import Sum
from django.test import Client

from billing.accounting.statements import ACCOUNTS, Statement, statement_as_csv
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void, do_write_off
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.statements import find_account, statement_as_pdf, statement_of
from billing.models import Invoice, LedgerEntry, Payment
from billing.payments.receipts import Receipt, read_receipt, receipt_as_pdf
from billing.payments.recording import Received, do_record_payment
from tenants.actions import do_add_member, do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User
from tests.support.billing.booking_times import booked_at
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.billing.clocks import REQUESTED_AT
from tests.support.billing.invoice_forms import furnish
from tests.support.billing.prepaid_credit import MULTI, change_entity
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION, CENT = 10**6, 10**7
FIRST, LAST = date(2026, 11, 1), date(2027, 1, 31)


def at(month: int, day: int) -> datetime:
    return datetime(2026, month, day, 12, tzinfo=UTC)


def bill(tenant: Tenant, dollars: str, month: datetime = OCTOBER) -> Invoice:
    use(tenant, month, (price(dollars, model=f"m-{tenant.slug}-{month.month}"), MILLION))
    return invoiced(tenant, month)


def pay(reference: str, cents: int, received_at: datetime = REQUESTED_AT, **fields: Any) -> Payment:
    return do_record_payment(Received("manual", reference, cents, received_at, **fields))[0]


@pytest.fixture
def busy(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> list[Invoice]:
    """Two invoices of 119.00 and 59.50: paid, credited, debited, voided, written off and recovered; and credit."""
    furnish(acme, "S", 190_000)
    change_entity(voucher_type=MULTI)
    first, second = bill(acme, "100"), bill(acme, "50", NOVEMBER)
    with booked_at(monkeypatch, at(11, 20)):
        pay("w-1", 2_000, at(11, 18), invoice=first.number)
        do_issue_credit_note(first, [("SLA", 1_000)], "SLA")
    with booked_at(monkeypatch, at(12, 5)):
        do_issue_debit_note(first, [("Support", 500)], "Support")
        do_void(second, "Wrong address", at(12, 5))
        do_write_off(first, "Insolvent")
    with booked_at(monkeypatch, at(12, 20)):
        pay("w-2", 10_000, tenant="acme")
        pay("w-3", 5_000, tenant="acme", as_credit=True)
        pay("w-2-back", -1_000, tenant="acme")
    with booked_at(monkeypatch, at(12, 28)):
        pay("w-4", 700, tenant="acme")
    return [first, second]


def statement(tenant: Tenant, first: date = FIRST, last: date = LAST) -> Statement:
    account = find_account(tenant)
    with tenant_scope(tenant):
        return statement_of(account, first, last, REQUESTED_AT)


def texts_of(pdf: bytes) -> str:
    return "\n".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(pdf)).pages)


def test_a_statement_has_each_document_and_payment_with_its_balance(acme, busy):
    found = statement(acme)
    first, second = busy
    shown = [(line.on, line.line_type, line.number, line.details, line.amount, line.balance) for line in found.lines]
    assert (found.opening, found.currency) == (0, "USD")
    assert shown == [
        (date(2026, 11, 1), "invoice", first.number, "", 11_900, 11_900),
        (date(2026, 11, 20), "payment", "w-1", "received 2026-11-18", -2_000, 9_900),
        (date(2026, 11, 20), "credit_note", "CN-2026-000001", first.number, -1_190, 8_710),
        (date(2026, 12, 1), "invoice", second.number, "", 5_950, 14_660),
        (date(2026, 12, 5), "debit_note", "INV-2026-000003", first.number, 595, 15_255),
        (date(2026, 12, 5), "cancellation", "CN-2026-000002", second.number, -5_950, 9_305),
        (date(2026, 12, 5), "write_off", "", first.number, -8_710, 595),
        (date(2026, 12, 20), "payment", "w-2", "received 2027-06-01", -10_000, -9_405),
        (date(2026, 12, 20), "write_off_reversed", "", first.number, 8_710, -695),
        (date(2026, 12, 20), "payment", "w-3", "received 2027-06-01", -5_000, -5_695),
        (date(2026, 12, 20), "purchase", "INV-2026-000004", "", 5_000, -695),
        (date(2026, 12, 20), "refund", "w-2-back", "received 2027-06-01", 1_000, 305),
        (date(2026, 12, 20), "credit_note", "CN-2026-000003", "INV-2026-000004", -305, 0),  # credit is taken back
        (date(2026, 12, 28), "payment", "w-4", "received 2027-06-01", -700, -700),
    ]
    assert found.closing == -700
    assert found.charged - found.paid == found.closing


def test_every_closing_balance_is_that_of_the_ledger_and_opens_the_next_days(acme, busy):
    with all_tenants_scope(BypassReason.BILLING):
        entries = LedgerEntry.objects.all_tenants().filter(tenant=acme, account__in=ACCOUNTS)
        booked = int(entries.aggregate(sum=Sum("nano"))["sum"]) // CENT
    whole = statement(acme)
    assert whole.closing == booked
    lines = []
    before = 0
    for number in range((LAST - FIRST).days + 1):
        day = FIRST + timedelta(days=number)
        found = statement(acme, day, day)
        assert found.opening == before
        before = found.closing
        lines += found.lines
    assert (tuple(lines), before) == (whole.lines, whole.closing)


def test_a_document_that_prepaid_credit_paid_is_listed(acme):
    change_entity(voucher_type=MULTI)
    pay("w-1", 10_000, tenant="acme")
    do_sell_credit(acme, 10_000 * CENT, starts_at=OCTOBER)
    invoice = bill(acme, "40")
    found = statement(acme, last=date(2027, 6, 1))
    assert ("invoice", invoice.number, 0) in [(line.line_type, line.number, line.amount) for line in found.lines]
    assert (found.charged, found.paid, found.closing) == (10_000, 10_000, 0)


def test_wrong_days_are_refused(acme, busy):
    for first, last, field, code in (
        (LAST, FIRST, "to", "reversed"),
        (FIRST, date(2027, 6, 2), "to", "future"),
        (date(2026, 9, 1), date(2026, 10, 31), "to", "before_documents"),
    ):
        with pytest.raises(FieldRefused) as refused:
            statement(acme, first, last)
        assert (refused.value.field, refused.value.code) == (field, code)


def test_a_statement_as_csv_and_pdf(acme, busy):
    found = statement(acme)
    rows = list(csv.DictReader(io.StringIO(statement_as_csv(found))))
    assert [row["type"] for row in rows[::15]] == ["opening_balance", "closing_balance"]
    assert [row["balance"] for row in rows] == [
        f"{cents / 100:.2f}" for cents in (0, *(line.balance for line in found.lines), -700)
    ]
    account = find_account(acme)
    made = statement_as_pdf(account, found)
    assert made == statement_as_pdf(account, found)
    text = texts_of(made)
    assert all(line.number in text for line in found.lines)
    assert "Northgate Inference B.V." in text and "Closing balance" in text and "$119.00" in text


def test_the_api_returns_statements_of_the_tenant_only(acme, busy, today):
    other = do_create_tenant("other", "Other")
    operator, owner = by_person(User.objects.create_superuser("op@example.com")), by_role(acme, "owner")
    days = {"from": "2026-11-01", "to": "2027-01-31"}
    found = owner.get("/api/billing/statement", days)
    assert (found.status_code, found.json()["opening"], len(found.json()["lines"])) == (200, 0, 14)
    assert found.json()["lines"][1]["payment_id"] == unscoped(Payment).get(reference="w-1").pk
    table = owner.get("/api/billing/statement/csv", days)
    assert table["content-disposition"] == 'attachment; filename="statement-acme-2026-11-01-2027-01-31.csv"'
    assert len(table.content.splitlines()) == 17
    assert owner.get("/api/billing/statement/pdf", days).content.startswith(b"%PDF-")
    stranger = by_role(other, "owner")
    empty = stranger.get("/api/billing/statement")
    assert (empty.json()["tenant"], empty.json()["lines"], empty.json()["first"]) == ("other", [], "2027-01-01")
    assert stranger.get("/api/billing/statement", {"tenant": "acme"}).status_code in (403, 404)
    url = f"/api/operator/tenants/{acme.pk}/statement"
    assert operator.get(url, days).json() == found.json()
    assert operator.get(f"{url}/csv", days).content == table.content
    assert operator.get(f"{url}/pdf", days).content.startswith(b"%PDF-")
    assert [owner.get(f"{url}{end}").status_code for end in ("", "/csv", "/pdf")] == [404, 404, 404]
    for wrong in ({"from": "2027-01-01", "to": "2026-01-01"}, {"to": "2027-06-02"}, {"to": "2026-10-01"}):
        for path in ("", "/csv", "/pdf"):
            assert owner.get(f"/api/billing/statement{path}", wrong).status_code == 400
            assert operator.get(f"{url}{path}", wrong).status_code == 400
    for wrong in ({"from": "soon"}, {"from": "0001-01-01"}, {"to": "9999-12-31"}, {"until": "2026-11-01"}):
        assert owner.get("/api/billing/statement", wrong).status_code == 400
    assert by_role(acme, "developer").get("/api/billing/statement").status_code == 403


# Receipts


def receipt(payment: Payment) -> Receipt:
    with tenant_scope(payment.tenant_id):
        return read_receipt(payment)


def paid(payment: Payment) -> tuple[dict[str, int], int]:
    """Return the cents by invoice that a receipt names, and the rest."""
    found = receipt(payment)
    return {str(item.invoice.number): item.cents for item in found.paid}, found.rest


@pytest.mark.django_db(transaction=True)
def test_a_receipt_names_what_a_payment_paid_when_it_was_recorded(acme):
    first, second = bill(acme, "100"), bill(acme, "50", NOVEMBER)
    payment = pay("w-1", 18_000, tenant="acme")
    assert paid(payment) == ({first.number: 10_000, second.number: 5_000}, 3_000)
    part = pay("w-2", 100, tenant="acme")
    third = bill(acme, "20", datetime(2026, 12, 5, tzinfo=UTC))
    assert unscoped(Invoice).get(pk=third.pk).state == "paid"  # by the rest of both
    assert paid(payment) == ({first.number: 10_000, second.number: 5_000}, 3_000)
    assert paid(part) == ({}, 100)
    back = pay("w-1-back", -10_500, tenant="acme", invoice=first.number)
    assert paid(back) == ({first.number: -9_400}, -1_100)


def test_payments_of_one_transaction_have_receipts_of_their_own(acme):
    first, second = bill(acme, "100"), bill(acme, "50", NOVEMBER)
    payments = [pay("w-1", 10_000, tenant="acme"), pay("w-2", 3_000, tenant="acme"), pay("w-3", 2_000, tenant="acme")]
    assert [paid(payment) for payment in payments] == [
        ({first.number: 10_000}, 0),
        ({second.number: 3_000}, 0),
        ({second.number: 2_000}, 0),
    ]


def test_a_receipt_as_pdf(acme, busy):
    account = find_account(acme)
    payment, refund = unscoped(Payment).get(reference="w-1"), unscoped(Payment).get(reference="w-2-back")
    made = receipt_as_pdf(account, receipt(payment))
    assert made == receipt_as_pdf(account, receipt(payment))
    text = texts_of(made)
    assert f"Payment receipt {payment.pk}" in text and "18 November 2026" in text and "w-1" in text
    assert f"Invoice {busy[0].number}" in text and "$20.00" in text
    text = texts_of(receipt_as_pdf(account, receipt(refund)))
    assert f"Refund receipt {refund.pk}" in text and "$10.00" in text and "w-2-back" in text


def test_receipts_are_those_of_the_tenant_only(acme, busy, today):
    other = do_create_tenant("other", "Other")
    operator, owner = by_person(User.objects.create_superuser("op@example.com")), by_role(acme, "owner")
    payment = unscoped(Payment).get(reference="w-1")
    url = f"/api/payments/{payment.pk}"
    assert owner.get(url).json()["paid"] == [{"invoice": busy[0].number, "invoice_id": busy[0].pk, "cents": 2_000}]
    assert owner.get(url).json()["rest_cents"] == 0
    response = owner.get(f"{url}/receipt")
    assert (response["content-type"], response.content[:5]) == ("application/pdf", b"%PDF-")
    stranger = by_role(other, "owner")
    assert [stranger.get(path).status_code for path in (url, f"{url}/receipt")] == [404, 404]
    assert by_role(acme, "developer").get(f"{url}/receipt").status_code == 403
    assert operator.get(f"/api/operator/payments/{payment.pk}/receipt").content.startswith(b"%PDF-")
    assert operator.get("/api/operator/payments/0/receipt").status_code == 404
    assert owner.get(f"/api/operator/payments/{payment.pk}/receipt").status_code == 404


# Console


@pytest.fixture
def browsers(acme: Tenant, busy: list[Invoice], today: None) -> tuple[Client, Client]:
    """Return the browsers of an owner and of an operator."""
    owner, operator = Client(), Client()
    person = User.objects.create_user("owner@example.com")
    do_add_member(acme, person, "owner")
    owner.force_login(person)
    operator.force_login(User.objects.create_superuser("op@example.com"))
    return owner, operator


def test_the_pages_of_statements_and_receipts(acme, busy, browsers):
    payment = unscoped(Payment).get(reference="w-1")
    own, all_of = f"/t/{acme.slug}/invoices", "/operator/billing"
    days = "?from=2026-11-01&to=2027-01-31"
    for browser, path, receipts in (
        (browsers[0], f"{own}/statement", f"{own}/payments"),
        (browsers[1], f"{all_of}/tenants/{acme.slug}/statement", f"{all_of}/payments"),
    ):
        page = browser.get(f"{path}{days}").content.decode()
        assert "CN-2026-000002" in page and f"{receipts}/{payment.pk}/receipt" in page
        assert f"{path}/csv?from=2026-11-01&amp;to=2027-01-31" in page
        assert browser.get(f"{path}/csv{days}").content == browsers[0].get(f"{own}/statement/csv{days}").content
        assert browser.get(f"{path}/pdf{days}").content.startswith(b"%PDF-")
        assert browser.get(f"{receipts}/{payment.pk}/receipt").content.startswith(b"%PDF-")
        assert browser.get(f"{receipts}/0/receipt").status_code == 404
        assert browser.get(f"{path}/xml{days}").status_code == 404
        for wrong, text in (("from=soon", "Enter both dates"), ("from=2027-05-01&to=2027-04-01", "The last day is")):
            assert text in browser.get(f"{path}?{wrong}").content.decode()
            assert browser.get(f"{path}/csv?{wrong}").status_code == 303
    stranger = do_create_tenant("other", "Other")
    do_add_member(stranger, User.objects.get(email="owner@example.com"), "owner")
    assert browsers[0].get(f"/t/other/invoices/payments/{payment.pk}/receipt").status_code == 404
    assert browsers[0].get(f"{all_of}/payments/{payment.pk}/receipt").status_code == 404
