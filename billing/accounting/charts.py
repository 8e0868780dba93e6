"""The chart of accounts: the account numbers of the ledger's accounts, from a CSV file.

A line applies to an account of the ledger, of one tax category and rate, of one category, or of all. The most specific
line is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from billing.currencies.amounts import PPM
from billing.models import Account, BillingEntity, ChartOfAccounts, TaxCategory
from tenants import audit, csv_tables
from tenants.actions import Conflict
from tenants.actions.common import FieldRefused, check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

COLUMNS = ("account", "tax_category", "tax_rate", "number", "tax_key", "with_tax")
MAX_LINES = 1000
MAX_BYTES = 200_000
_YES_NO = {"": False, "no": False, "yes": True}
_MAX_ACCOUNT_DIGITS = 9


class ChartLine(NamedTuple):
    """An account number. `tax_category` is empty for all; `rate_ppm` is None for all rates of the category.

    With `with_tax`, the bookkeeping program computes the tax from the amount with tax, by the account or the tax key.
    """

    line: int
    account: str
    tax_category: str
    rate_ppm: int | None
    number: str
    tax_key: str
    with_tax: bool


class AccountNumbers:
    """The lines of a chart of accounts, by account and tax."""

    def __init__(self, row: ChartOfAccounts) -> None:
        self.row = row
        lines = (ChartLine(**line) for line in row.lines)
        self._lines = {(line.account, line.tax_category, line.rate_ppm): line for line in lines}

    def find(self, account: Account, tax_category: str, rate_ppm: int) -> ChartLine:
        """Return the most specific line.

        Raises:
            Conflict: there is none.
        """
        keys = [(account.value, tax_category, rate_ppm), (account.value, tax_category, None), (account.value, "", None)]
        line = next((self._lines[key] for key in keys if key in self._lines), None)
        if line is None:
            raise Conflict(
                f"{self.row.file_name} has no account number for {describe(account, tax_category, rate_ppm)}."
                " Add a line, import the file again and repeat the export."
            )
        return line


def describe(account: str, tax_category: str, rate_ppm: int) -> str:
    """Return the ledger's account and the tax as text."""
    return f"{account} with tax {tax_category} {format_rate(rate_ppm)} %" if tax_category else f"{account} without tax"


def format_rate(rate_ppm: int) -> str:
    """Return a rate in percent, without trailing zeros: 19, 8.1."""
    return f"{Decimal(rate_ppm).scaleb(-4).normalize():f}"


def render_chart(row: ChartOfAccounts | None) -> str:
    """Return the lines as CSV, or a line without a number for each account of the ledger."""
    if row is None:
        return csv_tables.as_csv(COLUMNS, [[account.value, *[""] * (len(COLUMNS) - 1)] for account in Account])
    lines = (ChartLine(**line) for line in row.lines)
    return csv_tables.as_csv(
        COLUMNS,
        [
            [
                *(line.account, line.tax_category, "" if line.rate_ppm is None else format_rate(line.rate_ppm)),
                *(line.number, line.tax_key, "yes" if line.with_tax else ""),
            ]
            for line in lines
        ],
    )


def require_chart(entity: BillingEntity) -> AccountNumbers:
    """Return the entity's chart of accounts.

    Raises:
        Conflict: it has none.
    """
    row = ChartOfAccounts.objects.filter(entity=entity).first()
    if row is None:
        raise Conflict(f"The billing entity {entity.slug} has no chart of accounts. Import one first.")
    return AccountNumbers(row)


def do_set_chart(entity: BillingEntity, *, file_name: str, content: str, **fields: Any) -> ChartOfAccounts:
    """Replace the entity's chart of accounts by a CSV file. `fields` are the other fields of `ChartOfAccounts`.

    Raises:
        FieldRefused: a line is not valid, or an account of the ledger has none. The message names file and line.
    """
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.select_for_update(no_key=True).get(pk=entity.pk)
        row = ChartOfAccounts.objects.filter(entity=entity).first()
        before = None if row is None else audit.serialize_for_audit(row)
        row = row or ChartOfAccounts(entity=entity)
        for name, value in fields.items():
            setattr(row, name, value)
        row.file_name = file_name
        row.lines = [line._asdict() for line in read_chart(file_name, content, row.account_digits)]
        check(row)
        row.save()
        after = audit.serialize_for_audit(row)
        audit.record("chart_of_accounts.updated", row, tenant_id=None, before=before, after=after)
    return row


