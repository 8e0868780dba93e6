"""Actions on files of payments: import, assign or dismiss what names no invoice.

A file with an error is refused as a whole. Its format is recognized by its content: a bank statement in the format
camt.053, or a CSV file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection

from billing.models import BankEntry, BankStatement, BillingEntity, Invoice, Payment
from billing.payments.camt import MAX_PAYMENTS, BankPayment, BankStatementFile, is_camt, read_camt
from billing.payments.file_errors import FileRefused
from billing.payments.invoice_numbers import InvoiceNumbers
from billing.payments.payment_csv import read_payments
from billing.payments.recording import Received, do_record_payment
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused, check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

PROVIDER = "bank"
FILE_TYPES = ("camt.053", "csv")
_LOCK = 0x62616E6B  # an arbitrary advisory lock, used only here


@dataclass
class PaymentImport:
    """The result of an import. Its numbers count payments, except those of statements."""

    file_type: str
    statements: int = 0
    known_statements: int = 0  # imported before, also from another file
    booked: int = 0
    known: int = 0  # recorded before
    open: int = 0  # without a known invoice
    others: int = 0  # booked entries of the statements that are no payments
    pending: int = 0  # entries that the bank has not booked


def do_import_payments(file_name: str, content: bytes | str) -> PaymentImport:
    """Record the payments of a file. What was recorded before is skipped, so a file may be repeated.

    The rows of a CSV file are recorded in one transaction. A bank statement is stored in one transaction, and then
    each of its payments is recorded in its own. After a crash, a repeated import records the rest.

    Args:
        content: a text has lost the encoding that it declares.

    Raises:
        FieldRefused: the file is not valid, and nothing of it is recorded. The message names file and line.
    """
    encoding = "utf-8" if isinstance(content, str) else None
    octets = content.removeprefix("\ufeff").encode() if isinstance(content, str) else content
    try:
        if not is_camt(octets):
            return _import_lines(octets)
        found, statements = _store_statements(file_name, read_camt(octets, encoding))
    except FileRefused as exc:
        raise FieldRefused(
            "content",
            "file",
            Text(
                "%(file_name)s, line %(line)s: %(error)s", file_name=file_name, line=str(exc.line), error=text_of(exc)
            ),
        ) from exc
    with all_tenants_scope(BypassReason.BILLING):
        entries = BankEntry.objects.filter(statement__in=statements, state=BankEntry.State.OPEN, problem="")
        waiting = list(entries.order_by("pk").values_list("pk", flat=True))
    for pk in waiting:
        _book(pk, found)
    return found


def _import_lines(content: bytes) -> PaymentImport:
    """Record the payments of a CSV file."""
    found = PaymentImport("csv")
    lines = read_payments(content, MAX_PAYMENTS)
    if not lines:
        raise FileRefused(1, Text("The file has no payment."))
    with all_tenants_scope(BypassReason.BILLING):
        for line, received in lines:
            try:
                is_new = do_record_payment(received)[1]
            except ActionRefused as exc:
                raise FileRefused(line, text_of(exc)) from exc
            found.booked += is_new
            found.known += not is_new
    return found


def _store_statements(file_name: str, statements: list[BankStatementFile]) -> tuple[PaymentImport, list[BankStatement]]:
    """Store the statements of a file with their payments. Return all statements of the file, also known ones."""
    found, rows = PaymentImport("camt.053"), []
    with all_tenants_scope(BypassReason.BILLING):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        for statement in statements:
            entities = list(BillingEntity.objects.filter(iban=statement.account).order_by("pk"))
            if not entities:
                raise FileRefused(
                    statement.line,
                    Text(
                        "No billing entity has the account %(account)s. Enter it as the IBAN of one.",
                        account=statement.account,
                    ),
                )
            row = _find_statement(statement)
            if row is not None:
                found.known_statements += 1
            else:
                row = _store_statement(file_name, statement)
                found.statements += 1
                found.others += statement.others
                found.pending += statement.pending
                numbers = InvoiceNumbers(entities)
                for payment in statement.payments:
                    _store_payment(row, payment, numbers, found)
            rows.append(row)
    return found, rows


def _find_statement(statement: BankStatementFile) -> BankStatement | None:
    """Return a statement that was imported before.

    Raises:
        FileRefused: it had other balances.
    """
    known = BankStatement.objects.filter(
        account=statement.account, statement_id=statement.statement_id, number=statement.number
    ).first()
    balances = statement.currency, statement.opening, statement.closing
    if known is not None and (known.currency, known.opening, known.closing) != balances:
        raise FileRefused(
            statement.line,
            Text(
                "The statement %(statement_id)s was imported from %(file_name)s with other balances.",
                statement_id=str(statement.statement_id),
                file_name=known.file_name,
            ),
        )
    return known


def _store_statement(file_name: str, statement: BankStatementFile) -> BankStatement:
    row = BankStatement(
        account=statement.account,
        statement_id=statement.statement_id,
        number=statement.number,
        currency=statement.currency,
        opening=statement.opening,
        closing=statement.closing,
        closes_on=statement.closes_on,
        others=statement.others,
        pending=statement.pending,
        file_name=file_name,
    )
    check(row)
    row.save(force_insert=True)
    audit.record("bank_statement.imported", row, tenant_id=None, after=audit.serialize_for_audit(row))
    return row


def _store_payment(row: BankStatement, payment: BankPayment, numbers: InvoiceNumbers, found: PaymentImport) -> None:
    """Store a payment of a statement with the invoice that its texts name."""
    known = BankEntry.objects.filter(reference=payment.reference).first()
    if known is not None and (known.cents, known.booked_on) == (payment.cents, payment.booked_on):
        found.known += 1
        return
    entry = BankEntry(
        statement=row,
        line=payment.line,
        reference=payment.reference if known is None else payment.place,
        cents=payment.cents,
        booked_on=payment.booked_on,
        payer=payment.payer,
        remittance=payment.remittance,
        state=BankEntry.State.OPEN,
    )
    invoices = numbers.find_invoices(payment.texts)
    entry.problem = describe_problem(invoices)
    entry.invoice = None if entry.problem else invoices[0]
    check(entry)
    entry.save(force_insert=True)
    found.open += entry.invoice is None


def describe_problem(invoices: Sequence[Invoice]) -> str:
    """Return why a payment that names these invoices belongs to none of them. Empty: it is the first one's."""
    if not invoices:
        return Text("The payment names no invoice.")
    if len({invoice.tenant_id for invoice in invoices}) > 1:
        return Text("The payment names invoices of several tenants.")
    return ""


