"""What the address asks of usage: a span, what to group by, and filters."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from billing.metering.usage import UsageReport
from billing.models import UsageRollup
from frontend.core.date_ranges import DateRange, DateRangeChoice, span_of
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
MOST_CHOICES = 500
_FILTERS = ("model", "key", "project")
_MOST_ID = 2**63 - 1


@dataclass(frozen=True)
class UsageReportQuery:
    span: DateRange
    group: str
    question: UsageReport


@dataclass(frozen=True)
class UsageOption:
    value: str
    label: str
    chosen: bool


@dataclass(frozen=True)
class UsageFilters:
    """What stands above the panels."""

    groups: tuple[DateRangeChoice, ...]
    models: tuple[UsageOption, ...]
    keys: tuple[UsageOption, ...]
    projects: tuple[UsageOption, ...]
    hidden: tuple[tuple[str, str], ...]  # what the filters' form keeps
    clear_url: str  # empty where nothing is filtered
    csv_url: str


def asked(visit: PageContext) -> UsageReportQuery:
    """Return what is shown; what is no value of ours is not asked for."""
    span, group = span_of(visit), visit.query.get("group", "model")
    model = visit.query.get("model", "").strip()[:128].replace("\0", "")
    question = UsageReport(
        visit.tenant.pk,
        start=span.start,
        end=span.end,
        model=model or None,
        key_id=_number(visit.query.get("key", "")),
        project_id=_number(visit.query.get("project", "")),
    )
    return UsageReportQuery(span, group if group in GROUPS else "model", question)


def _number(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    return number if 0 < number <= _MOST_ID else None


def fields(visit: PageContext) -> UsageFilters:
    now = asked(visit)
    kept = {name: value for name, value in visit.query.items() if name in ("range", "from", "to", "group")}
    tenant = visit.tenant
    rollups = UsageRollup.objects.for_tenant(tenant).filter(bucket=UsageRollup.Bucket.DAY)
    models = {*rollups.order_by().values_list("model", flat=True).distinct()[:MOST_CHOICES]}
    if now.question.model:
        models.add(now.question.model)
    keys = ApiKey.objects.for_tenant(tenant).order_by("name", "pk").values_list("pk", "name")[:MOST_CHOICES]
    projects = Project.objects.for_tenant(tenant).order_by("name", "pk").values_list("pk", "name")[:MOST_CHOICES]
    query = visit.query
    return UsageFilters(
        tuple(DateRangeChoice(label, _with(visit, group=name), name == now.group) for name, label in GROUPS.items()),
        tuple(UsageOption(name, name, name == now.question.model) for name in sorted(models)),
        tuple(UsageOption(str(pk), name, pk == now.question.key_id) for pk, name in keys),
        tuple(UsageOption(str(pk), name, pk == now.question.project_id) for pk, name in projects),
        tuple(kept.items()),
        f"{visit.url('usage')}?{urlencode(kept)}" if any(query.get(name) for name in _FILTERS) else "",
        f"{visit.url('usage-csv')}?{urlencode(query)}" if query else visit.url("usage-csv"),
    )


def _with(visit: PageContext, **changed: str) -> str:
    return f"?{urlencode({**visit.query, **changed})}"