def read_chart(file_name: str, content: str, account_digits: int) -> list[ChartLine]:
    """Return the lines of a CSV file with the columns COLUMNS.

    Raises:
        FieldRefused: a line is not valid, or an account of the ledger has none. The message names file and line.
    """
    try:
        lines = list(_read(file_name, content.removeprefix("\ufeff"), account_digits))
    except csv_tables.Error as exc:
        raise _refusal(file_name, None, f"The CSV is malformed: {exc}.") from exc
    missing = [account.value for account in Account if account not in {line.account for line in lines}]
    if missing:
        raise _refusal(file_name, None, f"There is no line for {', '.join(missing)}. Add one for each account.")
    return lines


def _read(file_name: str, content: str, account_digits: int) -> Iterable[ChartLine]:
    table = csv_tables.read_table(content.splitlines(), strict=True)
    if unknown := sorted({*(table.fieldnames or ())} - {*COLUMNS}):
        raise _refusal(file_name, 1, f"Unknown column {unknown[0]!r}. Use {', '.join(COLUMNS)}.")
    if absent := [name for name in ("account", "number") if name not in (table.fieldnames or ())]:
        raise _refusal(file_name, 1, f"The column {absent[0]!r} is missing. Use {', '.join(COLUMNS)}.")
    seen: dict[tuple[str, str, int | None], int] = {}
    for cells in table:
        number = table.line_num
        line = _line(file_name, number, cells, account_digits)
        if line is None:
            continue
        key = (line.account, line.tax_category, line.rate_ppm)
        if key in seen:
            raise _refusal(file_name, number, f"Line {seen[key]} has the same account and tax. Remove one.")
        if len(seen) == MAX_LINES:
            raise _refusal(file_name, number, f"The file has more than {MAX_LINES} lines. Remove some.")
        seen[key] = number
        yield line


def _line(file_name: str, number: int, cells: Mapping[Any, Any], account_digits: int) -> ChartLine | None:
    if cells.get(None) or any(value is None for value in cells.values()):
        raise _refusal(file_name, number, "The line has another number of cells than the heading.")
    values = {name: csv_tables.unguard_cell(str(cells.get(name, ""))).strip() for name in COLUMNS}
    if not any(values.values()):
        return None
    account, category, text = values["account"], values["tax_category"], values["tax_rate"]
    if account not in Account.values:
        raise _refusal(file_name, number, f"Unknown account {account!r}. Use {', '.join(Account.values)}.")
    if category and category not in TaxCategory.values:
        raise _refusal(file_name, number, f"Unknown tax category {category!r}. Use {', '.join(TaxCategory.values)}.")
    rate = _rate(file_name, number, text) if text else None
    if rate is not None and not category:
        raise _refusal(file_name, number, "A tax_rate needs a tax_category.")
    if not values["number"]:
        raise _refusal(file_name, number, f"The account number of {account} is missing. Enter it in the column number.")
    digits = {account_digits, min(account_digits + 1, _MAX_ACCOUNT_DIGITS)}
    if not re.fullmatch(r"[0-9]+", values["number"], re.ASCII) or len(values["number"]) not in digits:
        expected = f"{account_digits} digits, or one more for accounts of customers"
        raise _refusal(file_name, number, f"{values['number']!r} is not an account number. Use {expected}.")
    if not re.fullmatch(r"[0-9]{0,4}", values["tax_key"], re.ASCII):
        raise _refusal(file_name, number, f"{values['tax_key']!r} is not a tax key. Use at most 4 digits.")
    if values["with_tax"] not in _YES_NO:
        raise _refusal(file_name, number, f"with_tax is {values['with_tax']!r}. Use yes or no.")
    with_tax = _YES_NO[values["with_tax"]]
    if with_tax and (account == Account.TAX or not category):
        raise _refusal(file_name, number, "with_tax needs a tax_category, and an account other than tax.")
    return ChartLine(number, account, category, rate, values["number"], values["tax_key"], with_tax)


def _rate(file_name: str, number: int, text: str) -> int:
    try:
        ppm = Decimal(text).scaleb(4)
    except InvalidOperation:
        ppm = Decimal("NaN")
    if not ppm.is_finite() or ppm != ppm.to_integral_value() or not 0 <= ppm <= PPM:
        raise _refusal(file_name, number, f"{text!r} is not a tax rate. Use percent from 0 to 100, such as 19 or 8.1.")
    return int(ppm)


def _refusal(file_name: str, line: int | None, text: str) -> FieldRefused:
    place = file_name if line is None else f"{file_name}, line {line}"
    return FieldRefused("content", "invalid", f"{place}: {text}")
