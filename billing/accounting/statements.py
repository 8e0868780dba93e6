"""The statement of account of a tenant: opening balance, documents and payments of some days, closing balance.

The balance is what the tenant owes: its open invoices, less the payments that paid no invoice yet. A matching of a
payment with an invoice does not change it and has no line. The days of the lines are those of the ledger.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet, Sum

from billing.accounting.booking_days import (
    DOCUMENT_KEY,
    booked_before,
    end_of,
    require_document,
    require_past,
    start_of,
)
from billing.currencies.amounts import decimal_cents, minor_digits, nano_a_cent
from billing.models import Account, BillingEntity, Invoice, LedgerEntry, LedgerTransaction, Payment
from inference_worker.contract.texts import Text
from tenants import csv_tables
from tenants.actions import ActionRefused
from tenants.actions.common import FieldRefused
from tenants.models import Tenant

MAX_LINES = 5000
ACCOUNTS = (Account.RECEIVABLE, Account.DEPOSITS)

# The types of lines of transactions that book neither a document nor a payment, by the start of their keys.
_TYPES = {"bad-debt": "write_off", "recovery": "write_off_reversed", "void": "void", "grant": "returned_credit"}
_OTHER = "other"
# The names of the types of lines in statements, which are in English like the documents.
LINE_TYPES = {
    "invoice": "Invoice",
    "purchase": "Purchase of credit",
    "debit_note": "Debit note",
    "correction": "Credit note",
    "credit_note": "Credit note",
    "cancellation": "Cancellation",
    "payment": "Payment",
    "refund": "Refund",
    "write_off": "Write-off",
    "write_off_reversed": "Write-off reversed",
    "returned_credit": "Returned as credit",
    "void": "Void",
    _OTHER: "Other",
}


class StatementLine(NamedTuple):
    """A document, a payment or another change of the balance, in the minor unit of the currency.

    `amount` is positive if it increases what the tenant owes. `balance` is the one after it.
    """

    on: date
    line_type: str  # one of LINE_TYPES
    number: str  # the document’s number, or the payment’s reference
    details: str  # the number of the document that it is about; for a payment, when it was received
    amount: int
    balance: int
    invoice_id: int | None  # the document, or the one that it is about
    payment_id: int | None


class Statement(NamedTuple):
    """The changes of a tenant's balance from one day to another, both included."""

    tenant: str  # slug
    currency: str
    first: date
    last: date
    opening: int
    lines: tuple[StatementLine, ...]
    closing: int

    @property
    def charged(self) -> int:
        """Return the sum of the amounts that increase the balance."""
        return sum(line.amount for line in self.lines if line.amount > 0)

    @property
    def paid(self) -> int:
        """Return the sum of the amounts that reduce the balance, as a positive number."""
        return -sum(line.amount for line in self.lines if line.amount < 0)


class StatementRow(NamedTuple):
    """A row of the CSV. Amounts have the decimals of the currency."""

    date: date
    type: str
    number: str
    details: str
    amount: str
    balance: str
    currency: str


