"""Cost, tokens, requests and cost per success of a tenant by segment and day, for the cost explorer.

A segment is one value of a dimension, such as one API key. Only the largest segments are returned one by one. Cost,
tokens and requests are sums of usage. The cost per success is that of the request log, as in `success_costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Literal, get_args

from billing.metering.segments import Dimension, sum_segments
from billing.metering.usage import TooManyRows, UsageReport
from billing.models import ExecutionOutcome
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.request_log.request_rollups import RequestFilters, request_sums
from tenants.models import ApiKey, Project, User

Measure = Literal["cost", "tokens", "requests", "success"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
MAX_CELLS = 200_000  # sums by segment and day of the request log that one query may return
_METERED: dict[Measure, tuple[str, ...]] = {
    "cost": ("cost_femto",),
    "tokens": TOKEN_CLASSES,
    "requests": tuple(ExecutionOutcome.values),
}
_LOGGED: dict[Dimension, str] = {
    "model": "served_model",
    "key": "key_id",
    "project": "project_id",
    "member": "key_id",
    "end_user": "end_user",
}


@dataclass(frozen=True)
class Amount:
    """A sum of usage; of the cost per success, the cost and the successful requests."""

    value: int = 0
    successes: int | None = None

    def __add__(self, other: Amount) -> Amount:
        if self.successes is None and other.successes is None:
            return Amount(self.value + other.value)
        return Amount(self.value + other.value, (self.successes or 0) + (other.successes or 0))

    @property
    def figure(self) -> int | None:
        """The value; of the cost per success, the quotient, rounded up. None without a success."""
        if self.successes is None:
            return self.value
        return -(-self.value // self.successes) if self.successes else None


@dataclass(frozen=True)
class SegmentQuery:
    """A question of the cost explorer. Times are half-open; without `end`, it is until now."""

    tenant_id: int
    measure: Measure
    dimension: Dimension
    start: datetime
    end: datetime | None = None
    model: str | None = None
    key_id: int | None = None
    project_id: int | None = None
    key_ids: tuple[int, ...] | None = None
    end_user: str | None = None

    @property
    def usage(self) -> UsageReport:
        return UsageReport(
            self.tenant_id,
            start=self.start,
            end=self.end,
            model=self.model,
            key_id=self.key_id,
            project_id=self.project_id,
            key_ids=self.key_ids,
            end_user=self.end_user,
        )


@dataclass(frozen=True)
class Segments:
    """The amounts of a period by segment and day, with the largest segments first.

    `days` has the amounts of each segment in `names`, and those of all others together under None. `count` is the
    number of all segments. A name is an ID as text, a model or an end user; empty: there is none, as for keys without
    a member.
    """

    names: tuple[str, ...]
    days: dict[str | None, dict[date, Amount]]
    count: int
    nothing: Amount = field(default_factory=Amount)  # the amount of no usage

    def total_of(self, name: str | None) -> Amount:
        return sum(self.days.get(name, {}).values(), self.nothing)

    @property
    def others(self) -> int:
        return self.count - len(self.names)

    @property
    def total(self) -> Amount:
        return sum((self.total_of(name) for name in self.days), self.nothing)

    @property
    def total_days(self) -> dict[date, Amount]:
        """The amounts of all segments together, by day."""
        found: dict[date, Amount] = {}
        for days in self.days.values():
            for day, amount in days.items():
                found[day] = found.get(day, self.nothing) + amount
        return found


def find_segments(query: SegmentQuery, *, largest: int | None = None, chosen: Sequence[str] | None = None) -> Segments:
    """Return the segments of a period. The tenant's scope must be open.

    Args:
        largest: the number of segments that are returned one by one, those with the highest amounts; the cost per
            success is ordered by cost.
        chosen: the segments that are returned one by one. Without both, all are.

    Raises:
        TooManyRows: the cost per success has more than `MAX_CELLS` sums.
    """
    if query.measure == "success":
        return _logged_segments(query, largest, chosen)
    found = sum_segments(query.usage, query.dimension, _METERED[query.measure], largest=largest, chosen=chosen)
    days: dict[str | None, dict[date, Amount]] = defaultdict(dict)
    for (name, day), value in found.amounts.items():
        days[name][day] = Amount(value)
    return _in_order(dict(days), found.count)


def _in_order(days: dict[str | None, dict[date, Amount]], count: int) -> Segments:
    found = Segments((), days, count)
    totals = {name: found.total_of(name).value for name in days if name is not None}
    return replace(found, names=tuple(sorted(totals, key=lambda name: (-totals[name], name))))


def _logged_segments(query: SegmentQuery, largest: int | None, chosen: Sequence[str] | None) -> Segments:
    filters = RequestFilters(query.model, query.key_id, query.project_id, query.key_ids, query.end_user)
    end = query.end or datetime.now(query.start.tzinfo)
    groups, names = (_LOGGED[query.dimension], "day"), ("cost_femto", "succeeded", "requests")
    sums = request_sums(query.tenant_id, query.start, end, groups, names, filters)
    if len(sums) > MAX_CELLS:
        raise TooManyRows
    members = _members_of(query, {key for key, _day in sums}) if query.dimension == "member" else {}
    days: dict[str | None, dict[date, Amount]] = defaultdict(lambda: defaultdict(lambda: Amount(0, 0)))
    for (value, day), counts in sums.items():
        if counts["requests"]:
            name = members.get(value, "") if query.dimension == "member" else str(value)
            days[name][day] += Amount(counts["cost_femto"], counts["succeeded"])
    every = _in_order(dict(days), len(days))
    wanted = set(every.names[:largest] if chosen is None else chosen)
    kept = tuple(name for name in every.names if name in wanted)
    merged: dict[str | None, dict[date, Amount]] = {name: days[name] for name in kept}
    rest: dict[str | None, dict[date, Amount]] = {name: days[name] for name in every.names if name not in merged}
    if rest:
        merged[None] = Segments((), rest, len(rest)).total_days
    return Segments(kept, merged, every.count, Amount(0, 0))


def _members_of(query: SegmentQuery, keys: set[int]) -> dict[int, str]:
    """Return the member who created each key."""
    rows = ApiKey.objects.for_tenant(query.tenant_id).filter(pk__in=keys, created_by__isnull=False)
    return {key: str(member) for key, member in rows.values_list("pk", "created_by_id")}


def segment_labels(tenant_id: int, dimension: Dimension, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the label and the detail of each segment whose row exists. The tenant's scope must be open."""
    if dimension in ("model", "end_user"):
        return {name: (name, "") for name in names if name}
    ids = [int(name) for name in names if name]
    if dimension == "project":
        projects = Project.objects.for_tenant(tenant_id).in_bulk(ids)
        return {str(pk): (project.name, project.slug) for pk, project in projects.items()}
    if dimension == "member":
        users = User.objects.in_bulk(ids)
        return {str(pk): (user.name or user.email, user.email) for pk, user in users.items()}
    keys = ApiKey.objects.for_tenant(tenant_id).in_bulk(ids)
    return {str(pk): (key.name, f"{key.prefix}…") for pk, key in keys.items()}
