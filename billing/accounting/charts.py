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
from inference_worker.contract.texts import Text, text_of
from tenants import audit, csv_tables
from tenants.actions import Conflict
from tenants.actions.common import FieldRefused, check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

COLUMNS = ("account", "tax_category", "tax_rate", "number", "tax_key", "with_tax")
MAX_LINES = 1000
MAX_BYTES = 200_000
_YES_NO = {"": False, "no": False, "yes": True}
_FIELD, _CODE = "content", "invalid"


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
            file_name, tax = self.row.file_name, f"{tax_category} {format_rate(rate_ppm)} %" if tax_category else "–"
            raise Conflict(
                Text(
                    "%(file_name)s has no account number for %(account)s with the tax %(tax)s. Add a line, import the"
                    " file again and repeat the export.",
                    file_name=file_name,
                    account=account.value,
                    tax=tax,
                )
            )
        return line


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
        slug = entity.slug
        raise Conflict(Text("The billing entity %(slug)s has no chart of accounts. Import one first.", slug=slug))
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
    lines: dict[tuple[str, str, int | None], ChartLine] = {}
    table = csv_tables.read_table(content.removeprefix("\ufeff").splitlines(), strict=True)
    try:
        _check_heading(table.fieldnames or ())
        for cells in table:
            line = _read_line(table.line_num, cells, account_digits)
            if line is None:
                continue
            if same := lines.get((line.account, line.tax_category, line.rate_ppm)):
                raise FieldRefused(
                    _FIELD, _CODE, Text("Line %(line)s has the same account and tax. Remove one.", line=str(same.line))
                )
            if len(lines) == MAX_LINES:
                raise FieldRefused(
                    _FIELD, _CODE, Text("The file has more than %(max_lines)s lines. Remove some.", max_lines=MAX_LINES)
                )
            lines[line.account, line.tax_category, line.rate_ppm] = line
    except csv_tables.Error as exc:
        raise FieldRefused(
            _FIELD,
            _CODE,
            Text("%(file_name)s: The CSV is malformed: %(error)s.", file_name=file_name, error=text_of(exc)),
        ) from exc
    except FieldRefused as exc:
        raise FieldRefused(
            _FIELD,
            _CODE,
            Text(
                "%(file_name)s, line %(line_num)s: %(error)s",
                file_name=file_name,
                line_num=str(table.line_num),
                error=text_of(exc),
            ),
        ) from exc
    missing = ", ".join(account for account in Account.values if account not in {key[0] for key in lines})
    if missing:
        message = Text(
            "%(file_name)s: There is no line for %(missing)s. Add a line for each account of the ledger.",
            file_name=file_name,
            missing=missing,
        )
        raise FieldRefused(_FIELD, _CODE, message)
    return list(lines.values())


def _check_heading(names: Iterable[str]) -> None:
    expected, given = ", ".join(COLUMNS), list(names)
    if unknown := ", ".join(sorted({*given} - {*COLUMNS})):
        raise FieldRefused(
            _FIELD, _CODE, Text("Unknown columns: %(unknown)s. Use %(expected)s.", unknown=unknown, expected=expected)
        )
    if absent := ", ".join(name for name in ("account", "number") if name not in given):
        raise FieldRefused(
            _FIELD, _CODE, Text("Missing columns: %(absent)s. Use %(expected)s.", absent=absent, expected=expected)
        )


def _read_line(line: int, cells: Mapping[Any, Any], account_digits: int) -> ChartLine | None:
    """Return the line, or None if its cells are empty."""
    if cells.get(None) or any(value is None for value in cells.values()):
        raise FieldRefused(_FIELD, _CODE, Text("The line has another number of cells than the heading."))
    values = {name: csv_tables.unguard_cell(str(cells.get(name, ""))).strip() for name in COLUMNS}
    if not any(values.values()):
        return None
    account, category, number = values["account"], values["tax_category"], values["number"]
    key, with_tax = values["tax_key"], values["with_tax"]
    if account not in Account.values:
        known = ", ".join(Account.values)
        raise FieldRefused(
            _FIELD, _CODE, Text("Unknown account %(account)s. Use %(known)s.", account=repr(account), known=known)
        )
    if category and category not in TaxCategory.values:
        known = ", ".join(TaxCategory.values)
        raise FieldRefused(
            _FIELD,
            _CODE,
            Text("Unknown tax category %(category)s. Use %(known)s.", category=repr(category), known=known),
        )
    rate = _read_rate(values["tax_rate"]) if values["tax_rate"] else None
    if rate is not None and not category:
        raise FieldRefused(_FIELD, _CODE, Text("A tax_rate needs a tax_category."))
    if not number:
        message = Text("The account number of %(account)s is missing. Enter it in the column number.", account=account)
        raise FieldRefused(_FIELD, _CODE, message)
    if not re.fullmatch(r"[0-9]+", number, re.ASCII) or len(number) - account_digits not in (0, 1):
        message = Text(
            "%(number)s is not an account number. Use %(account_digits)s digits, or one more for customers.",
            number=repr(number),
            account_digits=account_digits,
        )
        raise FieldRefused(_FIELD, _CODE, message)
    if not re.fullmatch(r"[0-9]{0,4}", key, re.ASCII):
        raise FieldRefused(_FIELD, _CODE, Text("%(key)s is not a tax key. Use at most 4 digits.", key=repr(key)))
    if with_tax not in _YES_NO:
        raise FieldRefused(_FIELD, _CODE, Text("with_tax is %(with_tax)s. Use yes or no.", with_tax=repr(with_tax)))
    if _YES_NO[with_tax] and (account == Account.TAX or not category):
        raise FieldRefused(_FIELD, _CODE, Text("with_tax needs a tax_category, and an account other than tax."))
    return ChartLine(line, account, category, rate, number, key, _YES_NO[with_tax])


def _read_rate(text: str) -> int:
    try:
        ppm = Decimal(text).scaleb(4)
    except InvalidOperation:
        ppm = Decimal("NaN")
    if not ppm.is_finite() or ppm != ppm.to_integral_value() or not 0 <= ppm <= PPM:
        message = Text("%(text)s is not a tax rate. Use percent from 0 to 100, such as 19 or 8.1.", text=repr(text))
        raise FieldRefused(_FIELD, _CODE, message)
    return int(ppm)
