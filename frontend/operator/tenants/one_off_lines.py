"""One-off lines of a tenant: the list, and the forms that add, end and remove them."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.forms import Form
from django.http import HttpResponse
from django.utils.translation import gettext as _

from billing.invoicing.one_off_lines import do_add_one_off_line, do_end_one_off_line, do_remove_one_off_line
from billing.ledger.open_months import newest_invoiced_month
from billing.models import OneOffLine
from billing.pricing.currencies import currency_of
from frontend.core.form_view import bound_data
from frontend.core.numbers import Money
from frontend.core.page_context import FORM, PageContext, first_or_404, operator_page
from frontend.operator.billing.forms import cents_of
from frontend.operator.tenants import charge_forms as forms
from frontend.operator.tenants import detail
from frontend.operator.tenants.tenant_form import tenant_form_view
from tenants.models import Tenant

MAX_LINES = 50


def one_off_lines(ctx: PageContext) -> dict[str, Any]:
    """Return the tenant's one-off lines that are not billed, and those that repeat in this month or later ones."""
    tenant = detail.tenant_of(ctx)
    currency, newest = currency_of(tenant.pk), newest_invoiced_month(tenant.pk)
    rows = [
        (row, Money.cents(row.cents, currency), row.last_month != "" and row.month <= newest)
        for row in _lines(ctx)[:MAX_LINES]
    ]
    return {"tenant": tenant, "rows": rows}


def _lines(ctx: PageContext) -> QuerySet[OneOffLine]:
    rows = OneOffLine.objects.for_tenant(detail.tenant_of(ctx)).filter(invoice=None)
    return rows.filter(Q(last_month="") | Q(last_month__gte=f"{ctx.now:%Y-%m}")).order_by("pk")


@operator_page(methods=FORM, step_up=True)
def add(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        tenant = detail.tenant_of(ctx)
        currency = currency_of(tenant.pk)
    form = forms.OneOffLineForm(currency, bound_data(ctx))
    form.initial = {"month": f"{ctx.now:%Y-%m}"}

    def act(data: dict[str, Any]) -> OneOffLine:
        fields = {name: data[name] for name in ("month", "last_month", "description")}
        return do_add_one_off_line(tenant, cents=cents_of(data["amount"], currency), **fields)

    return tenant_form_view(
        ctx,
        tenant,
        _("New one-off line of %(name)s") % {"name": tenant.name},
        form,
        act,
        submit=_("Add line"),
        message=lambda row: _("“%(name)s” was added.") % {"name": row.description},
        effect=_("Charged in addition to the usage, before tax, on the invoice of the month or of each month."),
    )


@operator_page(methods=FORM, step_up=True)
def end(ctx: PageContext) -> HttpResponse:
    tenant, row = _line(ctx)
    return tenant_form_view(
        ctx,
        tenant,
        _("End “%(name)s”") % {"name": row.description},
        forms.EndChargeForm(bound_data(ctx), initial={"last_month": f"{ctx.now:%Y-%m}"}),
        lambda data: do_end_one_off_line(row, data["last_month"]),
        submit=_("End line"),
        message=lambda ended: (
            _("“%(name)s” ends after %(month)s.") % {"name": ended.description, "month": ended.last_month}
        ),
        effect=_("Invoices of later months do not have this line. An ended line cannot be extended."),
    )


@operator_page(methods=FORM, step_up=True)
def remove(ctx: PageContext) -> HttpResponse:
    tenant, row = _line(ctx)
    return tenant_form_view(
        ctx,
        tenant,
        _("Remove “%(name)s”") % {"name": row.description},
        Form(bound_data(ctx)),
        lambda _data: do_remove_one_off_line(row),
        submit=_("Remove"),
        message=lambda _done: _("“%(name)s” was removed.") % {"name": row.description},
        effect=_("The line is removed. No invoice charges it."),
        danger=True,
    )


def _line(ctx: PageContext) -> tuple[Tenant, OneOffLine]:
    with ctx.scope():
        return detail.tenant_of(ctx), first_or_404(_lines(ctx).filter(pk=ctx.arguments["one_off_line"]))
