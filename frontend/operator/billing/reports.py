"""Downloads of a billing entity's reports of a month or quarter: of its accounts and of its taxes."""

from __future__ import annotations

import re

from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _

from billing.accounting import reports as accounting_reports
from billing.api.serializers import MONTH
from billing.models import BillingEntity, Period
from billing.taxes import vat_reports
from frontend.core.page_context import PageContext, first_or_404, operator_page
from tenants.actions.common import FieldRefused
from tenants.request_costs import REPORT_COST

# The modules of the reports, each with the pattern of its periods.
_MODULES = ((accounting_reports, MONTH), (vat_reports, vat_reports.PERIOD))


def links_of(ctx: PageContext, period: Period) -> list[tuple[str, str]]:
    """Return the titles and URLs of the reports of a month and of its quarter."""
    month, quarter = period.label, vat_reports.quarter_of_month(period.label)
    found = (
        (_("Trial balance %(period)s"), "trial-balance", month),
        (_("Prepaid credit %(period)s"), "prepaid-credit", month),
        (_("Prepaid credit by tenant %(period)s"), "prepaid-credit-by-tenant", month),
        (_("VAT report %(period)s"), "vat", month),
        (_("VAT report %(period)s"), "vat", quarter),
        (_("EC sales list %(period)s"), "ec-sales", month),
        (_("EC sales list %(period)s"), "ec-sales", quarter),
        (_("OSS report %(period)s"), "oss", quarter),
    )
    return [
        (title % {"period": label}, ctx.url("operator-billing-report", period.entity.slug, name, label))
        for title, name, label in found
    ]


@operator_page(cost=REPORT_COST)
def report(ctx: PageContext) -> HttpResponse:
    """Return a report of a month or quarter as CSV."""
    name, period = ctx.arguments["report_name"], ctx.arguments["report_period"]
    module = next(
        (module for module, pattern in _MODULES if name in module.REPORTS and re.match(pattern, period)), None
    )
    if module is None:
        raise Http404
    with ctx.scope():
        entity = first_or_404(BillingEntity.objects.filter(slug=ctx.arguments["billing_entity"]))
        try:
            table = module.report_as_csv(name, entity, period)
        except FieldRefused as exc:  # a month in the future
            raise Http404 from exc
    answer = HttpResponse(table, content_type="text/csv; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}-{entity.slug}-{period}.csv"'
    return answer