def read_statement(
    tenant: Tenant, entity: BillingEntity, currency: str, first: date, last: date, now: datetime | None = None
) -> Statement:
    """Return the statement of a tenant; inside a scope that sees its rows.

    Args:
        entity: that of the tenant, by whose clocks days are.

    Raises:
        FieldRefused: the days are reversed, the last one is in the future or before the first document.
        ActionRefused: there are too many lines.
    """
    if first > last:
        raise FieldRefused("to", "reversed", Text("The last day is before the first one. Exchange them."))
    require_past("to", last, entity, now or datetime.now(UTC))
    documents = Invoice.objects.for_tenant(tenant).filter(issued_at__isnull=False)
    if not Payment.objects.for_tenant(tenant).filter(recorded_at__lt=end_of(last, entity)).exists():
        require_document("to", last, documents, entity)
    zone = ZoneInfo(entity.time_zone)
    before = booked_before(documents, start_of(first, zone))
    opening = balance = _sum(tenant, before)
    in_days = _entries(tenant).filter(booked_before(documents, end_of(last, entity))).exclude(before)
    unit, lines = nano_a_cent(currency), []
    for change in _changes(tenant, in_days):
        balance += change.nano
        lines.append(_line(change, unit, balance // unit, zone))
    return Statement(tenant.slug, currency, first, last, opening // unit, tuple(lines), balance // unit)


def statement_as_csv(statement: Statement) -> str:
    """Return the statement as CSV, with the opening and the closing balance as rows."""
    digits, currency = minor_digits(statement.currency), statement.currency

    def row(on: date, line_type: str, number: str, details: str, amount: int | None, balance: int) -> StatementRow:
        shown = "" if amount is None else decimal_cents(amount, digits)
        return StatementRow(on, line_type, number, details, shown, decimal_cents(balance, digits), currency)

    rows = [row(statement.first, "opening_balance", "", "", None, statement.opening)]
    rows += [
        row(line.on, line.line_type, line.number, line.details, line.amount, line.balance) for line in statement.lines
    ]
    rows.append(row(statement.last, "closing_balance", "", "", None, statement.closing))
    return csv_tables.as_csv(StatementRow._fields, rows)


def _entries(tenant: Tenant) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.for_tenant(tenant).order_by()


def _sum(tenant: Tenant, before: Q) -> int:
    """Return the balance of the tenant before some days, in nano-units."""
    entries = _entries(tenant).filter(before, account__in=ACCOUNTS)
    return int(entries.aggregate(sum=Sum("nano"))["sum"] or 0)


class _Change(NamedTuple):
    """A transaction of the ledger: when it is booked, its change of the balance, and what it books or is about."""

    at: datetime
    transaction: LedgerTransaction
    nano: int
    document: Invoice | None
    payment: Payment | None


def _changes(tenant: Tenant, entries: QuerySet[LedgerEntry]) -> list[_Change]:
    """Return the changes of the balance by the entries, and the documents that prepaid credit paid, in their order."""
    sums = entries.filter(account__in=ACCOUNTS).values_list("transaction_id").annotate(sum=Sum("nano"))
    changed = {pk: int(nano) for pk, nano in sums if nano}
    shown = Q(pk__in=list(changed)) | Q(key__startswith=DOCUMENT_KEY)
    rows = LedgerTransaction.objects.for_tenant(tenant).filter(shown, pk__in=entries.values("transaction_id"))
    found = list(rows.order_by("pk")[: MAX_LINES + 1])
    if len(found) > MAX_LINES:
        raise ActionRefused(
            Text("The statement has more than %(max_lines)s lines. Choose fewer days.", max_lines=MAX_LINES)
        )
    ids = {row.pk: _number_in(row.key) for row in found}
    documents = Invoice.objects.for_tenant(tenant).select_related("refers_to").in_bulk(set(ids.values()))
    payments = Payment.objects.for_tenant(tenant).in_bulk(set(ids.values()))
    changes = []
    for row in found:
        kind = row.key.partition(":")[0]
        document = documents.get(ids[row.pk]) if kind in ("invoice", "bad-debt", "recovery", "void") else None
        payment = payments.get(ids[row.pk]) if kind == "payment" else None
        issued_at = document.issued_at if kind == "invoice" and document is not None else None
        changes.append(_Change(issued_at or row.created_at, row, changed.get(row.pk, 0), document, payment))
    return sorted(changes, key=lambda change: (change.at, change.transaction.pk))


def _number_in(key: str) -> int:
    """Return the ID in the key of a transaction, such as `bad-debt:7:0`."""
    return int(key.split(":")[1])


def _line(change: _Change, unit: int, balance: int, zone: ZoneInfo) -> StatementLine:
    on, amount, document, payment = (
        change.at.astimezone(zone).date(),
        change.nano // unit,
        change.document,
        change.payment,
    )
    if payment is not None:
        line_type = "payment" if payment.cents > 0 else "refund"
        received = f"received {payment.received_at.astimezone(zone).date()}"
        return StatementLine(on, line_type, payment.reference, received, amount, balance, None, payment.pk)
    kind = change.transaction.key.partition(":")[0]
    if document is None:
        return StatementLine(on, _TYPES.get(kind, _OTHER), "", "", amount, balance, None, None)
    if kind == "invoice":
        about = "" if document.refers_to is None else str(document.refers_to.number)
        line_type, number = str(document.invoice_type), str(document.number)
    else:
        line_type, number, about = _TYPES.get(kind, _OTHER), "", str(document.number)
    return StatementLine(on, line_type, number, about, amount, balance, document.pk, None)
