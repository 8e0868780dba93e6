"""The statement of account of a tenant, for its own page and that of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from django.utils.translation import gettext as _

from billing.accounting.booking_days import today_of
from billing.accounting.statements import Statement, StatementLine, statement_as_csv
from billing.invoicing.statements import (
    CustomerAccount,
    find_account,
    statement_as_pdf,
    statement_file_name,
    statement_of,
)
from billing.models import Payment
from billing.payments.receipts import read_receipt, receipt_as_pdf
from frontend.core.backend_messages import translate_message
from frontend.core.day_field import read_day
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.core.rendering import redirect_with_message
from tenants.actions import ActionRefused
from tenants.models import Tenant

STATEMENT_FILES = {"csv": "text/csv; charset=utf-8", "pdf": "application/pdf"}
_TYPES = {
    "invoice": _lazy("Invoice"),
    "purchase": _lazy("Purchase of credit"),
    "debit_note": _lazy("Debit note"),
    "correction": _lazy("Credit note"),
    "credit_note": _lazy("Credit note"),
    "cancellation": _lazy("Cancellation"),
    "payment": _lazy("Payment"),
    "refund": _lazy("Refund"),
    "write_off": _lazy("Written off"),
    "write_off_reversed": _lazy("Write-off reversed"),
    "returned_credit": _lazy("Returned as credit"),
    "void": _lazy("Reversed"),
    "other": _lazy("Correction"),
}


@dataclass(frozen=True)
class ShownStatement:
    """A statement of the days in the query string. With an error, it is that of this year."""

    account: CustomerAccount
    statement: Statement
    error: str


def read_shown(ctx: PageContext, tenant: Tenant) -> ShownStatement:
    """Return the statement of the days in the query string."""
    account = find_account(tenant)
    today, error = today_of(account.entity, ctx.now), ""
    with ctx.scope():
        try:
            last = read_day(ctx.query.get("to", "")) or today
            first = read_day(ctx.query.get("from", "")) or _start_of_year(last)
            return ShownStatement(account, statement_of(account, first, last, ctx.now), "")
        except ValueError:
            error = _("Enter both dates as YYYY-MM-DD.")
        except ActionRefused as exc:
            error = translate_message(exc)
        return ShownStatement(account, statement_of(account, _start_of_year(today), today, ctx.now), error)


def _start_of_year(day: date) -> date:
    return day.replace(month=1, day=1)


def describe(
    shown: ShownStatement,
    *,
    invoice_url: Callable[[int], str],
    receipt_url: Callable[[int], str],
    file_url: Callable[[str], str],
) -> dict[str, Any]:
    """Return the statement for its template."""
    statement = shown.statement
    currency = statement.currency
    days = urlencode({"from": statement.first.isoformat(), "to": statement.last.isoformat()})

    def row(line: StatementLine) -> dict[str, Any]:
        return {
            "line": line,
            "label": _TYPES[line.line_type],
            "amount": Money.cents(line.amount, currency),
            "balance": Money.cents(line.balance, currency),
            "url": invoice_url(line.invoice_id) if line.invoice_id else "",
            "receipt_url": receipt_url(line.payment_id) if line.payment_id else "",
        }

    return {
        "first": statement.first,
        "last": statement.last,
        "from": statement.first.isoformat(),
        "to": statement.last.isoformat(),
        "zone": shown.account.entity.time_zone,
        "seller": shown.account.entity.name,
        "error": shown.error,
        "opening": Money.cents(statement.opening, currency),
        "charged": Money.cents(statement.charged, currency),
        "paid": Money.cents(statement.paid, currency),
        "closing": Money.cents(statement.closing, currency),
        "rows": [row(line) for line in statement.lines],
        "files": [(name.upper(), f"{file_url(name)}?{days}") for name in STATEMENT_FILES],
    }


def statement_file(ctx: PageContext, tenant: Tenant, form: str, back: str) -> HttpResponse:
    """Return the statement as a file. If the days are not valid, the page `back` shows it."""
    shown = read_shown(ctx, tenant)
    if shown.error:
        return redirect_with_message(ctx, back, shown.error, failed=True)
    statement = shown.statement
    body = statement_as_csv(statement) if form == "csv" else statement_as_pdf(shown.account, statement)
    return _attachment(body, STATEMENT_FILES[form], statement_file_name(statement, form))


def receipt_file(ctx: PageContext, payment: Payment, tenant: Tenant) -> HttpResponse:
    """Return the receipt of a payment as PDF."""
    account = find_account(tenant)
    with ctx.scope():
        receipt = read_receipt(payment)
    return _attachment(receipt_as_pdf(account, receipt), STATEMENT_FILES["pdf"], receipt.file_name)


def _attachment(body: bytes | str, content_type: str, name: str) -> HttpResponse:
    answer = HttpResponse(body, content_type=content_type)
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer
