"""Payments from CSV files in a directory, exported by a bank or written manually.

Columns: reference, amount, currency (of the tenant, if empty), received_on (a date), and invoice or tenant; `credit`,
if true, buys credit; note.
Rename a file into the directory, so that it is never read incomplete. A row that was recorded before is skipped, so a
file may be repeated.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import structlog

from billing.currencies.amounts import MAX_CENTS
from billing.payments import Unreadable, buys_credit, cents
from billing.payments.recording import Received, do_record_payment, payer_currency
from tenants import csv_tables
from tenants.actions import ActionRefused

log = structlog.get_logger(__name__)
MAX_REFERENCE_LENGTH = 200
_COLUMNS = {"reference", "amount", "received_on"}


class FileDrop:
    """A provider whose messages are files. Every process that may write to the directory is trusted."""

    name = "file"

    def read_file(self, body: bytes, headers: Mapping[str, str]) -> list[Received]:
        try:
            rows = list(csv_tables.read_table(io.StringIO(body.decode("utf-8-sig"), newline="")))
        except (UnicodeDecodeError, csv_tables.Error) as exc:
            raise Unreadable(f"no CSV: {exc}") from exc
        return [self._payment(number, row) for number, row in enumerate(rows, 2)]

    def _payment(self, number: int, row: dict[str, str | None]) -> Received:
        if any(not value.isprintable() for value in row.values() if isinstance(value, str)):
            raise Unreadable(f"line {number}: remove control characters")
        if missing := sorted(name for name in _COLUMNS if not row.get(name)):
            raise Unreadable(f"line {number}: {', '.join(missing)} missing")
        given = {name: (value or "").strip() for name, value in row.items() if isinstance(value, str)}
        try:
            day = datetime.fromisoformat(given["received_on"])
        except ValueError as exc:
            raise Unreadable(f"line {number}: {given['received_on']!r} is no date") from exc
        tenant, invoice = given.get("tenant", ""), given.get("invoice", "")
        currency = given.get("currency", "").upper()
        amount = cents(given["amount"], currency or payer_currency(tenant, invoice))
        if not 0 < abs(amount) <= MAX_CENTS:
            raise Unreadable(f"line {number}: {given['amount']} is out of range")
        if len(given["reference"]) > MAX_REFERENCE_LENGTH:
            raise Unreadable(f"line {number}: the reference is longer than {MAX_REFERENCE_LENGTH} characters")
        return Received(
            self.name,
            given["reference"],
            amount,
            day.replace(tzinfo=day.tzinfo or UTC),
            tenant=tenant,
            invoice=invoice,
            as_credit=buys_credit(given.get("credit", "")),
            note=given.get("note", "")[:200],
            currency=currency,
        )


def collect(directory: Path) -> int:
    """Record the payments of the files in `folder`. Return how many were new.

    A file is moved to `done`, or to `failed` with a file of errors if a row could not be recorded.
    """
    recorded = 0
    for path in sorted(directory.glob("*.csv")):
        errors: list[str] = []
        try:
            payments = FileDrop().read_file(path.read_bytes(), {})
        except Unreadable as exc:
            payments, errors = [], [str(exc)]
        for payment in payments:
            try:
                recorded += do_record_payment(payment)[1]
            except ActionRefused as exc:
                errors.append(str(exc))
        _put_away(path, errors)
    return recorded


def _put_away(path: Path, errors: list[str]) -> None:
    place = path.parent / ("failed" if errors else "done")
    place.mkdir(exist_ok=True)
    if errors:
        (place / f"{path.name}.txt").write_text("\n".join(errors) + "\n", encoding="utf-8")
        log.error("payment_file_rejected", file=path.name, errors=errors)
    path.replace(place / path.name)
