"""Files of payments: their import, the payments to assign, and the newest bank statements."""

from __future__ import annotations

from typing import Any

from django.forms import Form
from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.models import BankEntry, BankStatement
from billing.payments.bank_files import PaymentImport, do_assign_entry, do_dismiss_entry, do_import_payments
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import day_text
from frontend.core.layout import Breadcrumb
from frontend.core.numbers import Money
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.operator.receivables import forms
from tenants.request_costs import HEAVY_COST

MAX_ENTRIES = 50
MAX_STATEMENTS = 20


def entries(ctx: PageContext) -> dict[str, Any]:
    """Return the oldest payments to assign, and the number of all."""
    rows = BankEntry.objects.filter(state=BankEntry.State.OPEN)
    found = list(rows.select_related("statement").order_by("pk")[: MAX_ENTRIES + 1])
    return {
        "rows": [(row, Money.cents(row.cents, row.statement.currency)) for row in found[:MAX_ENTRIES]],
        "number": rows.count() if len(found) > MAX_ENTRIES else len(found),
    }


def statements(ctx: PageContext) -> list[tuple[BankStatement, Money, Money]]:
    """Return the newest bank statements with their balances."""
    rows = BankStatement.objects.order_by("-pk")[:MAX_STATEMENTS]
    return [(row, Money.cents(row.opening, row.currency), Money.cents(row.closing, row.currency)) for row in rows]


@operator_page(methods=FORM, step_up=True, cost=HEAVY_COST)
def import_file(ctx: PageContext) -> HttpResponse:
    back = ctx.url("operator-receivables")
    return form_view(
        ctx,
        _("Import payments"),
        forms.ImportForm(bound_data(ctx), ctx.request.FILES or None),
        lambda data: do_import_payments(data["file"].name, data["file"].read()),
        submit=_("Import payments"),
        back=back,
        message=_describe_import,
        effect=_("A file with an error books nothing. What was recorded before is skipped."),
        breadcrumbs=_breadcrumbs(back),
    )


def _describe_import(found: PaymentImport) -> str:
    booked = ngettext("%(number)s payment was recorded.", "%(number)s payments were recorded.", found.booked)
    parts = [booked % {"number": found.booked}]
    if found.open:
        text = ngettext("%(number)s payment is to be assigned.", "%(number)s payments are to be assigned.", found.open)
        parts.append(text % {"number": found.open})
    if found.known:
        text = ngettext("%(number)s payment was known.", "%(number)s payments were known.", found.known)
        parts.append(text % {"number": found.known})
    if found.known_statements:
        text = ngettext(
            "%(number)s bank statement was imported before.",
            "%(number)s bank statements were imported before.",
            found.known_statements,
        )
        parts.append(text % {"number": found.known_statements})
    return " ".join(parts)


@operator_page(methods=FORM, step_up=True)
def assign(ctx: PageContext) -> HttpResponse:
    entry, back = _entry(ctx), ctx.url("operator-receivables")
    return form_view(
        ctx,
        _("Assign payment"),
        forms.AssignForm(bound_data(ctx)),
        lambda data: do_assign_entry(entry, **data),
        submit=_("Record payment"),
        back=back,
        message=lambda _done: _("The payment was recorded."),
        effect=_describe(entry),
        breadcrumbs=_breadcrumbs(back),
    )


@operator_page(methods=FORM, step_up=True)
def dismiss(ctx: PageContext) -> HttpResponse:
    entry, back = _entry(ctx), ctx.url("operator-receivables")
    return form_view(
        ctx,
        _("Dismiss payment"),
        Form(bound_data(ctx)),
        lambda _data: do_dismiss_entry(entry),
        submit=_("Dismiss"),
        back=back,
        message=lambda _done: _("The payment was dismissed."),
        effect=_("The payment is not booked, which cannot be undone: %(payment)s") % {"payment": _describe(entry)},
        danger=True,
        breadcrumbs=_breadcrumbs(back),
    )


def _entry(ctx: PageContext) -> BankEntry:
    rows = BankEntry.objects.filter(state=BankEntry.State.OPEN).select_related("statement")
    return ctx.get(lambda: rows.filter(pk=ctx.arguments["bank_entry"]))


def _describe(entry: BankEntry) -> str:
    """Return the amount, the day, the payer and the remittance information of a payment."""
    amount = Money.cents(entry.cents, entry.statement.currency)
    parts = (amount.text, day_text(entry.booked_on), entry.payer, entry.remittance)
    return " · ".join(part for part in parts if part)


def _breadcrumbs(back: str) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Receivables"), back),)
