"""Reports of a billing entity's tax in a month or quarter: VAT, EC sales list and OSS.

A final document counts at its date of issue, by the entity's clocks; credit notes are negative. A change of tax without
a document, such as a void by an earlier release, counts when the ledger booked it. So the tax of a report is that of
the ledger's tax accounts. Receipts of prepaid credit that is taxed at its use are no supplies and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import CharField, Value
from django.db.models.functions import Cast, Concat

from billing.currencies.amounts import decimal, decimal_cents, half_up, minor_digits, nano_a_cent
from billing.currencies.iso_codes import EU_COUNTRIES
from billing.models import CHARGES, Account, BillingEntity, Invoice, LedgerEntry, LedgerTransaction, TaxCategory
from billing.pricing.currencies import CrossRate
from billing.taxes import vat_ids
from billing.taxes.eu_buyers import find_eu_buyer
from tenants import csv_tables

PERIOD = r"^20\d\d-(0[1-9]|1[0-2]|Q[1-4])\Z"
_DOCUMENT_KEY = "invoice:"  # prefixes of the keys of transactions, before a document's ID
_VOID_KEY = "void:"
_MONTHS_A_QUARTER = 3


class TaxedAmount(NamedTuple):
    """The tax of a document, or a later change of it, in the document's currency and in the tax currency."""

    document: Invoice
    taxable: int
    tax: int
    tax_currency: str
    converted_taxable: int
    converted_tax: int


class VatRow(NamedTuple):
    """The sums of one country, tax category, rate and currency. Amounts have the decimals of their currency."""

    country: str
    category: str
    rate: str
    documents: int
    currency: str
    taxable: str
    tax: str
    tax_currency: str
    converted_taxable: str
    converted_tax: str


class EcSalesRow(NamedTuple):
    """The services to one buyer in another EU country that accounts for the tax, in the tax currency."""

    country: str
    vat_id: str
    name: str
    documents: int
    currency: str
    taxable: str


class OssRow(NamedTuple):
    """The services to consumers in another EU country, in the tax currency.

    `corrects`: the quarter of the documents that credit notes and voids correct, if it is an earlier one.
    """

    country: str
    rate: str
    corrects: str
    documents: int
    currency: str
    taxable: str
    tax: str


class _Sums(NamedTuple):
    """The sums of a group. A document and its void are two."""

    documents: int
    taxable: int
    tax: int
    converted_taxable: int
    converted_tax: int


_Key = tuple[str, ...]


def vat_report(entity: BillingEntity, period: str) -> list[VatRow]:
    """Return the taxable amounts and the tax by country, category and rate; inside `all_tenants_scope(…)`."""

    def key_of(item: TaxedAmount) -> _Key:
        tax, currency = _tax_of(item), item.document.currency
        return (_find_billed(item).buyer["country"], tax["category"], _sortable(tax), currency, item.tax_currency)

    return [
        VatRow(
            *(country, category, _percent(rate), sums.documents),
            *(currency, _amount(sums.taxable, currency), _amount(sums.tax, currency)),
            *(converted, _amount(sums.converted_taxable, converted), _amount(sums.converted_tax, converted)),
        )
        for (country, category, rate, currency, converted), sums in _group(_taxed_amounts(entity, period), key_of)
    ]


def ec_sales_list(entity: BillingEntity, period: str) -> list[EcSalesRow]:
    """Return the sales with reverse charge to other EU countries by VAT ID; inside `all_tenants_scope(…)`."""
    found = [
        item
        for item in _taxed_amounts(entity, period)
        if _tax_of(item)["category"] == TaxCategory.REVERSE_CHARGE
        and item.document.seller["country"] in EU_COUNTRIES
        and find_eu_buyer(item.document) is not None
    ]
    names = {_compact_vat_id(item): item.document.buyer["name"] for item in found}
    return [
        EcSalesRow(
            vat_id[:2], vat_id, names[vat_id], sums.documents, currency, _amount(sums.converted_taxable, currency)
        )
        for (vat_id, currency), sums in _group(found, lambda item: (_compact_vat_id(item), item.tax_currency))
    ]


def oss_report(entity: BillingEntity, period: str) -> list[OssRow]:
    """Return the sales to consumers in other EU countries by country and rate; inside `all_tenants_scope(…)`."""
    found = [
        item
        for item in _taxed_amounts(entity, period)
        if _tax_of(item)["category"] == TaxCategory.STANDARD
        and (buyer := find_eu_buyer(item.document)) is not None
        and not buyer.vat_id
    ]
    quarter = _quarter_of(_range_of(entity, period)[0])

    def key_of(item: TaxedAmount) -> _Key:
        zone, billed = ZoneInfo(entity.time_zone), _find_billed(item)
        issued = billed.issued_at
        of_billed = quarter if issued is None else _quarter_of(issued.astimezone(zone))
        corrects = "" if of_billed == quarter else of_billed
        return (billed.buyer["country"], _sortable(_tax_of(item)), corrects, item.tax_currency)

    return [
        OssRow(
            *(country, _percent(rate), corrects, sums.documents, currency),
            *(_amount(sums.converted_taxable, currency), _amount(sums.converted_tax, currency)),
        )
        for (country, rate, corrects, currency), sums in _group(found, key_of)
    ]


ReportRow = VatRow | EcSalesRow | OssRow
# The functions and columns of the reports by name.
REPORTS: dict[str, tuple[Callable[[BillingEntity, str], Sequence[ReportRow]], tuple[str, ...]]] = {
    "vat": (vat_report, VatRow._fields),
    "ec-sales": (ec_sales_list, EcSalesRow._fields),
    "oss": (oss_report, OssRow._fields),
}


