"""Re-ratings: the list, a draft by one operator, its changes by tenant and invoice, and the approval by another."""

from __future__ import annotations

from typing import Any

from django.forms import Form
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.currencies.amounts import DEFAULT_CURRENCY, NANO_DIGITS, decimal
from billing.invoicing.reratings import do_apply_rerating, do_discard_rerating, do_propose_rerating, preview_rerating
from billing.models import Rerating
from billing.rates.price_book import parse
from frontend.core.backend_messages import translate_message
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.labels import choice_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.lists import keyset_page
from frontend.core.numbers import Money
from frontend.core.page_context import FORM, PageContext, first_or_404, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.prices.page import currency_in, tenant_names
from frontend.operator.reratings.forms import RerateForm
from tenants.actions import Conflict

MAX_ROWS = 200
PAGE_SIZE = 30
_LEVELS = {Rerating.State.DRAFT: "warn", Rerating.State.APPLIED: "good", Rerating.State.DISCARDED: ""}


def _rerating(ctx: PageContext) -> Rerating:
    """Return the re-rating in the URL, or raise Http404. Call inside `ctx.scope()`."""
    rows = Rerating.objects.select_related("book", "created_by", "decided_by")
    return ctx.once("operator-reratings-detail", lambda: first_or_404(rows.filter(pk=ctx.arguments["rerating"])))


def _row(row: Rerating, names: dict[int, str]) -> dict[str, Any]:
    owner = (
        row.book.name
        if row.tenant_id is None
        else _("%(tenant_id)s’s own prices") % {"tenant_id": names.get(row.tenant_id, "a tenant")}
    )
    level = _LEVELS[Rerating.State(row.state)]
    return {"rerating": row, "owner": owner, "state": choice_label(row.get_state_display()), "level": level}


def listing(ctx: PageContext) -> dict[str, Any]:
    rows = Rerating.objects.select_related("book", "created_by", "decided_by").defer("body")
    found = keyset_page(ctx, rows, ctx.url("operator-reratings"), PAGE_SIZE)
    names = tenant_names([row.tenant_id for row in found.rows])
    return {"rows": [_row(row, names) for row in found.rows], "older_url": found.older_url}


def changes(ctx: PageContext) -> dict[str, Any]:
    """Return the change of each invoice, the largest first, and the sums."""
    try:
        rows = preview_rerating(_rerating(ctx))
    except Conflict as exc:
        return {"refused": translate_message(exc)}
    rows.sort(key=lambda row: -abs(row.subtotal))
    currency = rows[0].invoice.currency if rows else DEFAULT_CURRENCY  # all have that of the book
    amounts = [(row, *(Money.cents(cents, currency) for cents in (row.subtotal, row.total))) for row in rows[:MAX_ROWS]]
    return {
        "rows": amounts,
        "more": max(0, len(rows) - MAX_ROWS),
        "credited": Money.cents(sum(row.subtotal for row in rows if row.subtotal < 0), currency),
        "debited": Money.cents(sum(row.subtotal for row in rows if row.subtotal > 0), currency),
        "left": sum(row.note is None and row.subtotal != 0 for row in rows),
    }


LIST_PANELS = Panels(
    "operator-reratings-panel",
    (Panel("list", _lazy("Re-ratings"), "operator/reratings/page.html#list", listing, every=0),),
)
DETAIL_PANELS = Panels(
    "operator-reratings-detail-panel",
    (
        Panel(
            "changes",
            _lazy("Changes by invoice"),
            "operator/reratings/detail.html#changes",
            changes,
            every=0,
            lazy=True,
        ),
    ),
)


@operator_page()
def reratings(ctx: PageContext) -> HttpResponse:
    return render_page(
        ctx, "operator/reratings/page.html", _("Re-ratings"), panels=LIST_PANELS, breadcrumbs=_crumbs(ctx)[:1]
    )


@operator_page()
def rerating(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _rerating(ctx)
        context = _row(row, tenant_names([row.tenant_id])) | {"currency": currency_in(row)}
    is_draft = row.state == Rerating.State.DRAFT
    prices = [(price, decimal(price.nano_per_million, NANO_DIGITS, 2)) for price in parse(row.body).prices[:MAX_ROWS]]
    context |= {"is_draft": is_draft, "is_own": is_draft and row.created_by_id == ctx.user.pk, "prices": prices}
    breadcrumbs = _crumbs(ctx)
    title = _("Re-rating %(number)s") % {"number": row.pk}
    return render_page(
        ctx, "operator/reratings/detail.html", title, panels=DETAIL_PANELS, breadcrumbs=breadcrumbs, **context
    )


@operator_page(methods=FORM)
def draft(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("New re-rating"),
        RerateForm(bound_data(ctx)),
        lambda data: do_propose_rerating(
            data["text"],
            data["since"],
            data["until"],
            reason=data["note"],
            book=data["book"],
            tenant=data["tenant"],
            created_by=ctx.user,
        ),
        submit=_("Create draft"),
        back=ctx.url("operator-reratings"),
        message=lambda _done: _("Draft created. Another operator must apply it."),
        then=lambda made: ctx.url("operator-reratings-detail", made.pk),
        breadcrumbs=_crumbs(ctx),
    )


@operator_page(methods=FORM, step_up=True)
def apply(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _rerating(ctx)
    return form_view(
        ctx,
        _("Apply re-rating %(number)s") % {"number": row.pk},
        Confirm(str(row.pk), bound_data(ctx)),
        lambda _: do_apply_rerating(row, by=ctx.user),
        submit=_("Apply"),
        back=ctx.url("operator-reratings-detail", row.pk),
        message=lambda made: (
            _("Re-rating %(number)s was applied. Its notes are issued within minutes.") % {"number": made.pk}
        ),
        breadcrumbs=_crumbs(ctx),
        effect=_(
            "Each affected invoice gets a credit note or a debit note, which is emailed to the tenant. This "
            "cannot be undone. Another re-rating can correct it."
        ),
        danger=True,
    )


@operator_page(methods=FORM, step_up=True)
def discard(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _rerating(ctx)
    return form_view(
        ctx,
        _("Discard re-rating %(number)s") % {"number": row.pk},
        Form(bound_data(ctx)),
        lambda _: do_discard_rerating(row, by=ctx.user),
        submit=_("Discard"),
        back=ctx.url("operator-reratings-detail", row.pk),
        message=lambda made: _("Re-rating %(number)s was discarded.") % {"number": made.pk},
        breadcrumbs=_crumbs(ctx),
        effect=_("The draft stays readable. It can no longer be applied."),
        danger=True,
    )


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    book = Breadcrumb(_("Price book"), ctx.url("operator-prices"))
    return book, Breadcrumb(_("Re-ratings"), ctx.url("operator-reratings"))


SCREEN = ConsoleScreen("operator-reratings", _lazy("Re-ratings"))
urlpatterns = [
    path("operator/reratings/", reratings, name="operator-reratings"),
    path("operator/reratings/new", draft, name="operator-reratings-new"),
    LIST_PANELS.operator_url("operator/reratings/"),
    path("operator/reratings/<int:rerating>/", rerating, name="operator-reratings-detail"),
    path("operator/reratings/<int:rerating>/apply", apply, name="operator-reratings-apply"),
    path("operator/reratings/<int:rerating>/discard", discard, name="operator-reratings-discard"),
    DETAIL_PANELS.operator_url("operator/reratings/<int:rerating>/"),
]
