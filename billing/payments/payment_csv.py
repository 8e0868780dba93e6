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
from inference_worker.contract.texts import Text, text_of
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
                    rows.line_num,
                    Text("The file has more than %(most)s payments. Divide it into several files.", most=most),
                )
            found.append(PaymentLine(rows.line_num, _read_line(rows.line_num, row)))
        return found
    except (UnicodeDecodeError, csv_tables.Error) as exc:
        raise FileRefused(1, Text("The file is no CSV: %(error)s.", error=text_of(exc))) from exc


def _read_line(line: int, row: dict[str, str | None]) -> Received:
    if any(not value.isprintable() for value in row.values() if isinstance(value, str)):
        raise FileRefused(line, Text("Remove control characters."))
    if missing := ", ".join(sorted(name for name in _COLUMNS if not row.get(name))):
        raise FileRefused(line, Text("Missing: %(missing)s.", missing=missing))
    given = {name: (value or "").strip() for name, value in row.items() if isinstance(value, str)}
    try:
        day = datetime.fromisoformat(given["received_on"])
    except ValueError as exc:
        raise FileRefused(line, Text("%(given)s is no date.", given=repr(given["received_on"]))) from exc
    tenant, invoice = given.get("tenant", ""), given.get("invoice", "")
    currency = given.get("currency", "").upper()
    used = currency or payer_currency(tenant, invoice)
    try:
        amount = cents(given["amount"], used)
    except Unreadable as exc:
        message = Text(
            "%(given)s is no amount in %(used)s. Enter a number, such as 12.50.", given=repr(given["amount"]), used=used
        )
        raise FileRefused(line, message) from exc
    try:
        as_credit = buys_credit(given.get("credit", ""))
    except Unreadable as exc:
        raise FileRefused(line, Text("%(given)s is neither true nor false.", given=repr(given["credit"]))) from exc
    if not 0 < abs(amount) <= MAX_CENTS:
        raise FileRefused(line, Text("%(given)s is out of range.", given=given["amount"]))
    if len(given["reference"]) > MAX_REFERENCE_LENGTH:
        raise FileRefused(
            line,
            Text(
                "The reference is longer than %(max_reference_length)s characters.",
                max_reference_length=MAX_REFERENCE_LENGTH,
            ),
        )
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