def report_as_csv(name: str, entity: BillingEntity, period: str) -> str:
    """Return a report with its heading as CSV; inside `all_tenants_scope(…)`."""
    function, columns = REPORTS[name]
    return csv_tables.as_csv(columns, function(entity, period))


def quarter_of_month(month: str) -> str:
    """Return the quarter of a month such as 2026-11."""
    return _quarter_of(date.fromisoformat(f"{month}-01"))


def _quarter_of(day: date) -> str:
    return f"{day.year}-Q{(day.month - 1) // _MONTHS_A_QUARTER + 1}"


def _range_of(entity: BillingEntity, period: str) -> tuple[datetime, datetime]:
    """Return the first instant of a month or quarter by the entity's clocks, and the first one after it."""
    year, _, rest = period.partition("-")
    is_quarter = rest.startswith("Q")
    count = _MONTHS_A_QUARTER if is_quarter else 1
    first = (int(rest[1:]) - 1) * count if is_quarter else int(rest) - 1
    years, month = divmod(int(year) * 12 + first + count, 12)
    zone = ZoneInfo(entity.time_zone)
    return datetime(int(year), first + 1, 1, tzinfo=zone), datetime(years, month + 1, 1, tzinfo=zone)


def _taxed_amounts(entity: BillingEntity, period: str) -> Iterator[TaxedAmount]:
    """Yield the amounts of the period's final documents, and of the changes of tax that the ledger booked in it."""
    start, end = _range_of(entity, period)
    final = Invoice.objects.all_tenants().filter(entity=entity, number__isnull=False).select_related("refers_to")
    for document in final.filter(issued_at__gte=start, issued_at__lt=end).order_by("pk").iterator():
        if not _is_untaxed_credit(document):
            yield _amounts_of(document, 1 if document.invoice_type in CHARGES else -1, 1)
    booked = LedgerTransaction.objects.all_tenants().filter(created_at__gte=start, created_at__lt=end)
    voids = booked.filter(key__startswith=_VOID_KEY).values_list("key", flat=True)
    voided = [int(key.removeprefix(_VOID_KEY)) for key in voids]
    for document in final.filter(pk__in=voided).order_by("pk").iterator():
        yield _amounts_of(document, -1, 1)
    taxes = LedgerEntry.objects.all_tenants().filter(account=Account.TAX, invoice__entity=entity)
    taxes = taxes.filter(transaction__created_at__gte=start, transaction__created_at__lt=end)
    of_document = Concat(Value(_DOCUMENT_KEY), Cast("invoice_id", CharField()))
    taxes = taxes.exclude(transaction__key=of_document).exclude(transaction__key__startswith=_VOID_KEY)
    for entry in taxes.select_related("invoice__refers_to").order_by("pk").iterator():
        if entry.invoice is not None:
            charged = entry.invoice.total - entry.invoice.taxable
            yield _amounts_of(entry.invoice, -entry.nano, charged * nano_a_cent(entry.invoice.currency))


def _is_untaxed_credit(document: Invoice) -> bool:
    """Return whether the document is about prepaid credit that is taxed at its use."""
    return document.sells_credit and document.taxes[0]["category"] == TaxCategory.OUT_OF_SCOPE


def _amounts_of(document: Invoice, part: int, whole: int) -> TaxedAmount:
    """Return a share of the amounts of a document; a negative one reduces the tax."""
    tax, taxable = document.total - document.taxable, document.taxable
    currency, converted_tax, converted_taxable = document.currency, tax, taxable
    if document.tax_rate is not None:
        rate, currency = CrossRate(document.tax_rate, document.rate_digits), document.tax_currency
        more = document.tax_digits - minor_digits(document.currency)
        converted_taxable = rate.convert(taxable, more)
        converted_tax = rate.convert(tax, more) if document.converted_tax is None else document.converted_tax
    shares = (half_up(amount * part, whole) for amount in (taxable, tax, converted_taxable, converted_tax))
    of_taxable, of_tax, *converted = shares
    return TaxedAmount(document, of_taxable, of_tax, currency, *converted)


def _find_billed(item: TaxedAmount) -> Invoice:
    """Return the document whose supply is taxed: of a note, the one that it refers to."""
    return item.document.refers_to or item.document


def _tax_of(item: TaxedAmount) -> dict[str, Any]:
    (tax,) = item.document.taxes
    return tax  # type: ignore[no-any-return]


def _compact_vat_id(item: TaxedAmount) -> str:
    return vat_ids.compact(item.document.buyer["vat_id"])


def _group(items: Iterable[TaxedAmount], key_of: Callable[[TaxedAmount], _Key]) -> list[tuple[_Key, _Sums]]:
    """Return the sums of each key, in the order of the keys."""
    found: dict[_Key, _Sums] = {}
    for item in items:
        sums = found.get(key := key_of(item), _Sums(0, 0, 0, 0, 0))
        added = (1, item.taxable, item.tax, item.converted_taxable, item.converted_tax)
        found[key] = _Sums(*(before + more for before, more in zip(sums, added, strict=True)))
    return sorted(found.items())


def _sortable(tax: Mapping[str, Any]) -> str:
    return f"{tax['rate_ppm']:07}"


def _percent(rate: str) -> str:
    return decimal(int(rate), 4)


def _amount(cents: int, currency: str) -> str:
    return decimal_cents(cents, minor_digits(currency))
