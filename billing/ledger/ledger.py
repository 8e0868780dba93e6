"""The ledger: double-entry, append-only, in nano-USD. Debits are positive; a transaction sums to zero.

A transaction is in the currency of its tenant, so the ledger sums to zero in each currency.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from django.db.models import Sum

from billing.models import Account, Invoice, LedgerEntry, LedgerTransaction
from billing.pricing.currencies import currency_of


class PostedEntry(NamedTuple):
    """An amount on an account, with the invoice if the account is kept by invoice."""

    account: Account
    nano: int
    invoice_id: int | None = None


def post(tenant_id: int, key: str, entries: Iterable[PostedEntry], currency: str = "") -> None:
    """Book a transaction. Entries of zero are omitted.

    Args:
        currency: of the tenant, if the caller knows it.

    Raises:
        django.db.IntegrityError: `key` was booked before; at the database transaction's end also, the sum is not zero.
    """
    currency = currency or currency_of(tenant_id)
    transaction = LedgerTransaction.objects.create(tenant_id=tenant_id, key=key, currency=currency)
    LedgerEntry.objects.all_tenants().bulk_create(
        LedgerEntry(transaction=transaction, tenant_id=tenant_id, **entry._asdict()) for entry in entries if entry.nano
    )


def count_transactions(invoice: Invoice, name: str) -> int:
    """Return the number of the invoice's ledger transactions of that name."""
    rows = LedgerTransaction.objects.for_tenant(invoice.tenant_id)
    return rows.filter(key__startswith=f"{name}:{invoice.pk}:").count()


def next_key(invoice: Invoice, name: str) -> str:
    """Return the key of the invoice's next ledger transaction of that name."""
    return f"{name}:{invoice.pk}:{count_transactions(invoice, name)}"


def balance(tenant_id: int, account: Account, invoice_id: int | None = None) -> int:
    """Return the balance of a tenant's account in nano-USD; with `invoice_id`, of one invoice."""
    entries = LedgerEntry.objects.for_tenant(tenant_id).filter(account=account)
    if invoice_id is not None:
        entries = entries.filter(invoice_id=invoice_id)
    return int(entries.aggregate(sum=Sum("nano"))["sum"] or 0)


def sum_booked(tenant_id: int, key: str, account: Account) -> int:
    """Return what one transaction booked on an account, in nano-USD."""
    entries = LedgerEntry.objects.for_tenant(tenant_id).filter(transaction__key=key, account=account)
    return int(entries.aggregate(sum=Sum("nano"))["sum"] or 0)
