"""The query of the usage page: date range, grouping and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from billing.metering.usage import UsageReport
from billing.models import UsageRollup, totals_of
from frontend.core.date_ranges import DateRange, date_range_of
from frontend.core.filter_chips import FilterChip, choice_chip, filter_bar
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import (
    MAX_CHOICES,
    Choice,
    changed_url,
    named_rows,
    number_param,
    text_param,
    with_query,
)
from frontend.core.page_context import PageContext
from tenants.models import ApiKey, Project

GROUPS = {
    "model": _lazy("Model"),
    "key": _lazy("API key"),
    "project": _lazy("Project"),
    "member": _lazy("Member"),
    "tier": _lazy("Tier"),
    "route": _lazy("Route"),
    "day": _lazy("Day"),
}


@dataclass(frozen=True)
class UsageReportQuery:
    date_range: DateRange
    group: str
    question: UsageReport


def query_of(ctx: PageContext) -> UsageReportQuery:
    """Return the query in the URL. Invalid values are ignored."""
    date_range, group = date_range_of(ctx), ctx.query.get("group", "model")
    question = UsageReport(
        ctx.tenant.pk,
        start=date_range.start,
        end=date_range.end,
        model=text_param(ctx, "model", 128) or None,
        key_id=number_param(ctx, "key"),
        project_id=number_param(ctx, "project"),
    )
    return UsageReportQuery(date_range, group if group in GROUPS else "model", question)


def usage_chips(ctx: PageContext, url: str, asked: UsageReport) -> tuple[FilterChip, ...]:
    """Return the chips of the model, the key and the project. `url` is that of the page."""
    tenant = ctx.tenant
    rollups = UsageRollup.objects.for_tenant(tenant).filter(bucket=totals_of(UsageRollup.Bucket.DAY))
    models = {*rollups.order_by().values_list("model", flat=True).distinct()[:MAX_CHOICES]}
    if asked.model:
        models.add(asked.model)
    projects = named_rows(Project.objects.for_tenant(tenant))
    return (
        choice_chip(ctx, url, "model", _("Model"), ((name, name) for name in sorted(models)), asked.model),
        choice_chip(ctx, url, "key", _("API key"), named_rows(ApiKey.objects.for_tenant(tenant)), asked.key_id),
        choice_chip(ctx, url, "project", _("Project"), projects, asked.project_id),
    )


def filters(ctx: PageContext) -> dict[str, Any]:
    """Return the filter chips, the groups and the URL of the export."""
    now, url = query_of(ctx), ctx.url("usage")
    return {
        "groups": [
            Choice(label, changed_url(ctx, "", group=name), name == now.group) for name, label in GROUPS.items()
        ],
        "bar": filter_bar(ctx, url, usage_chips(ctx, url, now.question)),
        "csv_url": with_query(ctx.url("usage-csv"), **ctx.query),
        "explorer_url": ctx.url("usage-explorer"),
    }
