"""Labels of invoice states, and balances due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import QuerySet, Sum
from django.utils.translation import gettext as _

from billing.models import Account, Invoice, LedgerEntry
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money

Kind = Literal["good", "warn", "bad", "info", ""]
_STATES: dict[str, tuple[str, Kind]] = {
    Invoice.State.DRAFT: (_lazy("Draft"), ""),
    Invoice.State.OPEN: (_lazy("Open"), "info"),
    Invoice.State.PAID: (_lazy("Paid"), "good"),
    Invoice.State.VOID: (_lazy("Void"), ""),
    Invoice.State.UNCOLLECTIBLE: (_lazy("Uncollectible"), "bad"),
}


@dataclass(frozen=True)
class State:
    """The label of a state, its color, and a sentence that explains it."""

    label: str
    kind: Kind
    message: str


def state_of(invoice: Invoice, today: date, owed: Money) -> State:
    """Return the state of an invoice with its entity. `today` is the date in the entity's time zone."""
    label, kind = _STATES[invoice.state]
    if invoice.is_credit_note and invoice.state != Invoice.State.DRAFT:
        return State(_("Cancellation") if invoice.cancels else _("Credit note"), "good", "")
    if invoice.state == Invoice.State.DRAFT:
        return State(label, kind, _("Updated until finalized. No number assigned yet."))
    if invoice.state == Invoice.State.OPEN and invoice.due_on is not None:
        if invoice.due_on < today:
            return State(
                _("Past due"),
                "warn",
                _("Was due %(day)s. %(owed)s outstanding.") % {"day": _day(invoice.due_on), "owed": owed.text},
            )
        return State(
            label, kind, _("Due %(day)s. %(owed)s outstanding.") % {"day": _day(invoice.due_on), "owed": owed.text}
        )
    message = {
        Invoice.State.PAID: _("Paid in full."),
        Invoice.State.VOID: _("Voided. No payment due."),
        Invoice.State.UNCOLLECTIBLE: _("The remaining balance was written off."),
    }
    return State(label, kind, message.get(Invoice.State(invoice.state), ""))


def today_of(invoice: Invoice, now: datetime) -> date:
    """Return the date in the time zone of the invoice's entity."""
    return now.astimezone(ZoneInfo(invoice.entity.time_zone)).date()


def _day(of: date) -> str:
    return day_text(of, "j F Y")


def owed_on(entries: QuerySet[LedgerEntry], invoices: Iterable[Invoice]) -> dict[int, Money]:
    """Return the balance due of each invoice, in one query of `entries`."""
    currencies = {row.pk: row.currency for row in invoices}
    ids = list(currencies)
    found = entries.filter(account=Account.RECEIVABLE, invoice__in=ids).order_by() if ids else entries.none()
    sums = dict(found.values_list("invoice_id").annotate(sum=Sum("nano")))
    return {pk: Money.nano(int(sums.get(pk, 0)), currency) for pk, currency in currencies.items()}


class OpenBalances(NamedTuple):
    """Open invoices, the balance due of each, and how many are past due."""

    invoices: list[Invoice]
    owed: dict[int, Money]
    past_due: int


def open_balances(entries: QuerySet[LedgerEntry], invoices: QuerySet[Invoice], now: datetime) -> OpenBalances:
    """Return the open ones of `invoices`, with their balances from `entries`. Call inside a scope of all tenants."""
    opened = invoices.filter(state=Invoice.State.OPEN).select_related("entity")
    rows = list(opened.only("pk", "due_on", "currency", "entity__time_zone"))
    late = sum(row.due_on is not None and row.due_on < today_of(row, now) for row in rows)
    return OpenBalances(rows, owed_on(entries, rows), late)


def signed_amounts(invoice: Invoice) -> tuple[Money, Money]:
    """Return the subtotal and the total, which are negative on credit notes."""
    sign = -1 if invoice.is_credit_note else 1
    return Money.cents(sign * invoice.subtotal, invoice.currency), Money.cents(sign * invoice.total, invoice.currency)


def balance_due_of(invoice: Invoice, owed: Money) -> Money | None:
    """Return the balance due. None: drafts and credit notes have none."""
    return None if invoice.is_credit_note or invoice.state == Invoice.State.DRAFT else owed
