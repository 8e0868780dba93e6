"""Usage by group: the rows of the table and of its CSV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.utils.translation import gettext as _

from billing.metering.usage import GROUP_COLUMNS, Group, TooManyRows, UsageReport, count_accepted, sums, total
from billing.models import SUMMED, UsageChange
from frontend.core.numbers import Money, common_places, share
from frontend.core.page_context import PageContext
from frontend.tenant.usage.query import GROUPS, UsageReportQuery, query_of
from inference_worker.contract.request import PROMPT_CLASSES
from tenants.models import ApiKey, Project, User

MAX_ROWS = 100
WRITTEN = ("cache_write_5m", "cache_write_1h")
# The alias is in the request log, which is kept for some weeks. A line of a batch may have two rows; the last counts.
_ROUTES = """
SELECT coalesce(r.requested_model, ''), u.model, {sums} FROM {changes} u
LEFT JOIN (
    SELECT request_id, requested_model FROM request_log_requestrecord found
    WHERE tenant_id = %(tenant)s AND started_at >= %(start)s - interval '1 day' AND started_at < %(end)s
        AND (batch_id IS NULL OR NOT EXISTS (
            SELECT 1 FROM request_log_requestrecord later
            WHERE later.tenant_id = %(tenant)s AND later.request_id = found.request_id
                AND later.started_at > found.started_at AND later.started_at < %(end)s
        ))
) r ON r.request_id = split_part(u.request_id, '.', 1)
WHERE u.tenant_id = %(tenant)s AND u.admitted_at >= %(start)s AND u.admitted_at < %(end)s
    AND (%(model)s::text IS NULL OR u.model = %(model)s) AND (%(key)s::bigint IS NULL OR u.key_id = %(key)s)
    AND (%(project)s::bigint IS NULL OR u.project_id = %(project)s)
