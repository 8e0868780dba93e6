"""Bank statements in the format camt.053 of ISO 20022. Does not import models.

A statement is read only as a whole: its opening balance and its booked entries must sum to its closing balance. Its
payments are the booked credits, and the reversals of credits as negative amounts. Other debits, reversals of debits
and entries that are not booked are counted, and are no payments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

from billing.currencies.amounts import minor_digits
from billing.currencies.iso_codes import CURRENCIES
from billing.payments.file_errors import FileRefused
from billing.payments.xml_elements import XmlElement, read_xml
from inference_worker.contract.texts import Text

MAX_BYTES = 5_000_000  # bytes of a file
MAX_PAYMENTS = 1000  # in a file
MAX_REMITTANCE = 500  # characters that are stored
_MAX_ID = 70  # characters of the identifiers of a bank
_NAMESPACE = re.compile(r"urn:iso:std:iso:20022:tech:xsd:camt\.053\.001\.(0[2-9]|1[0-3])")
_AMOUNT = re.compile(r"([0-9]{1,13})(?:\.([0-9]{0,5}))?", re.ASCII)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_OPENING, _CLOSING, _INTERIM = ("OPBD", "PRCD"), "CLBD", "ITBD"
_NO_REFERENCE = ("NOTPROVIDED", "NONREF", "NONE")


class BankPayment(NamedTuple):
    """An amount that a bank booked on an account. It is negative if the bank took back an earlier one."""

    line: int
    reference: str  # the bank's, which other statements of the account have, too
    place: str  # the account, the statement and the place in it
    cents: int
    booked_on: date
    payer: str
    texts: tuple[str, ...]  # the structured references, and the lines of the remittance information

    @property
    def remittance(self) -> str:
        return " ".join(self.texts)[:MAX_REMITTANCE]


@dataclass
class BankStatementFile:
    """A statement of a file. `others` counts the booked entries that are no payments, `pending` those not booked."""

    line: int
    account: str  # IBAN
    statement_id: str
    number: str  # in the bank's series, with the page; empty: the bank does not number its statements
    currency: str
    closes_on: date
    opening: int = 0
    closing: int = 0
    payments: list[BankPayment] = field(default_factory=list)
    others: int = 0
    pending: int = 0


def is_camt(content: bytes) -> bool:
    """Return whether a file is XML, and no CSV."""
    start = content[:200].lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n\0")
    return start.startswith(b"<")


def read_camt(content: bytes, encoding: str | None = None) -> list[BankStatementFile]:
    """Return the statements of a file.

    Args:
        encoding: that of the content, which otherwise declares it.

    Raises:
        FileRefused: it is not such a file, or a part is not valid.
    """
    if len(content) > MAX_BYTES:
        raise FileRefused(
            1,
            Text(
                "The file is larger than %(max_bytes)s MB. Divide it into several files.", max_bytes=MAX_BYTES // 10**6
            ),
        )
    root = read_xml(content, encoding)
    if not _NAMESPACE.fullmatch(root.namespace):
        raise FileRefused(root.line, Text("The file is not a bank statement in the format camt.053."))
    found = [_StatementReader(element).read() for element in root.all("BkToCstmrStmt", "Stmt")]
    if not found:
        raise FileRefused(root.line, Text("The file has no statement."))
    seen: dict[tuple[str, str, str], int] = {}
    for row in found:
        first = seen.setdefault((row.account, row.statement_id, row.number), row.line)
        if first != row.line:
            raise FileRefused(
                row.line,
                Text(
                    "The statement %(statement_id)s is in the file twice (line %(first)s).",
                    statement_id=str(row.statement_id),
                    first=str(first),
                ),
            )
    if sum(len(row.payments) for row in found) > MAX_PAYMENTS:
        raise FileRefused(
            1,
            Text(
                "The file has more than %(max_payments)s payments. Divide it into several files.",
                max_payments=MAX_PAYMENTS,
            ),
        )
    return found


class _StatementReader:
    """Reads a statement from its element."""

    def __init__(self, element: XmlElement) -> None:
        self.element = element
        self.currency = self._read_currency()
        self.digits = minor_digits(self.currency)

    def read(self) -> BankStatementFile:
        element = self.element
        account = "".join(element.read("Acct", "Id", "IBAN").split()).upper()
        if not account:
            raise FileRefused(element.line, Text("The statement has no IBAN."))
        opening, closing, closes_on = self._read_balances()
        numbers = [element.read("ElctrncSeqNb") or element.read("LglSeqNb"), element.read("StmtPgntn", "PgNb")]
        found = BankStatementFile(
            element.line,
            account,
            _read_id(element, "Id"),
            _clean("/".join(each for each in numbers if each))[:_MAX_ID],
            self.currency,
            closes_on,
            opening,
            closing,
        )
        if not found.statement_id:
            raise FileRefused(element.line, Text("The statement has no identifier."))
        balance, used = opening, Counter[str]()
        for place, entry in enumerate(element.all("Ntry"), 1):
            status = entry.read("Sts", "Cd") or entry.read("Sts")
            if status != "BOOK":
                found.pending += 1
                continue
            cents = self._read_signed(entry)
            balance += cents
            if self._is_payment(entry, cents):
                own = "/".join(each for each in (found.statement_id, found.number, str(place)) if each)
                found.payments += self._read_payments(entry, cents, own, account, used)
            else:
                found.others += 1
        if balance != closing:
            raise FileRefused(
                element.line,
                Text(
                    "The opening balance and the entries of the statement %(statement_id)s sum to %(sum)s, not to the"
                    " closing balance of %(closing)s.",
                    statement_id=str(found.statement_id),
                    sum=self._format_amount(balance),
                    closing=self._format_amount(closing),
                ),
            )
        return found

    def _read_currency(self) -> str:
        amounts = self.element.all("Bal", "Amt")
        line = amounts[0].line if amounts else self.element.line
        code = self.element.read("Acct", "Ccy") or (amounts[0].attributes.get("Ccy", "") if amounts else "")
        if code not in CURRENCIES:
            raise FileRefused(line, Text("The currency %(code)s is not known.", code=repr(code[:10])))
        return code

    def _read_balances(self) -> tuple[int, int, date]:
        """Return the opening and the closing balance, and the day of the closing one.

        The balances of a page that is not the first or last are interim ones: its first one, and its last one.
        """
        named = [(element.read("Tp", "CdOrPrtry", "Cd"), element) for element in self.element.all("Bal")]
        interim = [element for code, element in named if code == _INTERIM]
        opening = [element for wanted in _OPENING for code, element in named if code == wanted] or interim[:1]
        closing = [element for code, element in named if code == _CLOSING] or interim[-1:]
        if not opening or not closing or opening[0] is closing[-1]:
            raise FileRefused(self.element.line, Text("The statement lacks its opening or its closing balance."))
        return self._read_signed(opening[0]), self._read_signed(closing[-1]), _read_day(closing[-1], "Dt")

    @staticmethod
    def _is_payment(entry: XmlElement, cents: int) -> bool:
        """Return whether an entry is a credit, or the reversal of one, which is a debit."""
        is_reversal = entry.read("RvslInd").lower() in ("true", "1")
        return cents != 0 and (cents < 0) == is_reversal

    def _read_payments(
        self, entry: XmlElement, cents: int, own: str, account: str, used: Counter[str]
    ) -> Iterator[BankPayment]:
        """Yield the payments of an entry: those of a batch by its details, if all have an amount."""
        booked_on = _read_day(entry, "BookgDt") if entry.find("BookgDt") else _read_day(entry, "ValDt")
        details = entry.all("NtryDtls", "TxDtls")
        parts = self._divide(entry, details, cents)
        for place, (part, own_details) in enumerate(parts, 1):
            references = [_clean(each.read("Refs", "AcctSvcrRef")) for each in own_details[:1]]
            known = [
                each for each in (*references, _clean(entry.read("AcctSvcrRef"))) if each and each not in _NO_REFERENCE
            ]
            part_of = f"/{place}" if len(parts) > 1 else ""
            reference = (known[0][:_MAX_ID] if known else own) + part_of
            used[reference] += 1
            if used[reference] > 1:
                reference += f"#{used[reference]}"
            line = own_details[0].line if len(parts) > 1 else entry.line
            if part:
                texts = tuple(text for each in own_details for text in _read_texts(each))
                texts += tuple(_clean(each.text) for each in entry.all("AddtlNtryInf") if each.text)
                payer = next((name for each in own_details if (name := _read_payer(each))), "")
                yield BankPayment(
                    line, f"{account} {reference}", f"{account} {own}{part_of}", part, booked_on, payer, texts
                )

    def _divide(
        self, entry: XmlElement, details: Sequence[XmlElement], cents: int
    ) -> list[tuple[int, Sequence[XmlElement]]]:
        """Return the amounts of a batch with their details. An entry that cannot be divided is one payment.

        Raises:
            FileRefused: the amounts do not sum to the entry's.
        """
        amounts = [each.find("Amt") or each.find("AmtDtls", "TxAmt", "Amt") for each in details]
        in_currency = [each for each in amounts if each is not None and each.attributes.get("Ccy") == self.currency]
        if len(details) < 2 or len(in_currency) < len(details):
            return [(cents, details)]
        directions = [each.read("CdtDbtInd") or entry.read("CdtDbtInd") for each in details]
        parts = [
            self._read_amount(amount) * _read_sign(entry, direction)
            for amount, direction in zip(in_currency, directions, strict=True)
        ]
        if sum(parts) != cents:
            raise FileRefused(
                entry.line,
                Text(
                    "The details of the entry sum to %(sum)s, not to %(expected)s.",
                    sum=self._format_amount(sum(parts)),
                    expected=self._format_amount(cents),
                ),
            )
        return [(part, [each]) for part, each in zip(parts, details, strict=True)]

    def _read_signed(self, element: XmlElement) -> int:
        """Return the amount of an entry or a balance, negative if it is a debit."""
        amount = element.find("Amt")
        if amount is None:
            raise FileRefused(element.line, Text("The amount is missing."))
        if (code := amount.attributes.get("Ccy", "")) != self.currency:
            raise FileRefused(
                amount.line,
                Text(
                    "%(code)s is not the currency of the account, %(currency)s.",
                    code=repr(code[:10]),
                    currency=self.currency,
                ),
            )
        return self._read_amount(amount) * _read_sign(element, element.read("CdtDbtInd"))

    def _read_amount(self, element: XmlElement) -> int:
        match = _AMOUNT.fullmatch(element.text)
        fraction = (match[2] or "").rstrip("0") if match else ""
        if match is None or len(fraction) > self.digits:
            raise FileRefused(
                element.line,
                Text("%(text)s is no amount in %(currency)s.", text=repr(element.text[:30]), currency=self.currency),
            )
        return int(match[1] + fraction.ljust(self.digits, "0"))

    def _format_amount(self, cents: int) -> str:
        text = f"{abs(cents):0{self.digits + 1}}"
        whole, fraction = (text[: -self.digits], text[-self.digits :]) if self.digits else (text, "")
        return f"{'-' if cents < 0 else ''}{whole}{'.' if fraction else ''}{fraction} {self.currency}"


def _read_sign(element: XmlElement, indicator: str) -> int:
    if indicator not in ("CRDT", "DBIT"):
        raise FileRefused(element.line, Text("%(indicator)s is neither CRDT nor DBIT.", indicator=repr(indicator[:10])))
    return 1 if indicator == "CRDT" else -1


def _read_day(element: XmlElement, name: str) -> date:
    """Return the day of a date or of a time, as the bank's clocks show it."""
    text = element.read(name, "Dt") or element.read(name, "DtTm")[: len("2026-11-12")]
    try:
        if not _DAY.fullmatch(text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise FileRefused(
            element.line, Text("%(text)s is not a day, such as 2026-11-27.", text=repr(text[:30]))
        ) from None


def _read_id(element: XmlElement, name: str) -> str:
    """Return an identifier.

    Raises:
        FileRefused: it is longer than ISO 20022 permits.
    """
    text = _clean(element.read(name))
    if len(text) > _MAX_ID:
        raise FileRefused(element.line, Text("The identifier %(text)s is too long.", text=repr(text[:_MAX_ID])))
    return text


def _read_texts(details: XmlElement) -> Iterator[str]:
    """Yield the texts that may name an invoice: structured references first."""
    for structured in details.all("RmtInf", "Strd"):
        paths = (("CdtrRefInf", "Ref"), ("RfrdDocInf", "Nb"), ("AddtlRmtInf",))
        yield from (_clean(each.text) for path in paths for each in structured.all(*path) if each.text)
    yield from (_clean(each.text) for each in details.all("RmtInf", "Ustrd") if each.text)
    end_to_end = _clean(details.read("Refs", "EndToEndId"))
    if end_to_end and end_to_end not in _NO_REFERENCE:
        yield end_to_end


def _read_payer(details: XmlElement) -> str:
    """Return the name of the payer: of a party, or until version 07 of the element itself."""
    names = (details.read("RltdPties", "Dbtr", *path) for path in (("Pty", "Nm"), ("Nm",)))
    return _clean(next((name for name in names if name), ""))[:140]


def _clean(text: str) -> str:
    """Return a text on one line without control characters."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())
