"""The query of the usage page: date range, grouping and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billing.metering.usage import UsageReport
from billing.models import UsageRollup
from frontend.core.date_ranges import DateRange, date_range_of
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import (
    MAX_CHOICES,
    Choice,
    changed_url,
    named_rows,
    number_param,
    options,
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
_FILTERS = ("model", "key", "project")


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


def filters(ctx: PageContext) -> dict[str, Any]:
    """Return the values of the filter form. `hidden` are the parameters that the form keeps."""
    now = query_of(ctx)
    params = {name: value for name, value in ctx.query.items() if name in ("range", "from", "to", "group")}
    tenant, asked = ctx.tenant, now.question
    rollups = UsageRollup.objects.for_tenant(tenant).filter(bucket=UsageRollup.Bucket.DAY)
    models = {*rollups.order_by().values_list("model", flat=True).distinct()[:MAX_CHOICES]}
    if asked.model:
        models.add(asked.model)
    return {
        "groups": [
            Choice(label, changed_url(ctx, "", group=name), name == now.group) for name, label in GROUPS.items()
        ],
        "models": options(((name, name) for name in sorted(models)), asked.model),
        "keys": options(named_rows(ApiKey.objects.for_tenant(tenant)), asked.key_id),
        "projects": options(named_rows(Project.objects.for_tenant(tenant)), asked.project_id),
        "hidden": params.items(),
        "clear_url": with_query(ctx.url("usage"), **params) if any(ctx.query.get(name) for name in _FILTERS) else "",
        "csv_url": with_query(ctx.url("usage-csv"), **ctx.query),
    }
