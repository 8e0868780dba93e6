"""Bad debts: written-off amounts, and the relief of their tax.

The tax of an amount that is never paid is not owed. A write-off therefore books the amount without tax as bad debt and
reduces the output tax by the rest. The law of some countries requires a claim first: then the whole amount is bad debt
until the claim is recorded. A later payment restores both parts in proportion.

The relieved tax is always the tax in the amount that is still written off, rounded to the cent, by the total and the
tax of the invoice after its credit notes. So it does not depend on the order of payments, and its parts sum exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Sum

from billing.currencies.amounts import half_up, nano_a_cent
from billing.ledger.ledger import PostedEntry, balance, count_transactions, next_key, post
from billing.models import CHARGES, Account, Invoice, LedgerEntry, LedgerTransaction


def written_off(invoice: Invoice) -> int:
    """Return the nano-USD of an invoice, with tax, that were written off and not paid later."""
    return balance(invoice.tenant_id, Account.BAD_DEBT, invoice.pk) + relieved_tax(invoice)


def relieved_tax(invoice: Invoice) -> int:
    """Return the nano-USD of tax that are not owed while the invoice is written off."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice, account=Account.TAX)
    later = entries.exclude(transaction__key=f"invoice:{invoice.pk}")
    return int(later.aggregate(sum=Sum("nano"))["sum"] or 0)


def tax_in(invoice: Invoice, nano: int) -> int:
    """Return the tax in a part of an invoice's total, in nano-USD that are whole cents."""
    total, tax, _ = _sum_documents(invoice)
    unit = nano_a_cent(invoice.currency)
    return half_up(nano * tax, total * unit) * unit if total else 0


def convert_tax(invoice: Invoice, tax_nano: int) -> int:
    """Return a part of the invoice's tax in the entity's tax currency, in the minor unit of that currency."""
    _, tax, converted = _sum_documents(invoice)
    return half_up(tax_nano * converted, tax * nano_a_cent(invoice.currency)) if tax else 0


def _sum_documents(invoice: Invoice) -> tuple[int, int, int]:
    """Return total and tax of the invoice without its credit notes, and the tax in the tax currency."""
    notes = Invoice.objects.for_tenant(invoice.tenant_id).filter(refers_to=invoice, number__isnull=False)
    total = tax = converted = 0
    for row in (invoice, *notes.exclude(invoice_type__in=CHARGES)):
        sign = -1 if row.is_credit_note else 1
        total += sign * row.total
        tax += sign * (row.total - row.taxable)
        converted += sign * (row.converted_tax or 0)
    return total, tax, converted


def book_write_off(invoice: Invoice, nano: int) -> str:
    """Move an outstanding amount to bad debt. Return the key of the ledger transaction."""
    key = next_key(invoice, "bad-debt")
    entries = [PostedEntry(Account.BAD_DEBT, nano, invoice.pk), PostedEntry(Account.RECEIVABLE, -nano, invoice.pk)]
    post(invoice.tenant_id, key, entries, invoice.currency)
    return key


def book_relief(invoice: Invoice) -> int:
    """Move the tax of the written-off amount from bad debt to the output tax. Return its nano-USD."""
    tax = tax_in(invoice, written_off(invoice)) - relieved_tax(invoice)
    entries = [PostedEntry(Account.TAX, tax, invoice.pk), PostedEntry(Account.BAD_DEBT, -tax, invoice.pk)]
    post(invoice.tenant_id, _relief_key(invoice), entries, invoice.currency)
    return tax


def has_relief(invoice: Invoice) -> bool:
    """Return whether the newest write-off of the invoice reduced the output tax."""
    return LedgerTransaction.objects.for_tenant(invoice.tenant_id).filter(key=_relief_key(invoice)).exists()


def reinstate(invoice: Invoice, nano: int) -> None:
    """Make a written-off amount outstanding again; a negative amount is written off again."""
    entries = [PostedEntry(Account.RECEIVABLE, nano, invoice.pk), *reduce_loss(invoice, nano)]
    post(invoice.tenant_id, next_key(invoice, "recovery"), entries, invoice.currency)


def reduce_loss(invoice: Invoice, nano: int) -> Iterable[PostedEntry]:
    """Return the entries that take a part with tax from the written-off amount: bad debt and relieved tax."""
    rest = written_off(invoice) - nano
    tax = relieved_tax(invoice) - (tax_in(invoice, rest) if has_relief(invoice) else 0)
    yield PostedEntry(Account.BAD_DEBT, tax - nano, invoice.pk)
    yield PostedEntry(Account.TAX, -tax, invoice.pk)


def _relief_key(invoice: Invoice) -> str:
    """Return the key of the relief of the newest write-off, so that it is booked once."""
    return f"tax-relief:{invoice.pk}:{count_transactions(invoice, 'bad-debt') - 1}"
