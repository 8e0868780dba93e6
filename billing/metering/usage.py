"""Queries of usage events and their sums, of one tenant at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, get_args

from django.db.models import DecimalField, Q, QuerySet, Sum, Value
from django.db.models.functions import TruncDay, TruncHour, TruncMonth

from billing.models import (
    SUMMED,
    EndUserRollup,
    ExecutionOutcome,
    UsageChange,
    UsageEvent,
    UsageRollup,
    coarse_or,
    evaluated_once,
    not_rolled_up,
    not_rolled_up_by_end_user,
    totals_of,
)

Group = Literal["model", "key", "project", "tier", "miss_reason", "end_user"]
Bucket = Literal["hour", "day", "month"]
GROUPS: tuple[Group, ...] = get_args(Group)
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
GROUP_COLUMNS: dict[Group, str] = {
    "model": "model",
    "key": "key_id",
    "project": "project_id",
    "tier": "tier",
    "miss_reason": "miss_reason",
    "end_user": "end_user",
}
NOT_BY_END_USER: tuple[Group, ...] = ("tier", "miss_reason")  # groups that the sums by end user do not have
MAX_ROWS = 10_000
_TRUNCATE = {"hour": TruncHour, "day": TruncDay, "month": TruncMonth}
_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
_WHOLE: DecimalField[Any, Any] = DecimalField(max_digits=38, decimal_places=0)
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


class OddHours(Exception):
    """The time zone's offset from UTC is not a whole number of hours, so its hours are not sums of UTC hours."""


class NoEndUsers(Exception):
    """The sums by end user are those of UTC days, without tiers and miss reasons."""


class TooManyRows(Exception):
    """The result would exceed the maximum of rows: use a shorter time, a coarser bucket or fewer groups."""


@dataclass(frozen=True)
class UsageReport:
    """A selection of a tenant's events. Times are half-open: `start` is included, `end` is not."""

    tenant_id: int
    start: datetime | None = None
    end: datetime | None = None
    model: str | None = None
    key_id: int | None = None
    project_id: int | None = None
    outcome: str | None = None
    request_id: str | None = None
    key_ids: tuple[int, ...] | None = None
    end_user: str | None = None  # empty: without one

    def events(self) -> QuerySet[UsageEvent]:
        given = self._collect_filters() | _present(outcome=self.outcome, request_id=self.request_id)
        return UsageEvent.objects.for_tenant(self.tenant_id).filter(**self._times("admitted_at"), **given)

    def by_end_user(self, groups: Collection[Group]) -> bool:
        """Return whether the sums by end user are needed, which are of UTC days."""
        return "end_user" in groups or self.end_user is not None

    def changes(self, groups: Collection[Group] = ()) -> QuerySet[UsageChange]:
        """Return the changes that are not in the rollups, and all changes of partial hours; by end user, of days."""
        by_end_user = self.by_end_user(groups)
        first, last = self._complete(_DAY if by_end_user else _HOUR)
        late = not_rolled_up_by_end_user() if by_end_user else not_rolled_up()
        cut = Q()
        if self.start is not None:
            cut |= Q(admitted_at__lt=first)
        if self.end is not None:
            cut |= Q(admitted_at__gte=last)
        rows = UsageChange.objects.for_tenant(self.tenant_id).filter(late | cut if cut else late)
        return rows.filter(**self._times("admitted_at"), **self._collect_filters())

    def rollups(self, *, by_hour: bool, groups: Collection[Group]) -> QuerySet[UsageRollup]:
        """Return the rollups of the complete hours in the time range, by days unless `by_hour`.

        Without keys in `groups` and in the selection, they are the totals of all keys. `groups` are columns that the
        rollups must have; the selection's are added.
        """
        first, last = self._complete(_HOUR)
        rows = UsageRollup.objects.for_tenant(self.tenant_id).filter(**self._collect_filters())
        hour, day = UsageRollup.Bucket.HOUR, UsageRollup.Bucket.DAY
        by_key = self._is_by_key(groups)
        hours = Q(bucket=hour if by_key else evaluated_once(totals_of(hour)))
        days = Q(bucket=day if by_key else evaluated_once(totals_of(day)))
        if by_key and self.model is None and {"key", "project"}.issuperset(groups):
            days = Q(bucket=evaluated_once(coarse_or(UsageRollup.Bucket.KEY_DAY, day)))
        midnight, end = first + (_EARLIEST - first) % _DAY, last - (last - _EARLIEST) % _DAY
        if by_hour or midnight >= end:
            return rows.filter(hours, start__gte=first, start__lt=last)
        # NOTE: ranges with bounds, because an index does not help with the complement of a range.
        found = days & Q(start__gte=midnight, start__lt=end)
        if first < midnight:
            found |= hours & Q(start__gte=first, start__lt=midnight)
        if end < last:
            found |= hours & Q(start__gte=end, start__lt=last)
        return rows.filter(found)

    def end_user_rollups(self, groups: Collection[Group]) -> QuerySet[EndUserRollup]:
        """Return the sums by end user of the complete days in the time range; without keys, the totals of all keys."""
        first, last = self._complete(_DAY)
        rows = EndUserRollup.objects.for_tenant(self.tenant_id).filter(**self._collect_filters())
        rows = rows.filter(start__gte=first, start__lt=last)
        return rows.exclude(key_id=0) if self._is_by_key(groups) else rows.filter(key_id=0)

    def _is_by_key(self, groups: Collection[Group]) -> bool:
        return "key" in groups or self.key_id is not None or self.key_ids is not None

    def _complete(self, length: timedelta) -> tuple[datetime, datetime]:
        """Return the range of complete hours or days."""
        first, last = self.start or _EARLIEST, self.end or datetime.now(UTC) + 2 * _DAY
        first, last = first + (_EARLIEST - first) % length, last - (last - _EARLIEST) % length
        return first, max(first, last)

    def _times(self, column: str) -> dict[str, datetime]:
        return _present(**{f"{column}__gte": self.start, f"{column}__lt": self.end})

    def _collect_filters(self) -> dict[str, Any]:
        return _present(
            model=self.model,
            key_id=self.key_id,
            project_id=self.project_id,
            key_id__in=self.key_ids,
            end_user=self.end_user,
        )


