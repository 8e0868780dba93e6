"""Downloads of a billing entity's VAT report, EC sales list and OSS report."""

from __future__ import annotations

import re

from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _

from billing.models import BillingEntity, Period
from billing.taxes.vat_reports import PERIOD, REPORTS, quarter_of_month, report_as_csv
from frontend.core.page_context import PageContext, first_or_404, operator_page
from tenants.request_costs import REPORT_COST


def links_of(ctx: PageContext, period: Period) -> list[tuple[str, str]]:
    """Return the titles and URLs of the reports of a month and of its quarter."""
    month, quarter = period.label, quarter_of_month(period.label)
    found = (
        (_("VAT report %(period)s"), "vat", month),
        (_("VAT report %(period)s"), "vat", quarter),
        (_("EC sales list %(period)s"), "ec-sales", month),
        (_("EC sales list %(period)s"), "ec-sales", quarter),
        (_("OSS report %(period)s"), "oss", quarter),
    )
    return [
        (title % {"period": label}, ctx.url("operator-billing-tax-report", period.entity.slug, name, label))
        for title, name, label in found
    ]


@operator_page(cost=REPORT_COST)
def tax_report(ctx: PageContext) -> HttpResponse:
    """Return a report of a month or quarter as CSV."""
    name, period = ctx.arguments["tax_report"], ctx.arguments["tax_period"]
    if name not in REPORTS or not re.fullmatch(PERIOD, period):
        raise Http404
    with ctx.scope():
        entity = first_or_404(BillingEntity.objects.filter(slug=ctx.arguments["billing_entity"]))
        table = report_as_csv(name, entity, period)
    answer = HttpResponse(table, content_type="text/csv; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}-{entity.slug}-{period}.csv"'
    return answer