def _book(pk: int, found: PaymentImport) -> None:
    """Record the payment of an entry for its invoice, unless another process has. The entry keeps a refusal."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = BankEntry.objects.select_for_update(of=("self",), no_key=True)
        entry = rows.select_related("statement", "invoice__tenant").get(pk=pk)
        if entry.state != BankEntry.State.OPEN or entry.problem or entry.invoice is None:
            return
        try:
            entry.payment = _record(entry, entry.invoice.tenant.slug, str(entry.invoice.number))
        except ActionRefused as exc:
            entry.problem = text_of(exc)
            found.open += 1
        else:
            entry.state = BankEntry.State.BOOKED
            found.booked += 1
        entry.save(update_fields=["payment", "state", "problem"])


def _record(entry: BankEntry, tenant: str, invoice: str, *, as_credit: bool = False) -> Payment:
    """Record the payment of an entry of a bank statement."""
    at = datetime.combine(entry.booked_on, datetime.min.time(), UTC)
    note = ": ".join(text for text in (entry.payer, entry.remittance) if text)[:200]
    received = Received(
        PROVIDER,
        entry.reference,
        entry.cents,
        at,
        tenant=tenant,
        invoice=invoice,
        as_credit=as_credit,
        note=note,
        currency=entry.statement.currency,
    )
    return do_record_payment(received)[0]


def do_assign_entry(entry: BankEntry, *, tenant: str = "", invoice: str = "", as_credit: bool = False) -> BankEntry:
    """Record an open entry of a bank statement as the payment of a tenant (its slug) or an invoice (its number).

    Raises:
        ActionRefused: neither is named, or the payment cannot be booked.
        Conflict: it was assigned or dismissed before, or there is no such tenant or invoice.
    """
    if not tenant and not invoice:
        raise ActionRefused(Text("Name a tenant or an invoice."))
    with all_tenants_scope(BypassReason.BILLING):
        row = _lock_open(entry)
        before = audit.serialize_for_audit(row)
        row.payment = _record(row, tenant, invoice, as_credit=as_credit)
        row.state, row.problem = BankEntry.State.BOOKED, ""
        row.save(update_fields=["payment", "state", "problem"])
        after = audit.serialize_for_audit(row)
        audit.record("bank_entry.assigned", row, tenant_id=None, before=before, after=after)
    return row


def do_dismiss_entry(entry: BankEntry) -> BankEntry:
    """Mark an open entry of a bank statement as no payment of a tenant.

    Raises:
        Conflict: it was assigned or dismissed before.
    """
    with all_tenants_scope(BypassReason.BILLING):
        row = _lock_open(entry)
        before = audit.serialize_for_audit(row)
        row.state = BankEntry.State.DISMISSED
        row.save(update_fields=["state"])
        after = audit.serialize_for_audit(row)
        audit.record("bank_entry.dismissed", row, tenant_id=None, before=before, after=after)
    return row


def _lock_open(entry: BankEntry) -> BankEntry:
    rows = BankEntry.objects.select_for_update(of=("self",), no_key=True).select_related("statement")
    row = rows.get(pk=entry.pk)
    if row.state != BankEntry.State.OPEN:
        raise Conflict(Text("This payment was already assigned or dismissed."))
    return row
