"""The query of the usage page: date range, grouping and filters."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from billing.metering.usage import UsageReport
from billing.models import UsageRollup
from frontend.core.date_ranges import DateRange, DateRangeChoice, date_range_of
from frontend.core.page_context import PageContext
from tenants.models import ApiKey, Project

GROUPS = {
    "model": "Model",
    "key": "API key",
    "project": "Project",
    "member": "Member",
    "tier": "Tier",
    "route": "Route",
    "day": "Day",
}
MAX_CHOICES = 500
_FILTERS = ("model", "key", "project")
_MAX_ID = 2**63 - 1


@dataclass(frozen=True)
class UsageReportQuery:
    date_range: DateRange
    group: str
    question: UsageReport


@dataclass(frozen=True)
class UsageOption:
    value: str
    label: str
    chosen: bool


@dataclass(frozen=True)
class UsageFilters:
    """Values of the filter form."""

    groups: tuple[DateRangeChoice, ...]
    models: tuple[UsageOption, ...]
    keys: tuple[UsageOption, ...]
    projects: tuple[UsageOption, ...]
    hidden: tuple[tuple[str, str], ...]  # parameters that the filter form keeps
    clear_url: str  # empty without filters
    csv_url: str


def query_of(ctx: PageContext) -> UsageReportQuery:
    """Return the query in the URL. Invalid values are ignored."""
    date_range, group = date_range_of(ctx), ctx.query.get("group", "model")
    model = ctx.query.get("model", "").strip()[:128].replace("\0", "")
    question = UsageReport(
        ctx.tenant.pk,
        start=date_range.start,
        end=date_range.end,
        model=model or None,
        key_id=_number(ctx.query.get("key", "")),
        project_id=_number(ctx.query.get("project", "")),
    )
    return UsageReportQuery(date_range, group if group in GROUPS else "model", question)


def _number(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    return number if 0 < number <= _MAX_ID else None


def filters(ctx: PageContext) -> UsageFilters:
    now = query_of(ctx)
    params = {name: value for name, value in ctx.query.items() if name in ("range", "from", "to", "group")}
    tenant = ctx.tenant
    rollups = UsageRollup.objects.for_tenant(tenant).filter(bucket=UsageRollup.Bucket.DAY)
    models = {*rollups.order_by().values_list("model", flat=True).distinct()[:MAX_CHOICES]}
    if now.question.model:
        models.add(now.question.model)
    keys = ApiKey.objects.for_tenant(tenant).order_by("name", "pk").values_list("pk", "name")[:MAX_CHOICES]
    projects = Project.objects.for_tenant(tenant).order_by("name", "pk").values_list("pk", "name")[:MAX_CHOICES]
    query = ctx.query
    return UsageFilters(
        tuple(DateRangeChoice(label, _url(ctx, group=name), name == now.group) for name, label in GROUPS.items()),
        tuple(UsageOption(name, name, name == now.question.model) for name in sorted(models)),
        tuple(UsageOption(str(pk), name, pk == now.question.key_id) for pk, name in keys),
        tuple(UsageOption(str(pk), name, pk == now.question.project_id) for pk, name in projects),
        tuple(params.items()),
        f"{ctx.url('usage')}?{urlencode(params)}" if any(query.get(name) for name in _FILTERS) else "",
        f"{ctx.url('usage-csv')}?{urlencode(query)}" if query else ctx.url("usage-csv"),
    )


def _url(ctx: PageContext, **changed: str) -> str:
    return f"?{urlencode({**ctx.query, **changed})}"