def _present(**wanted: Any) -> dict[str, Any]:
    return {name: value for name, value in wanted.items() if value is not None}


def this_month(now: datetime | None = None, zone: tzinfo = UTC) -> tuple[datetime, datetime]:
    """Return the time from the start of this month in `zone` until now."""
    now = now or datetime.now(UTC)
    first = datetime.combine(now.astimezone(zone).date().replace(day=1), datetime.min.time(), zone)
    return first.astimezone(UTC), now


def sums(
    question: UsageReport,
    group_by: tuple[Group, ...] = (),
    bucket: Bucket | None = None,
    zone: tzinfo = UTC,
    summed: tuple[str, ...] = SUMMED,
) -> list[dict[str, Any]]:
    """Return the sums of the selected usage, one dict for each group and bucket, oldest first.

    Keys: `start` (with a bucket), the requested GROUP_COLUMNS, and `summed`, which are some of SUMMED. Tokens of failed
    executions are in no sum, because they are not billed. The selection's outcome and request are ignored. Buckets
    follow the clocks of `zone`: a repeated hour gives two buckets, a day may have 23 or 25 hours.

    Raises: NoEndUsers, OddHours, TooManyRows.
    """
    if bucket and zone is not UTC:
        _require_whole_hours(question, zone)
    columns = [*(["start"] if bucket else []), *(GROUP_COLUMNS[group] for group in group_by)]
    grouped = group_changes(question, group_by, bucket, zone, summed)
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values in grouped[: 2 * MAX_ROWS + 2]:
        group, counts = values[1 : len(columns) + 1], [int(value or 0) for value in values[len(columns) + 1 :]]
        row = merged.setdefault(group, dict(zip(columns, group, strict=True)) | dict.fromkeys(summed, 0))
        for name, count in zip(summed, counts, strict=True):
            row[name] += count
    if len(merged) > MAX_ROWS:
        raise TooManyRows
    if bucket:
        for row in merged.values():
            row["start"] = row["start"].astimezone(zone)
    # None, the other end users together, comes last.
    return [merged[group] for group in sorted(merged, key=lambda group: [(value is None, value) for value in group])]


