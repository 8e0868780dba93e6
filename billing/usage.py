"""Questions about usage: which events, and their sums. One tenant at a time, always."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import Coalesce, TruncDay, TruncHour

from billing.models import TOKEN_CLASSES, UsageEvent, Verdict
from billing.partitions import month_of

Group = Literal["model", "key", "project"]
Bucket = Literal["hour", "day"]
GROUPS: tuple[Group, ...] = get_args(Group)
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
GROUP_COLUMNS: dict[Group, str] = {"model": "model", "key": "key_id", "project": "project_id"}
MOST_ROWS = 10_000
_TRUNCATE = {"hour": TruncHour, "day": TruncDay}


class TooManyRows(Exception):
    """The answer would have more than MOST_ROWS rows: ask for less time, a coarser bucket or fewer groups."""


@dataclass(frozen=True)
class Question:
    """Which events of a tenant. Times are half-open: `start` is in, `end` is not."""

    tenant_id: int
    start: datetime | None = None
    end: datetime | None = None
    model: str | None = None
    key_id: int | None = None
    project_id: int | None = None
    verdict: str | None = None
    request_id: str | None = None

    def events(self) -> QuerySet[UsageEvent]:
        wanted = {
            "admitted_at__gte": self.start,
            "admitted_at__lt": self.end,
            "model": self.model,
            "key_id": self.key_id,
            "project_id": self.project_id,
            "verdict": self.verdict,
            "request_id": self.request_id,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return UsageEvent.objects.for_tenant(self.tenant_id).filter(**given)


def this_month(now: datetime | None = None) -> tuple[datetime, datetime]:
    """From the first instant of this UTC month until now."""
    now = now or datetime.now(UTC)
    return datetime.combine(month_of(now), datetime.min.time(), UTC), now


def sums(question: Question, group_by: tuple[Group, ...] = (), bucket: Bucket | None = None) -> list[dict[str, Any]]:
    """Requests by verdict and tokens by class, one dict for each group and bucket, oldest first.

    Keys: `start` (with a bucket), those of GROUP_COLUMNS asked for, the verdicts, and the token classes. A failed
    leg's tokens are in no sum: nobody pays for them.

    Raises:
        TooManyRows: see there.
    """
    columns = [GROUP_COLUMNS[group] for group in group_by]
    events: QuerySet[UsageEvent, Any] = question.events()
    if bucket:
        events = events.annotate(start=_TRUNCATE[bucket]("admitted_at", tzinfo=UTC))
        columns = ["start", *columns]
    billed = ~Q(verdict=Verdict.FAILED)
    counts = {verdict.value: Count("verdict", filter=Q(verdict=verdict)) for verdict in Verdict}
    tokens = {f"sum_{name}": Coalesce(Sum(name, filter=billed), 0) for name in TOKEN_CLASSES}
    if not columns:
        found = [events.aggregate(**counts, **tokens)]
    else:
        grouped = events.values(*columns).annotate(**counts, **tokens).order_by(*columns)
        found = list(grouped[: MOST_ROWS + 1])
    if len(found) > MOST_ROWS:
        raise TooManyRows
    return [{name.removeprefix("sum_"): value for name, value in row.items()} for row in found]


def total(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The sum over all rows of what `sums` counts."""
    return {name: sum(row[name] for row in rows) for name in (*Verdict.values, *TOKEN_CLASSES)}


def instant(text: str) -> datetime:
    """A date (its first instant, UTC) or a date and time with its offset from UTC (`Z` or +hh:mm; none means UTC).

    Raises:
        ValueError: it is neither, or lies beyond any use of ours.
    """
    moment = datetime.fromisoformat(text)
    if not 2000 <= moment.year < 2200:
        raise ValueError("want a year from 2000 to 2199")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def span(start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    """The times asked for, completed: until now, from the beginning of the end's month.

    Raises:
        ValueError: the start is not before the end.
    """
    end = end or datetime.now(UTC)
    start = start or this_month(end - timedelta(microseconds=1))[0]
    if start >= end:
        raise ValueError("must be before `to`")
    return start, end
