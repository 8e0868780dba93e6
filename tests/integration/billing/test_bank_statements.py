"""Payments of bank statements and CSV files: matched with invoices, booked once, all or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from billing.ledger.matching import sum_outstanding
from billing.models import BankEntry, BankStatement, CreditGrant, Invoice, Payment
from billing.payments import bank_files
from billing.payments.bank_files import PaymentImport, do_assign_entry, do_dismiss_entry, do_import_payments
from billing.payments.file_drop import collect
from tenants.actions import ActionRefused, Conflict, do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.billing.bank_statements import (
    IBAN,
    account_of_default_entity,
    details,
    document,
    entry,
    statement,
    stmt,
)
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import at_once
from tests.support.tenants.management_api import by_key, by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
FILE = "statement.xml"


@pytest.fixture(autouse=True)
def account(db: None) -> None:
    account_of_default_entity()


@pytest.fixture
def invoice(acme: Tenant) -> Invoice:
    return bill(acme, "2")


def bill(tenant: Tenant, amount: str, month: Any = OCTOBER) -> Invoice:
    use(tenant, month, (price(amount, model=f"{tenant.slug}-{month.month}"), MILLION))
    return invoiced(tenant, month)


def state(invoice: Invoice) -> tuple[str, int]:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().get(pk=invoice.pk)
        return row.state, sum_outstanding(row)


def counts(found: PaymentImport) -> tuple[int, ...]:
    return found.statements, found.known_statements, found.booked, found.known, found.open


def entries() -> list[BankEntry]:
    return list(unscoped(BankEntry).order_by("pk"))


@pytest.mark.parametrize("version", ["02", "08"])
def test_a_credit_pays_the_invoice_that_it_names(acme, invoice, version):
    content = statement(entry("2.00", f"Thanks for {invoice.number}", payer="Acme GmbH"), version=version)
    assert counts(do_import_payments(FILE, content)) == (1, 0, 1, 0, 0)
    assert state(invoice) == ("paid", 0)
    payment = unscoped(Payment).get()
    assert (payment.provider, payment.reference, payment.cents) == ("bank", f"{IBAN} S-1/7/1", 200)
    assert (payment.invoice_id, payment.note) == (invoice.pk, f"Acme GmbH: Thanks for {invoice.number}")
    (row,) = entries()
    assert (row.state, row.payment_id) == ("booked", payment.pk)


@pytest.mark.parametrize(
    "write",
    [
        lambda number: {"creditor": "RF45" + number.replace("-", "")},
        lambda number: {"creditor": number},
        lambda number: {"texts": [f"inv. {number[4:8]} / {number[9:]}, thank you"]},
        lambda number: {"texts": [f"SVWZ+{number[:10]}", number[10:]]},
    ],
)
def test_numbers_are_found_as_payers_write_them(acme, invoice, write):
    written = write(str(invoice.number))
    content = statement(entry("2.00", *written.get("texts", ()), creditor=written.get("creditor", "")))
    assert do_import_payments(FILE, content).booked == 1
    assert state(invoice) == ("paid", 0)


@pytest.mark.parametrize(
    "write", [lambda number: f"X{number}", lambda number: f"{number}9", lambda number: number[:-1]]
)
def test_other_numbers_are_not_taken_for_an_invoice(acme, invoice, write):
    found = do_import_payments(FILE, statement(entry("2.00", write(str(invoice.number)))))
    assert (found.booked, found.open) == (0, 1)
    assert state(invoice) == ("open", 200)


def test_a_statement_is_imported_once(acme, invoice):
    content = statement(entry("1.00", str(invoice.number), reference="B-1"), entry("5.00", "unknown"))
    assert counts(do_import_payments(FILE, content)) == (1, 0, 1, 0, 1)
    assert counts(do_import_payments("again.xml", content)) == (0, 1, 0, 0, 0)
    assert (unscoped(Payment).count(), unscoped(BankStatement).count()) == (1, 1)
    month = document(
        stmt(entry("1.00", str(invoice.number), reference="B-1"), statement_id="M-11"),
        stmt(entry("0.50", str(invoice.number), reference="B-2"), statement_id="S-2"),
    )
    assert counts(do_import_payments("month.xml", month)) == (2, 0, 1, 1, 0)  # B-1 is on a daily statement, too
    assert state(invoice) == ("open", 50)


def test_a_known_statement_with_other_content_is_refused(acme, invoice):
    do_import_payments(FILE, statement(entry("1.00")))
    with pytest.raises(FieldRefused, match=r"b\.xml, line 4: The statement S-1 was imported from statement\.xml with"):
        do_import_payments("b.xml", statement(entry("2.00")))


def test_a_reference_that_a_bank_uses_again_is_another_payment(acme):
    do_import_payments(FILE, statement(entry("1.00", reference="B-1")))
    assert do_import_payments(FILE, statement(entry("2.00", reference="B-1"), statement_id="S-2")).open == 1
    assert [row.reference for row in entries()] == [f"{IBAN} B-1", f"{IBAN} S-2/7/1"]


def test_a_bad_file_books_nothing(acme, invoice):
    good = stmt(entry("2.00", str(invoice.number)))
    bad = {
        "a total": stmt(entry("1.00"), statement_id="S-2", closing="5.00"),
        "an account": stmt(entry("1.00"), statement_id="S-2", iban="NL91ABNA0417164300"),
        "a currency": stmt(entry("1.00"), statement_id="S-2", currency="ZZZ"),
        "twice": good,
    }
    for name, second in bad.items():
        with pytest.raises(FieldRefused, match=r"^statement\.xml, line 1\d: "):
            do_import_payments(FILE, document(good, second))
        assert not unscoped(Payment).exists(), name
        assert not unscoped(BankStatement).exists(), name
    assert state(invoice) == ("open", 200)
    with pytest.raises(FieldRefused, match="No billing entity has the account NL91ABNA0417164300"):
        do_import_payments(FILE, document(bad["an account"]))


def test_a_batch_pays_invoices_of_several_tenants(acme, invoice):
    other = bill(do_create_tenant("other", "Other"), "3", NOVEMBER)
    parts = [details(str(row.number), amount=amount) for row, amount in ((invoice, "2.00"), (other, "3.00"))]
    assert do_import_payments(FILE, statement(entry("5.00", parts=parts), version="08")).booked == 2
    assert (state(invoice), state(other)) == (("paid", 0), ("paid", 0))
    both = statement(entry("5.00", f"{invoice.number} {other.number}"), statement_id="S-2")
    assert do_import_payments(FILE, both).open == 1
    assert entries()[-1].problem == "The payment names invoices of several tenants."


def test_a_returned_payment_is_a_refund(acme, invoice):
    number = str(invoice.number)
    do_import_payments(FILE, statement(entry("2.00", number)))
    back = statement(entry("2.00", number, direction="DBIT", reversal=True), statement_id="S-2")
    assert do_import_payments(FILE, back).booked == 1
    assert state(invoice) == ("open", 200)


def test_what_cannot_be_booked_stays_open(acme, invoice):
    number = str(invoice.number)
    back = statement(entry("2.00", number, direction="DBIT", reversal=True))
    assert do_import_payments(FILE, back).open == 1
    assert "exceeds the tenant’s payments" in entries()[0].problem
    euros = statement(entry("2.00", number, currency="EUR"), statement_id="S-2", currency="EUR")
    assert do_import_payments(FILE, euros).open == 1
    assert "is billed in USD" in entries()[1].problem


def test_an_open_payment_is_assigned_or_dismissed(acme, invoice):
    do_import_payments(FILE, statement(entry("2.00", "Thanks"), entry("3.00"), entry("4.00")))
    first, second, third = entries()
    for wrong in ({}, {"tenant": "unknown"}, {"invoice": "INV-1"}):
        with pytest.raises(ActionRefused):
            do_assign_entry(first, **wrong)
    assert do_assign_entry(first, invoice=str(invoice.number)).payment.cents == 200
    assert state(invoice) == ("paid", 0)
    do_assign_entry(second, tenant="acme", as_credit=True)
    assert unscoped(CreditGrant).get().nano == 3 * 10**9
    assert do_dismiss_entry(third).state == "dismissed"
    for row in (first, second, third):
        with pytest.raises(Conflict, match="already assigned or dismissed"):
            do_assign_entry(row, tenant="acme")
        with pytest.raises(Conflict, match="already assigned or dismissed"):
            do_dismiss_entry(row)
    actions = unscoped(AuditEntry).filter(action__startswith="bank_")
    wanted = ["bank_statement.imported", "bank_entry.assigned", "bank_entry.assigned", "bank_entry.dismissed"]
    assert [row.action for row in sorted(actions, key=lambda row: row.pk)] == wanted


def test_a_repeated_import_records_what_a_killed_one_left(acme, invoice, monkeypatch):
    content = statement(entry("0.50", str(invoice.number)), entry("1.50", str(invoice.number)))
    book, calls = bank_files._book, []

    def die_at_the_second(pk: int, found: PaymentImport) -> None:
        calls.append(pk)
        if len(calls) == 2:
            raise KeyboardInterrupt
        book(pk, found)

    monkeypatch.setattr(bank_files, "_book", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        do_import_payments(FILE, content)
    monkeypatch.undo()
    assert state(invoice) == ("open", 150)
    assert counts(do_import_payments(FILE, content)) == (0, 1, 1, 0, 0)
    assert state(invoice) == ("paid", 0)


@pytest.mark.django_db(transaction=True)
def test_concurrent_imports_book_once(acme, invoice):
    content = statement(*(entry("0.10", str(invoice.number)) for _ in range(5)))
    at_once(*[lambda: do_import_payments(FILE, content)] * 4)
    assert (unscoped(Payment).count(), state(invoice)) == (5, ("open", 150))


def test_a_csv_file_is_imported_as_a_whole(acme, invoice):
    rows = f"a,1.50,2026-11-12,{invoice.number},\nb,0.50,2026-11-12,,acme\n"
    heading = "reference,amount,received_on,invoice,tenant\n"
    with pytest.raises(FieldRefused, match=r"^payments\.csv, line 4: Payment c has no known tenant"):
        do_import_payments("payments.csv", f"{heading}{rows}c,1,2026-11-12,,unknown\n")
    with pytest.raises(FieldRefused, match=r"^payments\.csv, line 2: '1\.505' is no amount"):
        do_import_payments("payments.csv", f"{heading}a,1.505,2026-11-12,,acme\n")
    with pytest.raises(FieldRefused, match="The file has no payment"):
        do_import_payments("payments.csv", heading)
    assert not unscoped(Payment).exists()
    assert do_import_payments("payments.csv", (heading + rows).encode()).booked == 2
    found = do_import_payments("again.csv", heading + rows)
    assert (found.file_type, found.booked, found.known) == ("csv", 0, 2)
    assert state(invoice) == ("paid", 0)


def test_files_of_the_directory(acme, invoice, tmp_path):
    (tmp_path / "a.xml").write_bytes(statement(entry("2.00", str(invoice.number))))
    (tmp_path / "b.xml").write_bytes(statement(entry("2.00"), statement_id="S-2", closing="7"))
    assert collect(tmp_path) == 1
    assert state(invoice) == ("paid", 0)
    assert (tmp_path / "done" / "a.xml").exists()
    assert (tmp_path / "failed" / "b.xml.txt").read_text().startswith("b.xml, line 4: The opening balance")
    (tmp_path / "c.xml").write_bytes(b" " * 5_000_001)
    assert collect(tmp_path) == 0
    assert "larger than 5 MB" in (tmp_path / "failed" / "c.xml.txt").read_text()


def test_the_api(acme, invoice):
    client, url = by_person(User.objects.create_superuser("one@op.example")), "/api/operator/payments/import"
    content = statement(entry("2.00", str(invoice.number)), entry("1.00", "Grüße", payer="B"), version="08").decode()
    found = client.post(url, {"file_name": FILE, "content": content}, format="json")
    assert found.status_code == 200, found.json()
    assert found.json() == {
        "file_type": "camt.053",
        **dict.fromkeys(("known_statements", "known", "others", "pending"), 0),
        **dict.fromkeys(("statements", "booked", "open"), 1),
    }
    refused = client.post(url, {"file_name": FILE, "content": content[:-30]}, format="json")
    assert refused.status_code == 400
    assert "statement.xml, line" in refused.json()["errors"]["content"][0]
    (shown,) = client.get("/api/operator/bank-statements").json()["results"]
    assert (shown["account"], shown["opening"], shown["closing"]) == (IBAN, 10_000, 10_300)
    (waiting,) = client.get("/api/operator/bank-entries?state=open").json()["results"]
    assert (waiting["cents"], waiting["currency"], waiting["payer"]) == (100, "USD", "B")
    assert (waiting["remittance"], waiting["problem"]) == ("Grüße", "The payment names no invoice.")
    place = f"/api/operator/bank-entries/{waiting['id']}"
    assert client.post(f"{place}/assign", {}, format="json").status_code == 400
    assert client.post(f"{place}/assign", {"tenant": "acme"}, format="json").json()["state"] == "booked"
    assert client.post(f"{place}/dismiss", format="json").status_code == 409
    assert client.post("/api/operator/bank-entries/999999/dismiss", format="json").status_code == 404
    assert by_key(acme).get("/api/operator/bank-entries").status_code in (403, 404)


def test_tenants_see_no_bank_statements(acme, invoice):
    do_import_payments(FILE, statement(entry("2.00", str(invoice.number))))
    with connection.cursor() as cursor:
        for table in ("billing_bankstatement", "billing_bankentry"):
            cursor.execute("SELECT has_table_privilege('millrace_app', %s, 'SELECT')", [table])
            assert cursor.fetchone() == (False,)
