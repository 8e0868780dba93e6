"""Charts of accounts and DATEV files for tests of the journal."""

from __future__ import annotations

import csv
from typing import Any

from billing.accounting.charts import do_set_chart
from billing.models import BillingEntity, ChartOfAccounts

CHART = """account,tax_category,tax_rate,number,tax_key,with_tax
receivable,,,10000,,
cash,,,1200,,
deposits,,,1718,,
credits,,,1710,,
promotions,,,4600,,
commitments,,,1711,,
revenue,,,8200,,
revenue,S,19,8400,,yes
revenue,AE,,8336,,
tax,S,19,1776,40,
breakage,,,2700,,
bad_debt,,,2400,,
"""


def set_chart(entity: BillingEntity, content: str = CHART, **fields: Any) -> ChartOfAccounts:
    values = {"file_name": "accounts.csv", "consultant": 1001, "client": 7} | fields
    return do_set_chart(entity, content=content, **values)


def read_datev(content: bytes) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the lines of a DATEV file by their headings, as DATEV's import reads them."""
    rows = list(csv.reader(content.decode("cp1252").splitlines(), delimiter=";"))
    header, heading, *lines = rows
    assert all(len(line) == len(heading) == 125 for line in lines)
    return header, [dict(zip(heading, line, strict=True)) for line in lines]
