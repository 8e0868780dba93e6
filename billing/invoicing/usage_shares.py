"""Shares of projects and cost centers in the usage of an invoice.

The names of projects and the cost centers of keys are those at the time of the draft. The invoice stores them, so that
a key that is renamed, moved or deleted later changes no final document.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from django.db import connection

from billing.currencies.amounts import divide_cents
from billing.invoicing.usage_sql import sum_usage
from billing.models import Period
from tenants.models import ApiKey, Project

_CONDITION = "{row}tenant_id = ANY(%(tenants)s)"
_CENTERS = """
LEFT JOIN unnest(%(owners)s::bigint[], %(keys)s::bigint[], %(centers)s::text[]) AS key (tenant_id, key_id, cost_center)
USING (tenant_id, key_id)"""
_SHARES = f"""
{sum_usage(_CONDITION, ("project_id", "key_id"), ("project_id", "cost_center"), _CENTERS)}
SELECT tenant_id, price_id, usage_month, billed_period, project_id, coalesce(cost_center, ''), events, tokens
FROM used
"""  # noqa: S608  (column names, nothing from outside)


class UsageLabels(TypedDict):
    """The names of a tenant's projects and the cost centers of its keys, by their IDs."""

    projects: dict[str, str]
    cost_centers: dict[str, str]


class UsageShare(NamedTuple):
    """The part of one project and cost center in the usage of a price. `cost_center` is empty for none."""

    project_id: int
    cost_center: str
    events: int
    tokens: int


LineKey = tuple[int, int, str, int | None]  # tenant, price, month of usage and billed period of a line
Shares = dict[LineKey, list[UsageShare]]


def find_labels(tenants: Collection[int]) -> dict[int, UsageLabels]:
    """Return the labels of the tenants that have several projects or a cost center. Call in a scope of all tenants."""
    centers: dict[int, dict[str, str]] = defaultdict(dict)
    keys = ApiKey.objects.all_tenants().filter(tenant__in=tenants).exclude(cost_center="")
    for tenant_id, pk, center in keys.order_by("pk").values_list("tenant_id", "pk", "cost_center"):
        centers[tenant_id][str(pk)] = center
    projects: dict[int, list[Project]] = defaultdict(list)
    for project in Project.objects.all_tenants().filter(tenant__in=tenants).order_by("pk"):
        projects[project.tenant_id].append(project)
    several = (tenant_id for tenant_id, found in projects.items() if len(found) > 1)
    return {
        tenant_id: {"projects": _name(projects[tenant_id]), "cost_centers": centers.get(tenant_id, {})}
        for tenant_id in {*several, *centers}
    }


def _name(projects: Sequence[Project]) -> dict[str, str]:
    """Return the names of projects. Projects with the same name also have their slug."""
    names = Counter(project.name for project in projects)
    return {
        str(project.pk): project.name if names[project.name] == 1 else f"{project.name} ({project.slug})"
        for project in projects
    }


def find_shares(period: Period, labels: Mapping[int, UsageLabels]) -> Shares:
    """Return the shares in the lines of the labels' tenants."""
    if not labels:
        return {}
    keys = [
        (tenant_id, int(key), center)
        for tenant_id, found in labels.items()
        for key, center in found["cost_centers"].items()
    ]
    owners, key_ids, centers = ([key[place] for key in keys] for place in range(3))
    parameters: dict[str, Any] = {
        **{"period": period.pk, "starts_at": period.starts_at, "zone": period.entity.time_zone},
        **{"tenants": list(labels), "owners": owners, "keys": key_ids, "centers": centers},
    }
    shares: Shares = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_SHARES, parameters)
        for tenant_id, price_id, month, billed_period, *share in cursor.fetchall():
            shares[tenant_id, price_id, month, billed_period].append(UsageShare(*share))
    return shares


def find_used_labels(labels: Mapping[int, UsageLabels], shares: Shares) -> dict[int, UsageLabels]:
    """Return the labels of the tenants whose usage is of several projects or of a cost center.

    Only labels of usage remain. A deleted project has its ID as name.
    """
    projects: dict[int, set[int]] = defaultdict(set)
    centers: dict[int, set[str]] = defaultdict(set)
    for (tenant_id, *_), found in shares.items():
        projects[tenant_id].update(share.project_id for share in found)
        centers[tenant_id].update(share.cost_center for share in found if share.cost_center)
    return {
        tenant_id: {
            "projects": {
                str(pk): labels[tenant_id]["projects"].get(str(pk), f"Project {pk}")
                for pk in sorted(projects[tenant_id])
            },
            "cost_centers": {
                key: center for key, center in labels[tenant_id]["cost_centers"].items() if center in centers[tenant_id]
            },
        }
        for tenant_id in labels
        if len(projects[tenant_id]) > 1 or centers[tenant_id]
    }


def describe_shares(
    shares: Iterable[UsageShare], nano_per_million: int, labels: UsageLabels, currency: str
) -> list[dict[str, Any]]:
    """Return the shares of a line as its document has them. Their cents sum to those of the line."""
    shares = list(shares)
    femto = [share.tokens * nano_per_million for share in shares]
    return [
        {
            "project": labels["projects"][str(share.project_id)],
            "cost_center": share.cost_center,
            "events": share.events,
            "tokens": share.tokens,
            "femto": str(exact),
            "cents": cents,
        }
        for share, exact, cents in zip(shares, femto, divide_cents(femto, currency), strict=True)
    ]


def sum_shares(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[str, int]]:
    """Return the cents of each project or cost center in lines of a document. Usage without one is last."""
    sums: Counter[str] = Counter()
    for line in lines:
        for share in line.get("shares", ()):
            sums[share[name]] += share["cents"]
    return sorted(sums.items(), key=lambda item: (not item[0], item[0]))
