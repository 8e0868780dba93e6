"""DATEV's format of journals: EXTF, version 700, category 21 (Buchungsstapel), format version 13.

A line has one amount, two accounts and at most one tax key. Each entry of a posting is a line against one account of
the posting, so every line balances. The amounts are positive, in hundredths, with S (debit) or H (credit) of the first
account.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from typing import NamedTuple

from billing.accounting.charts import AccountNumbers, ChartLine
from billing.accounting.journal import JournalEntry, Posting, first_day
from billing.currencies.amounts import DEFAULT_CURRENCY, half_up
from billing.models import Account, BillingEntity, TaxCategory
from billing.pricing.currencies import dated_rate
from billing.taxes.vat_ids import prefix_of
from inference_worker.contract.texts import Text
from tenants import csv_tables
from tenants.actions import Conflict

ENCODING = "cp1252"
_NANO_A_HUNDREDTH = 10**7
_RATE_DIGITS = 6
_MAX_HUNDREDTHS = 10**12  # the format has 10 digits before the comma
_MAX_RATE = 10**4  # it has 4 digits before the comma; without a rate, the converted amount applies
_FORMAT_VERSION = 13


def _number_names(count: int, *names: str) -> list[str]:
    return [name.format(number) for number in range(1, count + 1) for name in names]


HEADING = (
    *("Umsatz (ohne Soll/Haben-Kz)", "Soll/Haben-Kennzeichen", "WKZ Umsatz", "Kurs", "Basis-Umsatz"),
    *("WKZ Basis-Umsatz", "Konto", "Gegenkonto (ohne BU-Schlüssel)", "BU-Schlüssel", "Belegdatum", "Belegfeld 1"),
    *("Belegfeld 2", "Skonto", "Buchungstext", "Postensperre", "Diverse Adressnummer", "Geschäftspartnerbank"),
    *("Sachverhalt", "Zinssperre", "Beleglink", *_number_names(8, "Beleginfo - Art {}", "Beleginfo - Inhalt {}")),
    *("KOST1 - Kostenstelle", "KOST2 - Kostenstelle", "Kost-Menge", "EU-Land u. UStID (Bestimmung)"),
    *("EU-Steuersatz (Bestimmung)", "Abw. Versteuerungsart", "Sachverhalt L+L", "Funktionsergänzung L+L"),
    *("BU 49 Hauptfunktionstyp", "BU 49 Hauptfunktionsnummer", "BU 49 Funktionsergänzung"),
    *_number_names(20, "Zusatzinformation - Art {}", "Zusatzinformation- Inhalt {}"),
    *("Stück", "Gewicht", "Zahlweise", "Forderungsart", "Veranlagungsjahr", "Zugeordnete Fälligkeit", "Skontotyp"),
    *("Auftragsnummer", "Buchungstyp", "USt-Schlüssel (Anzahlungen)", "EU-Land (Anzahlungen)"),
    *("Sachverhalt L+L (Anzahlungen)", "EU-Steuersatz (Anzahlungen)", "Erlöskonto (Anzahlungen)", "Herkunft-Kz"),
    *("Buchungs GUID", "KOST-Datum", "SEPA-Mandatsreferenz", "Skontosperre", "Gesellschaftername"),
    *("Beteiligtennummer", "Identifikationsnummer", "Zeichnernummer", "Postensperre bis"),
    *("Bezeichnung SoBil-Sachverhalt", "Kennzeichen SoBil-Buchung", "Festschreibung", "Leistungsdatum"),
    *("Datum Zuord. Steuerperiode", "Fälligkeit", "Generalumkehr (GU)", "Steuersatz", "Land", "Abrechnungsreferenz"),
    *("BVV-Position", "EU-Land u. UStID (Ursprung)", "EU-Steuersatz (Ursprung)", "Abw. Skontokonto"),
)
_COLUMN = {name: index for index, name in enumerate(HEADING)}


class _Movement(NamedTuple):
    """An amount that one account is debited with and the other one is credited with; negative: reversed."""

    debited: ChartLine
    credited: ChartLine
    nano: int
    entry: JournalEntry  # journal entry of the credited account


def encode_journal(
    entity: BillingEntity, chart: AccountNumbers, month: str, postings: Iterable[Posting]
) -> Iterator[bytes]:
    """Yield the lines of the file. Characters that the code page does not have become question marks.

    Raises:
        Conflict: the chart has no line for an account, a currency has no exchange rate, or an amount is too large.
    """
    books = entity.tax_currency or DEFAULT_CURRENCY
    yield _encode(_header(entity, chart, first_day(month), books))
    yield _encode(HEADING)
    lines = _LineWriter(chart, books)
    for posting in postings:
        for cells in lines.write(posting):
            yield _encode(cells)


def _header(entity: BillingEntity, chart: AccountNumbers, start: date, books: str) -> list[str]:
    year = start.year - (start.month < chart.row.first_month)
    end = start.replace(day=monthrange(start.year, start.month)[1])
    label = _text(f"{entity.name} {start:%Y-%m}", 30)
    cells = [_text("EXTF"), "700", "21", _text("Buchungsstapel"), str(_FORMAT_VERSION)]
    cells += [f"{datetime.now(UTC):%Y%m%d%H%M%S}000", "", _text("MR"), _text(""), _text("")]
    cells += [str(chart.row.consultant), str(chart.row.client), f"{date(year, chart.row.first_month, 1):%Y%m%d}"]
    cells += [str(chart.row.account_digits), f"{start:%Y%m%d}", f"{end:%Y%m%d}", label, _text("")]
    cells += ["1", "0", "0", _text(books)]  # financial accounting, for all purposes, not final
    return [*cells, "", _text(""), "", "", _text(""), "", "", _text(""), _text("Millrace")]


class _LineWriter:
    """The lines of postings. Fractions of a hundredth are carried to the next line with the same accounts."""

    def __init__(self, chart: AccountNumbers, books: str) -> None:
        self._chart = chart
        self._books = books
        self._carried: dict[tuple[str, str, str], int] = {}
        self._rates: dict[tuple[str, date], tuple[int, int]] = {}

    def write(self, posting: Posting) -> Iterator[list[str]]:
        for movement in self._movements(posting):
            key = (movement.debited.number, movement.credited.number, posting.currency)
            nano = movement.nano + self._carried.get(key, 0)
            amount = half_up(nano, _NANO_A_HUNDREDTH)
            self._carried[key] = nano - amount * _NANO_A_HUNDREDTH
            if amount:
                yield self._cells(posting, movement, amount)

    def _movements(self, posting: Posting) -> Iterator[_Movement]:
        """Yield a movement for each entry, between one account of the posting and the entry's account."""
        entries = posting.entries
        by_invoice = [entry for entry in entries if entry.account == Account.RECEIVABLE]
        if by_invoice or any(entry.tax_category for entry in entries):
            shared = Account.RECEIVABLE  # the whole amount first, then the part that credit paid
            others = [entry for entry in entries if entry.account != Account.RECEIVABLE]
        else:
            largest = max(entries, key=lambda entry: abs(entry.nano))
            shared, others = largest.account, [entry for entry in entries if entry is not largest]
        hub = self._chart.find(shared, "", 0)
        for entry in self._with_tax(others):
            line = self._chart.find(entry.account, entry.tax_category, entry.rate_ppm)
            yield _Movement(hub, line, -entry.nano, entry)

    def _with_tax(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Add the tax to the entry from whose account or tax key the program computes it."""
        merged = list(entries)
        for tax in [entry for entry in entries if entry.account == Account.TAX]:
            for index, entry in enumerate(merged):
                same = (entry.tax_category, entry.rate_ppm) == (tax.tax_category, tax.rate_ppm)
                if same and entry.account != Account.TAX and self._chart.find(*entry[:3]).with_tax:
                    merged[index] = entry._replace(nano=entry.nano + tax.nano)
                    merged.remove(tax)
                    break
        return merged

    def _cells(self, posting: Posting, movement: _Movement, amount: int) -> list[str]:
        cells = [""] * len(HEADING)

        def put(**values: str) -> None:
            for name, value in values.items():
                cells[_COLUMN[_NAMES[name]]] = value

        put(amount=_amount(amount), side=_text("S" if amount > 0 else "H"), currency=_text(posting.currency))
        if posting.currency != self._books:
            rate, digits = self._rate(posting.currency, posting.on)
            put(
                rate=f"{rate // 10**digits},{rate % 10**digits:0{digits}}" if rate < _MAX_RATE * 10**digits else "",
                base=_amount(half_up(amount * 10**digits, rate)),
                base_currency=_text(self._books),
            )
        reference = re.sub(r"[^0-9A-Za-z$%&*+/-]", "-", posting.document or posting.key)[:36]
        put(
            account=movement.debited.number,
            other=movement.credited.number,
            key=_text(movement.credited.tax_key),
            day=f"{posting.on:%d%m}",
            reference=_text(reference),
            text=_text(csv_tables.guard_cell(posting.text), 60),
            kind=_text("Tenant", 20),
            tenant=_text(posting.tenant, 210),
            second_kind=_text("Ledger", 20),
            booking=_text(posting.key, 210),
            final="0",
        )
        put(**_eu_cells(posting, movement.entry))
        return cells

    def _rate(self, currency: str, day: date) -> tuple[int, int]:
        """Return units of the currency per unit of the books' currency, and the rate's decimals."""
        if (currency, day) not in self._rates:
            found = dated_rate(self._books, currency, day, _RATE_DIGITS)
            if found is None or found.rate[0] <= 0:
                books = self._books
                raise Conflict(
                    Text(
                        "There is no exchange rate between %(books)s and %(currency)s for %(day)s. Add one for that day"
                        " or before, and repeat the export.",
                        books=books,
                        currency=currency,
                        day=day,
                    )
                )
            self._rates[currency, day] = found.rate[0], found.rate[1]
        return self._rates[currency, day]


_NAMES = {
    "amount": "Umsatz (ohne Soll/Haben-Kz)",
    "side": "Soll/Haben-Kennzeichen",
    "currency": "WKZ Umsatz",
    "rate": "Kurs",
    "base": "Basis-Umsatz",
    "base_currency": "WKZ Basis-Umsatz",
    "account": "Konto",
    "other": "Gegenkonto (ohne BU-Schlüssel)",
    "key": "BU-Schlüssel",
    "day": "Belegdatum",
    "reference": "Belegfeld 1",
    "text": "Buchungstext",
    "kind": "Zusatzinformation - Art 1",
    "tenant": "Zusatzinformation- Inhalt 1",
    "second_kind": "Zusatzinformation - Art 2",
    "booking": "Zusatzinformation- Inhalt 2",
    "eu_buyer": "EU-Land u. UStID (Bestimmung)",
    "eu_rate": "EU-Steuersatz (Bestimmung)",
    "final": "Festschreibung",
}


def _eu_cells(posting: Posting, entry: JournalEntry) -> dict[str, str]:
    """Return the cells from which DATEV fills the EC sales list and the OSS return."""
    buyer = posting.eu_buyer
    if buyer is None or entry.account == Account.TAX:
        return {}
    if entry.tax_category == TaxCategory.REVERSE_CHARGE and buyer.vat_id:
        return {"eu_buyer": _text(buyer.vat_id, 15)}
    if entry.tax_category == TaxCategory.STANDARD and not buyer.vat_id:
        return {"eu_buyer": _text(prefix_of(buyer.country)), "eu_rate": _amount(half_up(entry.rate_ppm, 100))}
    return {}


def _amount(hundredths: int) -> str:
    if abs(hundredths) >= _MAX_HUNDREDTHS:
        raise Conflict(
            Text("An amount has more than 10 digits, which the format DATEV does not have. Export a CSV instead.")
        )
    return f"{abs(hundredths) // 100},{abs(hundredths) % 100:02}"


def _text(text: str, most: int = 60) -> str:
    return '"' + text[:most].replace('"', '""') + '"'


def _encode(cells: Iterable[str]) -> bytes:
    return (";".join(cells) + "\r\n").encode(ENCODING, "replace")
