"""Receipts of payments and refunds: what a payment paid when it was recorded.

A receipt has no number of its own, as it is no tax document: the ID of the payment identifies it. What a payment paid
is read from the ledger: the matchings that were booked together with it. So a receipt does not change when the rest
pays a later invoice.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import Sum

from billing.currencies.amounts import dollars, nano_a_cent
from billing.invoicing.document import day_words, party_words
from billing.invoicing.pdf import typeset
from billing.invoicing.statements import CustomerAccount
from billing.models import Account, Invoice, LedgerEntry, LedgerTransaction, Payment

_TEMPLATE = Path(__file__).with_name("receipt.typ")
_PAYMENT_KEY = "payment:"


class PaidInvoice(NamedTuple):
    """An invoice, and the cents of a payment that paid it. They are negative if a refund made it outstanding again."""

    invoice: Invoice
    cents: int


class Receipt(NamedTuple):
    """A payment or refund with the invoices that it paid or reopened. `rest`: the cents that paid no invoice."""

    payment: Payment
    paid: tuple[PaidInvoice, ...]
    rest: int

    @property
    def file_name(self) -> str:
        return f"receipt-{self.payment.pk}.pdf"


def read_receipt(payment: Payment) -> Receipt:
    """Return the receipt of a payment; inside a scope that sees the tenant's rows."""
    rows = LedgerTransaction.objects.for_tenant(payment.tenant_id)
    own = rows.filter(key=f"{_PAYMENT_KEY}{payment.pk}")
    together = rows.filter(pk__gt=own.values("pk")[:1], xid=own.values("xid")[:1])
    # A provider's event can record several payments in one transaction of the database.
    if (other := together.filter(key__startswith=_PAYMENT_KEY).order_by("pk").first()) is not None:
        together = together.filter(pk__lt=other.pk)
    entries = LedgerEntry.objects.for_tenant(payment.tenant_id).filter(
        account=Account.RECEIVABLE,
        transaction__in=together.filter(key__startswith="match:").values("pk"),
    )
    sums = {pk: int(nano) for pk, nano in entries.order_by().values_list("invoice_id").annotate(sum=Sum("nano"))}
    invoices = Invoice.objects.for_tenant(payment.tenant_id).in_bulk(sums)
    unit = nano_a_cent(payment.currency)
    paid = tuple(PaidInvoice(invoices[pk], -sums[pk] // unit) for pk in sorted(sums) if sums[pk])
    return Receipt(payment, paid, payment.cents - sum(item.cents for item in paid))


def receipt_as_pdf(account: CustomerAccount, receipt: Receipt) -> bytes:
    """Return the receipt as PDF, with the current addresses of seller and buyer."""
    payment, zone = receipt.payment, ZoneInfo(account.entity.time_zone)
    is_refund, currency = payment.cents < 0, payment.currency
    rest = "Advance payment returned" if is_refund else "Advance payment for later invoices"
    lines = [(f"Invoice {item.invoice.number}", item.cents) for item in receipt.paid]
    lines += [(rest, receipt.rest)] if receipt.rest else []
    words = {
        "title": "Refund receipt" if is_refund else "Payment receipt",
        "number": str(payment.pk),
        "reason": "",
        "seller": party_words(account.entity.seller()),
        "buyer": party_words(account.buyer),
        "payer_label": "Paid to" if is_refund else "Received from",
        "payee_label": "Paid by" if is_refund else "Received by",
        "date_label": "Refunded" if is_refund else "Received",
        "received": day_words(payment.received_at.astimezone(zone).date()),
        "reference": payment.reference,
        "provider": payment.provider.capitalize(),
        "heading": "Reduced payment of" if is_refund else "Paid",
        "lines": [{"what": what, "amount": dollars(abs(cents), currency)} for what, cents in lines],
        "total_label": "Refunded" if is_refund else "Received",
        "total": dollars(abs(payment.cents), currency),
        "time_zone": account.entity.time_zone,
    }
    return typeset(_TEMPLATE, words, payment.received_at)
