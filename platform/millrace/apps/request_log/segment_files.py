"""The CSV of the cost explorer: a row for each segment, with a column for each day or week."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.request_log.cost_segments import Amount, Measure, SegmentQuery, find_segments, segment_labels
from tenants import csv_tables

Step = Literal["day", "week"]
OTHERS = "others"  # the label of the end users that have no rows of their own
_DAY = timedelta(days=1)
_COLUMNS: Mapping[Measure, str] = {
    "cost": "cost_usd",
    "tokens": "tokens",
    "requests": "requests",
    "success": "cost_per_success_usd",
}


@dataclass(frozen=True)
class SegmentFile:
    """A question of the cost explorer with the period to compare with, if there is one."""

    query: SegmentQuery
    until: datetime  # the end of the period
    step: Step
    previous: SegmentQuery | None = None

    @property
    def steps(self) -> list[date]:
        """The first days of all steps of the period."""
        return steps_between(self.query.start, self.until, self.step)

    def count_cells(self, segments: int) -> int:
        """Return the number of cells of this number of segments."""
        return segments * (4 + len(self.steps))


def step_of(day: date, step: Step) -> date:
    """Return the first day of the day's step. Weeks start on Monday."""
    return day - timedelta(days=day.weekday()) if step == "week" else day


def steps_between(start: datetime, end: datetime, step: Step) -> list[date]:
    """Return the first day of each step from start to end, in UTC."""
    first = step_of(start.astimezone(UTC).date(), step)
    length = 7 if step == "week" else 1
    last = (end - timedelta(microseconds=1)).astimezone(UTC).date()
    return [first + timedelta(days=number) for number in range(0, (last - first).days + 1, length)]


def by_step(days: Mapping[date, Amount], step: Step) -> dict[date, Amount]:
    """Return the amounts of days by step."""
    found: dict[date, Amount] = {}
    for day, amount in days.items():
        at = step_of(day, step)
        found[at] = found[at] + amount if at in found else amount
    return found


def segments_csv(file: SegmentFile) -> str:
    """Return the CSV with all segments. The tenant's scope must be open.

    Raises:
        TooManyRows: the period has too many sums.
    """
    column = _COLUMNS[file.query.measure]
    heading = [file.query.dimension, "id", "detail", column]
    heading += [f"previous_{column}"] if file.previous else []
    return csv_tables.as_csv([*heading, *(f"{at}" for at in file.steps)], _rows(file))


def _rows(file: SegmentFile) -> Iterator[list[csv_tables.Value]]:
    found = find_segments(file.query)
    before = find_segments(file.previous, chosen=found.names) if file.previous else None
    labels = segment_labels(file.query.tenant_id, file.query.dimension, found.names)
    for name in (*found.names, None) if None in found.days else found.names:
        label, detail = (OTHERS, "") if name is None else labels.get(name, ("", ""))
        cells = by_step(found.days[name], file.step)
        previous = [_cell(file, before.total_of(name))] if before else []
        row: list[csv_tables.Value] = [label, name or "", detail, _cell(file, found.total_of(name)), *previous]
        yield [*row, *(_cell(file, cells.get(at)) for at in file.steps)]


def _cell(file: SegmentFile, amount: Amount | None) -> csv_tables.Value:
    figure = None if amount is None else amount.figure
    if file.query.measure in ("tokens", "requests"):
        return figure or 0
    if file.query.measure == "cost":
        return decimal(figure or 0, FEMTO_DIGITS, 2)
    return "" if figure is None else decimal(figure, FEMTO_DIGITS, 2)
