"""Receivables: the page, its CSV file, and the payments of files."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from billing.accounting.aging import aging_as_csv
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.receivables import bank, page
from tenants.request_costs import REPORT_COST

TITLE = _lazy("Receivables")
PANELS = Panels(
    "operator-receivables-panel",
    (
        Panel("aging", _lazy("By days past due"), "operator/receivables/page.html#aging", page.aging, every=0),
        Panel("entries", _lazy("Payments to assign"), "operator/receivables/page.html#entries", bank.entries, every=0),
        Panel(
            "statements",
            _lazy("Bank statements"),
            "operator/receivables/page.html#statements",
            bank.statements,
            every=0,
            lazy=True,
        ),
    ),
)


@operator_page(cost=REPORT_COST)
def receivables(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = page.filters(ctx)
    return render_page(ctx, "operator/receivables/page.html", str(TITLE), panels=PANELS, filters=filters)


@operator_page(cost=REPORT_COST)
def file(ctx: PageContext) -> HttpResponse:
    """Return the aging of a day as CSV. If the day is not valid, the page shows it."""
    with ctx.scope():
        shown = page.aging_of(ctx)
    if shown.error:
        back = f"{ctx.url('operator-receivables')}?entity={shown.entity.slug}"
        return redirect_with_message(ctx, back, shown.error, failed=True)
    answer = HttpResponse(aging_as_csv(shown.rows), content_type="text/csv; charset=utf-8")
    name = f"aging-{shown.entity.slug}-{shown.on}.csv"
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


SCREEN = ConsoleScreen("operator-receivables", TITLE, icon="clock", letter="r", group="billing", order=12)
urlpatterns = [
    path("operator/receivables/", receivables, name="operator-receivables"),
    PANELS.operator_url("operator/receivables/"),
    path("operator/receivables/import", bank.import_file, name="operator-receivables-import"),
    path("operator/receivables/entries/<int:bank_entry>/assign", bank.assign, name="operator-receivables-assign"),
    path("operator/receivables/entries/<int:bank_entry>/dismiss", bank.dismiss, name="operator-receivables-dismiss"),
    path("operator/receivables/file", file, name="operator-receivables-file"),
]
