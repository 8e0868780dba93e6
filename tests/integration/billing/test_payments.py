"""Payments: matched with invoices and booked once, however often a provider repeats them; and refunds."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.ledger.credits import applied_credit
from billing.ledger.ledger import PostedEntry, balance, post
from billing.ledger.matching import sum_outstanding
from billing.models import Account, CreditGrant, Invoice, LedgerEntry, LedgerTransaction, Payment
from billing.payments import Unreadable, cents
from billing.payments.file_drop import collect
from billing.payments.file_errors import FileRefused
from billing.payments.payment_csv import read_payments
from billing.payments.recording import Received, do_record_payment
from tenants.actions import Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION, CENT = 10**6, 10**7


def bill(tenant: Tenant, month: datetime, amount: str) -> Invoice:
    use(tenant, month, (price(amount, model=f"m{month.month}"), MILLION))
    return invoiced(tenant, month)


def pay(cents: int, reference: str = "p1", **fields):
    return do_record_payment(Received("manual", reference, cents, NOVEMBER, **fields))


def state(invoice: Invoice) -> tuple[str, int]:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().get(pk=invoice.pk)
        return row.state, sum_outstanding(row)


def on(account: Account, tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, account)


def test_a_payment_pays_an_invoice(acme):
    first, second = bill(acme, OCTOBER, "2"), bill(acme, NOVEMBER, "3")
    pay(350, tenant="acme")
    assert (state(first), state(second)) == (("paid", 0), ("open", 150))
    pay(150, "p2", invoice=second.number)
    assert state(second) == ("paid", 0)
    assert (on(Account.CASH, acme), on(Account.DEPOSITS, acme)) == (500 * CENT, 0)


def test_the_named_invoice_is_paid_first(acme):
    first, second = bill(acme, OCTOBER, "2"), bill(acme, NOVEMBER, "3")
    pay(350, invoice=second.number)
    assert (state(first), state(second)) == (("open", 150), ("paid", 0))


def test_a_repeated_payment_is_booked_once(acme):
    (first, new), (second, again) = pay(100, tenant="acme"), pay(100, tenant="acme")
    assert (first.pk, new, again) == (second.pk, True, False)
    assert on(Account.CASH, acme) == 100 * CENT
    with pytest.raises(Conflict, match="another amount"):
        pay(101, tenant="acme")


def test_an_overpayment_pays_the_next_invoice(acme):
    bill(acme, OCTOBER, "2")
    pay(250, tenant="acme")
    assert state(bill(acme, NOVEMBER, "3")) == ("open", 250)


def test_a_payment_can_buy_credit(acme):
    pay(200, tenant="acme", as_credit=True)
    assert (on(Account.DEPOSITS, acme), on(Account.CREDITS, acme)) == (0, -200 * CENT)
    assert unscoped(CreditGrant).get().grant_type == "prepaid"


def test_a_refunded_amount_is_due_again(acme):
    invoice = bill(acme, OCTOBER, "2")
    pay(200, invoice=invoice.number)
    pay(-80, "r1", invoice=invoice.number)
    assert state(invoice) == ("open", 80)
    assert on(Account.CASH, acme) == 120 * CENT


def test_a_payment_of_an_unknown_tenant_is_rejected(acme):
    for whose in ({"tenant": "unknown"}, {"invoice": "INV-1"}, {}):
        with pytest.raises(Conflict, match="has no known tenant"):
            pay(1, **whose)
    assert not unscoped(Payment).all()


def test_files(acme, tmp_path):
    invoice = bill(acme, OCTOBER, "2")
    text = (
        f"reference,amount,received_on,invoice,tenant\na,1.50,2026-11-12,{invoice.number},\nb,0.50,2026-11-12,,acme\n"
    )
    (tmp_path / "bank.csv").write_text(text)
    assert collect(tmp_path) == 2
    assert state(invoice) == ("paid", 0)
    assert (tmp_path / "done" / "bank.csv").exists()
    (tmp_path / "again.csv").write_text(text + "c,1,2026-11-12,,unknown\n")
    assert collect(tmp_path) == 0
    assert "has no known tenant" in (tmp_path / "failed" / "again.csv.txt").read_text()
    (tmp_path / "bad.csv").write_text("reference,amount\nx,1.505\n")
    assert collect(tmp_path) == 0
    assert "Missing: received_on" in (tmp_path / "failed" / "bad.csv.txt").read_text()


def test_files_buy_credit_only_if_they_say_so(acme, tmp_path):
    rows = "a,1,2026-11-12,acme,no\nb,2,2026-11-12,acme,yes\n"
    (tmp_path / "bank.csv").write_text("reference,amount,received_on,tenant,credit\n" + rows)
    assert collect(tmp_path) == 2
    assert unscoped(CreditGrant).get().nano == 200 * CENT
    (tmp_path / "bad.csv").write_text("reference,amount,received_on,tenant,credit\nc,1,2026-11-12,acme,maybe\n")
    assert collect(tmp_path) == 0
    assert "'maybe' is neither true nor false" in (tmp_path / "failed" / "bad.csv.txt").read_text()


@pytest.mark.parametrize(("text", "value"), [("1", 100), ("0.1", 10), ("-12.34", -1234), (" 5.00 ", 500)])
def test_amounts(text, value):
    assert cents(text) == value


@pytest.mark.parametrize("text", ["", "1.234", "1e3", "1,5", "NaN", "٣", "--1", "1" * 16])
def test_invalid_amounts_are_rejected(text):
    with pytest.raises(Unreadable):
        cents(text)


def test_invalid_csv_files_are_rejected():
    with pytest.raises(FileRefused):
        read_payments(b"\xff\xfe\x00")


@pytest.mark.django_db(transaction=True)
def test_entries_must_sum_to_zero():
    from django.db import IntegrityError

    tenant = do_create_tenant("acme", "Acme")
    with pytest.raises(IntegrityError, match="sum to zero"), all_tenants_scope(BypassReason.BILLING):
        post(tenant.pk, "k", [PostedEntry(Account.CASH, 2), PostedEntry(Account.DEPOSITS, -1)])
    assert not unscoped(LedgerTransaction).all()


@pytest.mark.django_db(transaction=True)
def test_a_booked_transaction_accepts_no_more_entries():
    from django.db import IntegrityError

    tenant = do_create_tenant("acme", "Acme")
    with all_tenants_scope(BypassReason.BILLING):
        post(tenant.pk, "k", [PostedEntry(Account.CASH, 1), PostedEntry(Account.DEPOSITS, -1)])
    (done,) = unscoped(LedgerTransaction).all()
    with pytest.raises(IntegrityError, match="is complete"), all_tenants_scope(BypassReason.BILLING):
        for nano in (1, -1):
            LedgerEntry.objects.create(transaction=done, tenant_id=tenant.pk, account=Account.CASH, nano=nano)


@given(st.lists(st.integers(0, 10**9), max_size=8), st.integers(0, 500))
def test_credit_application_uses_available_credit_in_order(rests, cents):
    grants = [CreditGrant(nano=rest + 1) for rest in rests]
    for grant, rest in zip(grants, rests, strict=True):
        grant.rest = rest
    parts = applied_credit(grants, cents, "USD")
    assert sum(part for _, part in parts) == min(cents, sum(rest // CENT for rest in rests))
    assert [grant for grant, _ in parts] == [grant for grant in grants if any(grant is other for other, _ in parts)]
    assert all(0 < part * CENT <= grant.rest for grant, part in parts)
    assert all(grant.rest - part * CENT < CENT for grant, part in parts[:-1])


@pytest.mark.parametrize("row", ["x,900000000000000,acme", "y" * 201 + ",1,acme", "z\0,1,acme", "v,1,ac\0me"])
def test_a_row_that_cannot_be_stored_does_not_block_other_files(acme, tmp_path, row):
    reference, amount, tenant = row.split(",")
    content = f"reference,amount,received_on,tenant\n{reference},{amount},2026-11-12,{tenant}\n"
    (tmp_path / "a.csv").write_text(content)
    (tmp_path / "b.csv").write_text("reference,amount,received_on,tenant\nb,1,2026-11-12,acme\n")
    assert collect(tmp_path) == 1
    assert (tmp_path / "failed" / "a.csv.txt").read_text().startswith("line 2: ")