GROUP BY 1, 2
"""


@dataclass(frozen=True)
class UsageGroupsRow:
    """One group. `detail` is shown below its name; `url` filters the page by it."""

    name: str
    detail: str
    url: str
    requests: int
    failed: int
    uncached: int
    cached: int
    written: int
    output: int
    hit: str
    cost: Money
    part: str
    saved: Money

    @property
    def input(self) -> int:
        return self.uncached + self.cached + self.written


@dataclass(frozen=True)
class Groups:
    """The table of groups. `others` is the number of rows that only the CSV contains."""

    label: str
    rows: tuple[UsageGroupsRow, ...]
    total: UsageGroupsRow
    others: int
    too_many: bool
    cost_places: int  # decimals of the column
    saved_places: int


Name = tuple[str, str, str]  # name, detail, URL


def groups(ctx: PageContext) -> Groups:
    """Return the table with its first rows."""
    now = query_of(ctx)
    try:
        rows = all_rows(ctx, now)
    except TooManyRows:
        return Groups(
            GROUPS[now.group], (), _row(("", "", ""), total([]), 0), 0, too_many=True, cost_places=2, saved_places=2
        )
    shown = tuple(rows[:MAX_ROWS])
    return Groups(
        GROUPS[now.group],
        shown,
        sum_rows(rows),
        len(rows) - len(shown),
        too_many=False,
        cost_places=common_places(row.cost for row in shown),
        saved_places=common_places(row.saved for row in shown),
    )


def is_by_request(ctx: PageContext) -> bool:
    """Return whether the groups are computed from each request of the period, because there are no sums of them."""
    return query_of(ctx).group == "route"


def all_rows(ctx: PageContext, now: UsageReportQuery) -> list[UsageGroupsRow]:
    """Return the rows of all groups: days in order, other groups by cost, highest first.

    Raises:
        TooManyRows: the limit of `billing.metering.usage` is exceeded.
    """
    found = _count_by_group(ctx, now)
    all_cost = sum(counts["cost_femto"] for _, counts in found)
    rows = [_row(name, counts, all_cost) for name, counts in found]
    return rows if now.group == "day" else sorted(rows, key=lambda row: (-row.cost.femto, row.name, row.detail))


def sum_rows(rows: list[UsageGroupsRow]) -> UsageGroupsRow:
    """Return the sum of all rows."""
    counts = ("requests", "failed", "uncached", "cached", "written", "output")
    added = {name: sum(getattr(row, name) for row in rows) for name in counts}
    cost, saved = (Money(sum(getattr(row, name).femto for row in rows)) for name in ("cost", "saved"))
    context = added["uncached"] + added["cached"] + added["written"]
    part = share(cost.femto, cost.femto)
    return UsageGroupsRow(
        _("All"), "", "", **added, hit=share(added["cached"], context), cost=cost, part=part, saved=saved
    )


def _row(name: Name, counts: Mapping[str, int], all_cost: int) -> UsageGroupsRow:
    context = sum(counts[component] for component in PROMPT_CLASSES)
    return UsageGroupsRow(
        *name,
        requests=count_accepted(counts),
        failed=counts["failed"],
        uncached=counts["uncached"],
        cached=counts["cache_read"],
        written=sum(counts[component] for component in WRITTEN),
        output=counts["output"],
        hit=share(counts["cache_read"], context),
        cost=Money(counts["cost_femto"]),
        part=share(counts["cost_femto"], all_cost),
        saved=Money(counts["saved_femto"]),
    )


def _count_by_group(ctx: PageContext, now: UsageReportQuery) -> list[tuple[Name, Mapping[str, int]]]:
    if now.group == "day":
        rows = sums(now.question, bucket="day")
        return [((f"{row['start'].astimezone(UTC):%Y-%m-%d}", "", _on(ctx, row)), row) for row in rows]
    if now.group == "route":
        return _routes(now.question)
    group, names = _NAMES[now.group]
    column = GROUP_COLUMNS[group]
    rows = sums(now.question, group_by=(group,))
    named = names(ctx, [row[column] for row in rows])
    merged: dict[Name, dict[str, int]] = defaultdict(lambda: dict.fromkeys(SUMMED, 0))
    for row in rows:
        into = merged[named(row[column])]
        for name in SUMMED:
            into[name] += row[name]
    return list(merged.items())


def _on(ctx: PageContext, row: Mapping[str, Any]) -> str:
    day = f"{row['start'].astimezone(UTC):%Y-%m-%d}"
    return _narrow(ctx, range="custom", group="model", **{"from": day, "to": day})


def _narrow(ctx: PageContext, **changed: str) -> str:
    return f"?{urlencode({**ctx.query, **changed})}"


def _of_models(ctx: PageContext, ids: list[Any]) -> Callable[[Any], Name]:
    return lambda model: (model, "", _narrow(ctx, model=model, group="key"))


def _of_tiers(ctx: PageContext, ids: list[Any]) -> Callable[[Any], Name]:
    return lambda tier: (tier.capitalize() or _("Not priced"), "", "")


def _of_projects(ctx: PageContext, ids: list[Any]) -> Callable[[Any], Name]:
    known = Project.objects.for_tenant(ctx.tenant).in_bulk(ids)

    def name(pk: int) -> Name:
        url = _narrow(ctx, project=str(pk), group="key")
        return (
            (known[pk].name, known[pk].slug, url)
            if pk in known
            else (_("Project %(pk)s, deleted") % {"pk": pk}, "", url)
        )

    return name


def _of_keys(ctx: PageContext, ids: list[Any]) -> Callable[[Any], Name]:
    known = ApiKey.objects.for_tenant(ctx.tenant).in_bulk(ids)

    def name(pk: int) -> Name:
        url = _narrow(ctx, key=str(pk), group="model")
        return (
            (known[pk].name, f"{known[pk].prefix}…", url)
            if pk in known
            else (_("Key %(pk)s, deleted") % {"pk": pk}, "", url)
        )

    return name


def _of_members(ctx: PageContext, ids: list[Any]) -> Callable[[Any], Name]:
    """Return the filter for a member's usage: that of the keys the member created."""
    made = dict(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=ids).values_list("pk", "created_by_id"))
    people = User.objects.in_bulk([pk for pk in made.values() if pk])

    def name(key: int) -> Name:
        person = people.get(made.get(key))
        return (
            (person.name or person.email, person.email, "")
            if person
            else (_("No member"), _("Keys not created by a member"), "")
        )

    return name


_NAMES: Mapping[str, tuple[Group, Callable[[PageContext, list[Any]], Callable[[Any], Name]]]] = {
    "model": ("model", _of_models),
    "key": ("key", _of_keys),
    "project": ("project", _of_projects),
    "member": ("key", _of_members),
    "tier": ("tier", _of_tiers),
}


def _routes(question: UsageReport) -> list[tuple[Name, Mapping[str, int]]]:
    """Return usage by the requested alias and the model that served it."""
    added = ", ".join(f"sum(u.{name})" for name in SUMMED)
    context = {
        "tenant": question.tenant_id,
        "start": question.start,
        "end": question.end,
        "model": question.model,
        "key": question.key_id,
        "project": question.project_id,
    }
    with connection.cursor() as cursor:
        cursor.execute(_ROUTES.format(sums=added, changes=UsageChange._meta.db_table), context)
        rows = cursor.fetchall()
    return [(_route(to, model), dict(zip(SUMMED, map(int, counts), strict=True))) for to, model, *counts in rows]


def _route(to: str, model: str) -> Name:
    if not to:
        return model, _("Request record no longer available"), ""
    return to, _("Served as requested") if to == model else _("Served by %(model)s") % {"model": model}, ""
