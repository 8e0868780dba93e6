"""Files of the journal: CSV with the ledger's accounts, and DATEV with the accounts of the chart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from billing.accounting import datev
from billing.accounting.charts import format_rate, require_chart
from billing.accounting.journal import JournalEntry, Posting, read_postings
from billing.currencies.amounts import NANO_DIGITS, decimal, minor_digits
from billing.models import BillingEntity
from tenants import csv_tables

_IN_MEMORY = 2**20  # bytes of a file; a larger one is on disk
_HEADING = (
    *("date", "booking", "tenant", "document", "account", "tax_category", "tax_rate"),
    *("debit", "credit", "currency", "text"),
)


class JournalFile(NamedTuple):
    """A complete file, at its start. It is deleted when it is closed."""

    content: IO[bytes]
    size: int
    name: str


def export_journal(entity: BillingEntity, month: str, file_format: str) -> JournalFile:
    """Return the journal of a month, such as 2026-11. Call in a scope of all tenants.

    The file is complete before its first byte is sent, so an error leaves no part of it.

    Args:
        file_format: one of FILE_FORMATS.

    Raises:
        Conflict: for DATEV, the chart of accounts or an exchange rate is missing. The message names it.
    """
    name, encode = FILE_FORMATS[file_format]
    # The caller closes the file.
    content = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    try:
        content.writelines(encode(entity, month))
        size = content.tell()
        content.seek(0)
    except BaseException:
        content.close()
        raise
    return JournalFile(content, size, name.format(entity=entity.slug, month=month))


def _csv(entity: BillingEntity, month: str) -> Iterator[bytes]:
    rows = (_row(posting, entry) for posting in read_postings(entity, month) for entry in posting.entries)
    return (line.encode() for line in csv_tables.csv_lines(_HEADING, rows))


def _row(posting: Posting, entry: JournalEntry) -> list[csv_tables.Value]:
    amount = decimal(abs(entry.nano), NANO_DIGITS, minor_digits(posting.currency))
    return [
        *(posting.on, posting.key, posting.tenant, posting.document, entry.account.value, entry.tax_category),
        format_rate(entry.rate_ppm) if entry.tax_category else "",
        *(amount if entry.nano > 0 else "", amount if entry.nano < 0 else ""),
        *(posting.currency, posting.text),
    ]


def _datev(entity: BillingEntity, month: str) -> Iterator[bytes]:
    return datev.encode_journal(entity, require_chart(entity), month, read_postings(entity, month))


FILE_FORMATS: dict[str, tuple[str, Callable[[BillingEntity, str], Iterator[bytes]]]] = {
    "csv": ("journal-{entity}-{month}.csv", _csv),
    "datev": ("EXTF_Buchungsstapel_{entity}_{month}.csv", _datev),
}