def group_changes(
    question: UsageReport,
    group_by: tuple[Group, ...],
    bucket: Bucket | None,
    zone: tzinfo = UTC,
    summed: tuple[str, ...] = SUMMED,
) -> QuerySet[Any, Any]:
    """Return rows of 1, the start of the bucket if there is one, the groups, and the sums. A group may have two rows.

    It is one statement, so that a concurrent run of the rollups does not count a change twice.
    """
    columns = [*(["start"] if bucket else []), *(GROUP_COLUMNS[group] for group in group_by)]
    by_hour = bucket == "hour" or (bucket is not None and zone is not UTC)
    rows: QuerySet[Any, Any]
    if question.by_end_user(group_by):
        if by_hour or not set(NOT_BY_END_USER).isdisjoint(group_by):
            raise NoEndUsers
        rows = question.end_user_rollups(group_by)
    else:
        rows = question.rollups(by_hour=by_hour, groups=group_by)
    rolled = _group_rows(rows, "start", columns, summed, bucket, zone)
    changes = _group_rows(question.changes(group_by), "admitted_at", columns, summed, bucket, zone)
    return rolled.union(changes, all=True)


def count_accepted(counts: Mapping[str, int]) -> int:
    """Return the number of accepted requests in `sums`: completed, cancelled and failed ones."""
    return sum(counts[outcome] for outcome in ExecutionOutcome.values)


def _require_whole_hours(question: UsageReport, zone: tzinfo) -> None:
    moment, end = question.start or _EARLIEST, question.end or datetime.now(UTC) + _DAY
    while moment < end + _DAY:
        if moment.astimezone(zone).utcoffset() % _HOUR:  # type: ignore[operator]
            raise OddHours
        moment += _DAY


def _group_rows(
    rows: QuerySet[Any, Any],
    time: str,
    columns: list[str],
    summed: tuple[str, ...],
    bucket: Bucket | None,
    zone: tzinfo,
) -> QuerySet[Any, Any]:
    """Yield tuples of 1, the columns' values and the sums, in the same form for rollups and changes."""
    # NOTE: hours of such zones are UTC's, and cut as these: by the zone's clocks one that comes twice would be one.
    truncated = {"at": _TRUNCATE[bucket](time, tzinfo=UTC if bucket == "hour" else zone)} if bucket else {}
    names = ["one", *("at" if name == "start" else name for name in columns)]
    grouped = rows.order_by().annotate(one=Value(1), **truncated).values(*names)
    totals = {f"sum_{name}": Sum(name, output_field=_WHOLE) for name in summed}
    found: QuerySet[Any, Any] = grouped.annotate(**totals).values_list(*names, *totals)
    return found


def total(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the totals over all rows of `sums`."""
    return {name: sum(row[name] for row in rows) for name in SUMMED}


def instant(text: str, zone: tzinfo = UTC) -> datetime:
    """Parse a date (its first instant) or a date and time with its offset from UTC (`Z` or +hh:mm). Without an offset,
    `zone` applies.

    Raises: ValueError if it is neither, or out of range.
    """
    moment = datetime.fromisoformat(text)
    if not 2000 <= moment.year < 2200:
        raise ValueError("the year must be from 2000 to 2199")
    return (moment.replace(tzinfo=zone) if moment.tzinfo is None else moment).astimezone(UTC)


def span(start: datetime | None, end: datetime | None, zone: tzinfo = UTC) -> tuple[datetime, datetime]:
    """Return the times asked for, completed: until now, from the beginning of the end's month by the clocks of `zone`.

    Raises:
        ValueError: the start is not before the end.
    """
    end = end or datetime.now(UTC)
    start = start or this_month(end - timedelta(microseconds=1), zone)[0]
    if start >= end:
        raise ValueError("must be before `to`")
    return start, end
