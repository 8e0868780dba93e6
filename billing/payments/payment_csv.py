"""Payments from CSV files, exported by a bank or written manually.

Columns: reference, amount, currency (of the tenant, if empty), received_on (a date), and invoice or tenant; `credit`,
if true, buys credit; note.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import NamedTuple

from billing.currencies.amounts import MAX_CENTS
from billing.payments import Unreadable, buys_credit, cents
from billing.payments.file_errors import FileRefused
from billing.payments.recording import Received, payer_currency
from tenants import csv_tables

PROVIDER = "file"
MAX_REFERENCE_LENGTH = 200
_COLUMNS = {"reference", "amount", "received_on"}


class PaymentLine(NamedTuple):
    """A payment and its line in a file."""

    line: int
    received: Received


def read_payments(content: bytes, most: int | None = None) -> list[PaymentLine]:
    """Return the payments of a CSV file, `most` at most.

    Raises:
        FileRefused: a line is not valid.
    """
    found: list[PaymentLine] = []
    try:
        rows = csv_tables.read_table(io.StringIO(content.decode("utf-8-sig"), newline=""))
        for row in rows:
            if len(found) == most:
                raise FileRefused(
                    rows.line_num, f"The file has more than {most} payments. Divide it into several files."
                )
            found.append(PaymentLine(rows.line_num, _read_line(rows.line_num, row)))
        return found
    except (UnicodeDecodeError, csv_tables.Error) as exc:
        raise FileRefused(1, f"The file is no CSV: {exc}.") from exc


def _read_line(line: int, row: dict[str, str | None]) -> Received:
    if any(not value.isprintable() for value in row.values() if isinstance(value, str)):
        raise FileRefused(line, "Remove control characters.")
    if missing := ", ".join(sorted(name for name in _COLUMNS if not row.get(name))):
        raise FileRefused(line, f"Missing: {missing}.")
    given = {name: (value or "").strip() for name, value in row.items() if isinstance(value, str)}
    try:
        day = datetime.fromisoformat(given["received_on"])
    except ValueError as exc:
        raise FileRefused(line, f"{given['received_on']!r} is no date.") from exc
    tenant, invoice = given.get("tenant", ""), given.get("invoice", "")
    currency = given.get("currency", "").upper()
    used = currency or payer_currency(tenant, invoice)
    try:
        amount = cents(given["amount"], used)
    except Unreadable as exc:
        message = f"{given['amount']!r} is no amount in {used}. Enter a number, such as 12.50."
        raise FileRefused(line, message) from exc
    try:
        as_credit = buys_credit(given.get("credit", ""))
    except Unreadable as exc:
        raise FileRefused(line, f"{given['credit']!r} is neither true nor false.") from exc
    if not 0 < abs(amount) <= MAX_CENTS:
        raise FileRefused(line, f"{given['amount']} is out of range.")
    if len(given["reference"]) > MAX_REFERENCE_LENGTH:
        raise FileRefused(line, f"The reference is longer than {MAX_REFERENCE_LENGTH} characters.")
    return Received(
        PROVIDER,
        given["reference"],
        amount,
        day.replace(tzinfo=day.tzinfo or UTC),
        tenant=tenant,
        invoice=invoice,
        as_credit=as_credit,
        note=given.get("note", "")[:200],
        currency=currency,
    )
