"""Receivables: the page and its CSV file."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from billing.accounting.ageing import ageing_as_csv
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.receivables import page
from tenants.request_costs import REPORT_COST

TITLE = _lazy("Receivables")
PANELS = Panels(
    "operator-receivables-panel",
    (Panel("ageing", _lazy("By days past due"), "operator/receivables/page.html#ageing", page.ageing, every=0),),
)


@operator_page(cost=REPORT_COST)
def receivables(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = page.filters(ctx)
    return render_page(ctx, "operator/receivables/page.html", str(TITLE), panels=PANELS, filters=filters)


@operator_page(cost=REPORT_COST)
def file(ctx: PageContext) -> HttpResponse:
    """Return the ageing of a day as CSV. If the day is not valid, the page shows it."""
    with ctx.scope():
        shown = page.ageing_of(ctx)
    if shown.error:
        back = f"{ctx.url('operator-receivables')}?entity={shown.entity.slug}"
        return redirect_with_message(ctx, back, shown.error, failed=True)
    answer = HttpResponse(ageing_as_csv(shown.rows), content_type="text/csv; charset=utf-8")
    name = f"ageing-{shown.entity.slug}-{shown.on}.csv"
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


SCREEN = ConsoleScreen("operator-receivables", TITLE, icon="clock", letter="r", group="billing", order=12)
urlpatterns = [
    path("operator/receivables/", receivables, name="operator-receivables"),
    PANELS.operator_url("operator/receivables/"),
    path("operator/receivables/file", file, name="operator-receivables-file"),
]
