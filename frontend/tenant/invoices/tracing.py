"""The usage events behind one line of an invoice, in pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.utils.translation import gettext as _

from billing.metering.archives import require_usage
from billing.metering.usage import instant
from billing.models import Invoice, InvoiceLine
from billing.rates.pricing import Component
from frontend.core.backend_messages import translate_message
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.invoices.document import cents_of, format_rounding, note_of
from tenants.actions import Conflict

PAGE_SIZE = 50
# NOTE: the view includes corrections of events, like the sum of the line.
_PAGE = """
SELECT admitted_at, request_id, execution, tokens, femto FROM billing_rated_line
WHERE tenant_id = %(tenant)s AND invoice_period = %(period)s AND price_id = %(price)s
    AND admitted_at >= %(first)s AND admitted_at <= %(last)s
    AND (%(at)s::timestamptz IS NULL
        OR (admitted_at, request_id, execution, tokens) < (%(at)s, %(request)s, %(execution)s, %(tokens)s))
ORDER BY admitted_at DESC, request_id DESC, execution DESC, tokens DESC LIMIT %(most)s
"""


@dataclass(frozen=True)
class Event:
    at: datetime
    request_id: str
    url: str
    execution: int
    tokens: int
    cost: Money

    @property
    def is_correction(self) -> bool:
        return self.tokens < 0


def trace_line(ctx: PageContext, invoice: Invoice, line: InvoiceLine, here: str, request_name: str) -> dict[str, Any]:
    """Return the usage events of a line. Call inside `ctx.scope()`.

    `here` is the URL of the page; `request_name` is the URL name of one request.
    """
    if line.first_at is None or line.last_at is None or line.nano_per_million is None:
        raise ValueError("this line has no usage")
    cursor, error = _read(ctx.query.get("cursor", "")), ""
    rows = _rows(invoice, line, cursor)
    try:
        require_usage(invoice.period_id)
    except Conflict as exc:
        rows, error = [], translate_message(exc)
    sign, currency = -1 if invoice.is_credit_note and not invoice.cancels else 1, invoice.currency
    events = tuple(
        Event(at, name, _request(ctx, request_name, name), execution, sign * tokens, Money(sign * int(femto), currency))
        for at, name, execution, tokens, femto in rows[:PAGE_SIZE]
    )
    exact, amount, residue = cents_of(line, currency)
    return {
        "line": line,
        "label": translate_message(Component(line.component).invoice_label),
        "note": note_of(line),
        "price": Money.nano(line.nano_per_million, currency),
        "exact": exact,
        "amount": amount,
        "rounding": _("rounding %(residue)s") % {"residue": format_rounding(residue)}
        if residue.femto
        else _("no rounding"),
        "events": events,
        "page_tokens": sum(event.tokens for event in events),
        "page_cost": Money(sum(event.cost.femto for event in events), currency),
        "older_url": f"{here}?{urlencode({'cursor': _write(rows[PAGE_SIZE - 1])})}" if len(rows) > PAGE_SIZE else "",
        "newest_url": here if cursor else "",
        "error": error,  # the reason why events cannot be shown
    }


def _request(ctx: PageContext, route: str, name: str) -> str:
    """Return the URL of a request. A prompt of a request with several prompts leads to that request."""
    return ctx.url(route, name.partition(".")[0]) if route else ""


def _rows(invoice: Invoice, line: InvoiceLine, cursor: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    context = {
        "tenant": invoice.tenant_id,
        "period": invoice.period_id,
        "price": line.price_id,
        "first": line.first_at,
        "last": line.last_at,
        "most": PAGE_SIZE + 1,
        "at": None,
        "request": None,
        "execution": None,
        "tokens": None,
    }
    with connection.cursor() as database:
        database.execute(_PAGE, {**context, **cursor})
        found: list[tuple[Any, ...]] = database.fetchall()
    return found


def _write(row: tuple[Any, ...]) -> str:
    at, name, execution, tokens, _ = row
    text = f"{at.astimezone(UTC).isoformat()} {name} {execution} {tokens}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read(cursor: str) -> dict[str, Any]:
    """Return the position in a cursor; empty if the cursor is invalid."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        at, name, execution, tokens = text.split(" ")
        numbers = int(execution), int(tokens)
        if "\0" in name or any(abs(number) >= 2**31 for number in numbers):
            return {}
        return {"at": instant(at), "request": name, "execution": numbers[0], "tokens": numbers[1]}
    except (ValueError, binascii.Error):
        return {}
