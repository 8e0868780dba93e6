"""Margin: the page, its panels and its CSV export."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.api.usage_serializers import usd
from billing.costs.cost_cards import do_import_costs
from billing.costs.margin import margins
from billing.metering.usage import TooManyRows
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.margin import page
from frontend.operator.margin.forms import CostForm
from frontend.operator.prices.studio import find_return_url
from tenants import csv_tables
from tenants.request_costs import REPORT_COST

PANELS = Panels(
    "operator-margin-panel",
    (
        Panel("stats", _lazy("Key figures"), "operator/margin/page.html#stats", page.stats),
        Panel("groups", _lazy("Margin by group"), "operator/margin/page.html#groups", page.groups),
        Panel("executions", _lazy("Newest executions"), "operator/margin/page.html#executions", page.executions),
    ),
)
_COUNTS = ("executions", "costed", "estimated", "uncosted_tokens")
_AMOUNTS = ("revenue", "uncosted_revenue", "cost", "margin", "failed", "unbilled")


@operator_page()
def margin(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = page.filters(ctx)
    metered = metering(ctx.now)
    return render_page(ctx, "operator/margin/page.html", _("Margin"), panels=PANELS, filters=filters, metering=metered)


@operator_page(cost=REPORT_COST)
def margin_csv(ctx: PageContext) -> HttpResponse:
    """Return all rows of the table with all digits, for the page's month, grouping and filters."""
    with ctx.scope():
        now = page.filters_of(ctx)
        try:
            rows = margins(now.query)
        except TooManyRows:
            return HttpResponse(
                _("The export would have too many rows. Group by tenant or by deployment, or add a filter."),
                status=422,
                content_type="text/plain",
            )
        names = page.tenant_names(row.tenant_id for row in rows)
    heading = ("month", "tenant", "deployment", *_COUNTS, *(f"{name}_usd" for name in _AMOUNTS))
    table = (
        (
            now.month,
            "" if row.tenant_id is None else names.get(row.tenant_id, row.tenant_id),
            row.model or "",
            *(getattr(row, name) for name in _COUNTS),
            *(usd(getattr(row, f"{name}_femto")) for name in _AMOUNTS),
        )
        for row in rows
    )
    answer = HttpResponse(csv_tables.as_csv(heading, table), content_type="text/csv; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="margin-{now.month}-by-{now.group}.csv"'
    return answer


@operator_page(methods=FORM)
def cost(ctx: PageContext) -> HttpResponse:
    """Set what the operator pays for the tokens of a deployment, starting from its current cost card."""
    model, margins_url = ctx.arguments["model"], ctx.url("operator-margin")
    with ctx.scope():
        if not page.is_deployment(model):
            raise Http404
        form = CostForm(model, page.current_card(model, ctx.now), bound_data(ctx))
    return form_view(
        ctx,
        _("Cost of %(model)s") % {"model": model},
        form,
        lambda data: do_import_costs({model: data["prices"]}, note=data["note"]),
        submit=_("Save"),
        back=find_return_url(ctx, model, margins_url),
        message=lambda changes: (
            (_("Cost of %(model)s saved.") if changes else _("Cost of %(model)s is unchanged.")) % {"model": model}
        ),
        breadcrumbs=(Breadcrumb(_("Margin"), margins_url),),
        action_url=ctx.request.get_full_path(),
        effect=form.effect,
    )


SCREEN = ConsoleScreen("operator-margin", _lazy("Margin"), icon="usage", letter="g", group="billing", order=30)
urlpatterns = [
    path("operator/margin/", margin, name="operator-margin"),
    path("operator/margin/csv", margin_csv, name="operator-margin-csv"),
    path("operator/margin/costs/<path:model>", cost, name="operator-margin-cost"),
    PANELS.operator_url("operator/margin/"),
]
