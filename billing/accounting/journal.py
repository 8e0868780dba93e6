"""The journal of a billing entity: the ledger's transactions of all its tenants in a month of its time zone.

The days of transactions are those of `booking_days`, so the journal of a month that is over does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from typing import NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet, Sum

from billing.accounting.booking_days import DOCUMENT_KEY, document_keys
from billing.currencies.amounts import nano_a_cent
from billing.models import Account, BillingEntity, Invoice, LedgerEntry, LedgerTransaction, Payment
from billing.periods import default_entity, month_bounds
from billing.taxes.eu_buyers import EuBuyer, find_eu_buyer
from inference_worker.contract.texts import Text
from tenants.actions.common import FieldRefused

T = TypeVar("T", Invoice, LedgerTransaction)
CHUNK = 500  # transactions that are in memory at the same time
_PAYMENT = "payment:"


class JournalEntry(NamedTuple):
    """An amount on an account in nano-units: debit positive, credit negative. `tax_category` is empty without tax."""

    account: Account
    tax_category: str
    rate_ppm: int
    nano: int


class Posting(NamedTuple):
    """A transaction of the ledger. Its entries sum to zero."""

    key: str
    on: date
    tenant: str  # slug
    document: str  # number of the invoice or note; empty: none
    text: str
    currency: str
    entries: tuple[JournalEntry, ...]
    eu_buyer: EuBuyer | None  # EU buyer of the document


class AccountSum(NamedTuple):
    """The sums of an account in a currency, in nano-units."""

    currency: str
    account: str
    debit: int
    credit: int


def first_day(month: str) -> date:
    """Return the first day of a month such as 2026-11."""
    return date.fromisoformat(f"{month}-01")


def read_postings(entity: BillingEntity, month: str) -> Iterator[Posting]:
    """Yield the postings of a month, those of documents first. Call in a scope of all tenants.

    At most CHUNK transactions are in memory at the same time.
    """
    start, end = bounds_of_month(entity, month)
    zone = ZoneInfo(entity.time_zone)
    for documents in _chunks(_documents(entity, start, end), "issued_at"):
        issued = {f"{DOCUMENT_KEY}{row.pk}": row for row in documents}
        transactions = {row.key: row for row in _transactions().filter(key__in=issued)}
        ordered = [
            (transactions[key], row.issued_at) for key, row in issued.items() if row.issued_at and key in transactions
        ]
        yield from _postings(ordered, zone)
    for rows in _chunks(_other_transactions(entity, start, end), "created_at"):
        yield from _postings([(row, row.created_at) for row in rows], zone)


def require_begun(entity: BillingEntity, month: str) -> None:
    """Check that a month has begun by the entity's clocks.

    Raises:
        FieldRefused: it is in the future.
    """
    if bounds_of_month(entity, month)[0] > datetime.now(UTC):
        raise FieldRefused(
            "month", "future_month", Text("The month %(month)s has not begun. Choose an earlier month.", month=month)
        )


def sum_accounts(entity: BillingEntity, month: str) -> list[AccountSum]:
    """Return the debits and credits of a month by currency and account. Call in a scope of all tenants."""
    return _sum_accounts(entity, *bounds_of_month(entity, month))


def sum_accounts_before(entity: BillingEntity, month: str) -> list[AccountSum]:
    """Return the debits and credits of all earlier months by currency and account. Call in a scope of all tenants."""
    return _sum_accounts(entity, None, bounds_of_month(entity, month)[0])


def _sum_accounts(entity: BillingEntity, start: datetime | None, end: datetime) -> list[AccountSum]:
    issued = document_keys(_documents(entity, start, end))
    other = _other_transactions(entity, start, end).values("pk")
    entries = LedgerEntry.objects.all_tenants().filter(Q(transaction__key__in=issued) | Q(transaction__in=other))
    sums = entries.order_by("transaction__currency", "account").values_list("transaction__currency", "account")
    debit, credit = Sum("nano", filter=Q(nano__gt=0), default=0), Sum("nano", filter=Q(nano__lt=0), default=0)
    rows = sums.annotate(debit=debit, credit=credit)
    return [AccountSum(currency, account, int(more), -int(less)) for currency, account, more, less in rows]


def bounds_of_month(entity: BillingEntity, month: str) -> tuple[datetime, datetime]:
    """Return the start and the end of a month by the clocks of an entity; the end is exclusive."""
    year, number = (int(part) for part in month.split("-"))
    return month_bounds(entity.time_zone, year, number)


def is_in_time(name: str, start: datetime | None, end: datetime) -> Q:
    """Return the condition that a time is before the end and, if there is a start, not before it."""
    return Q(**{f"{name}__lt": end}) & (Q() if start is None else Q(**{f"{name}__gte": start}))


def _documents(entity: BillingEntity, start: datetime | None, end: datetime) -> QuerySet[Invoice]:
    return Invoice.objects.all_tenants().filter(is_in_time("issued_at", start, end), entity=entity)


def _transactions() -> QuerySet[LedgerTransaction]:
    return LedgerTransaction.objects.all_tenants().select_related("tenant")


def _other_transactions(entity: BillingEntity, start: datetime | None, end: datetime) -> QuerySet[LedgerTransaction]:
    rows = _transactions().filter(is_billed_by(entity), is_in_time("created_at", start, end))
    return rows.exclude(key__startswith=DOCUMENT_KEY)


def is_billed_by(entity: BillingEntity) -> Q:
    """Return the condition that the tenant of a row is billed by the entity."""
    billed = Q(tenant__billingprofile__entity=entity)
    return billed | Q(tenant__billingprofile__isnull=True) if entity == default_entity() else billed


def _chunks(rows: QuerySet[T], moment: str) -> Iterator[list[T]]:
    """Yield the rows in the order of a time, CHUNK at a time."""
    after = Q()
    while chunk := list(rows.filter(after).order_by(moment, "pk")[:CHUNK]):
        yield chunk
        last, pk = getattr(chunk[-1], moment), chunk[-1].pk
        after = Q(**{f"{moment}__gt": last}) | Q(**{moment: last}, pk__gt=pk)


def _postings(rows: Iterable[tuple[LedgerTransaction, datetime]], zone: ZoneInfo) -> Iterator[Posting]:
    booked = {row.pk: (row, at) for row, at in rows}
    entries: dict[int, list[LedgerEntry]] = {pk: [] for pk in booked}
    related = ("invoice", "invoice__refers_to")
    for entry in (
        LedgerEntry.objects.all_tenants().filter(transaction__in=booked).select_related(*related).order_by("pk")
    ):
        entries[entry.transaction_id].append(entry)
    keys = [row.key for row, _ in booked.values() if row.key.startswith(_PAYMENT)]
    payments = Payment.objects.all_tenants().in_bulk([int(key.removeprefix(_PAYMENT)) for key in keys])
    for pk, (row, at) in booked.items():
        if not entries[pk]:
            continue  # of a document of zero
        payment = payments.get(int(row.key.removeprefix(_PAYMENT))) if row.key.startswith(_PAYMENT) else None
        document = _document_of(entries[pk])
        yield Posting(
            row.key,
            at.astimezone(zone).date(),
            row.tenant.slug,
            "" if document is None else str(document.number),
            row.tenant.name if payment is None else f"{row.tenant.name} {payment.reference}",
            row.currency,
            tuple(_split(entries[pk])),
            None if document is None else find_eu_buyer(document),
        )


def _document_of(entries: list[LedgerEntry]) -> Invoice | None:
    """Return the document that a transaction books, or the one that it is about: a note rather than its invoice."""
    found = [entry.invoice for entry in entries if entry.invoice is not None]
    return max(found, key=lambda row: row.pk, default=None)


def _split(entries: list[LedgerEntry]) -> Iterator[JournalEntry]:
    """Yield the entries with their tax. The part of a document's amount that was not taxed is an entry of its own."""
    is_taxed = any(entry.account == Account.TAX for entry in entries)
    for entry in entries:
        account, document = Account(entry.account), entry.invoice
        if document is None or not document.taxes:
            yield JournalEntry(account, "", 0, entry.nano)
            continue
        (tax,) = document.taxes  # all lines have the same tax
        charged = Account.CREDITS if document.sells_credit else Account.REVENUE
        if account == Account.TAX or (account == Account.BAD_DEBT and is_taxed):
            base = abs(entry.nano)
        elif account == charged:
            base = min(abs(entry.nano), int(tax["base"]) * nano_a_cent(document.currency))
        else:
            base = 0
        sign = 1 if entry.nano > 0 else -1
        if base:
            yield JournalEntry(account, tax["category"], tax["rate_ppm"], sign * base)
        if rest := entry.nano - sign * base:
            yield JournalEntry(account, "", 0, rest)
