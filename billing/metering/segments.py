"""Usage of a period by segment and UTC day: each of the largest segments, and all others together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date
from typing import Any, Literal

from django.core.exceptions import EmptyResultSet
from django.db import connection

from billing.metering.usage import Group, UsageReport, group_changes

Dimension = Literal["model", "key", "project", "member", "end_user"]
# The group of usage that a dimension is computed from. A member has the keys that the member created.
_GROUPS: dict[Dimension, Group] = {
    "model": "model",
    "key": "key",
    "project": "project",
    "member": "key",
    "end_user": "end_user",
}
_MEMBERS = "LEFT JOIN tenants_apikey k ON k.id = found.segment AND k.tenant_id = %s"
_STATEMENT = """
WITH found (one, day, segment, {columns}) AS ({rows}),
summed AS (SELECT {segment} AS segment, day, sum({amount}) AS amount FROM found {join} GROUP BY 1, 2),
ranked AS (
    SELECT segment, row_number() OVER (ORDER BY sum(amount) DESC, segment) AS place FROM summed
    WHERE segment IS NOT NULL GROUP BY segment
)
SELECT CASE WHEN {chosen} THEN segment END, day, sum(amount), (SELECT count(*) FROM ranked)
FROM summed LEFT JOIN ranked USING (segment) GROUP BY 1, 2
"""


@dataclass(frozen=True)
class SegmentDays:
    """The amount of each segment and day. The segment None is all others together.

    `count` is the number of all segments, without end users that have no rows of their own. A segment is the ID of a
    row as text, or a name; empty: no such row.
    """

    amounts: dict[tuple[str | None, date], int]
    count: int


def sum_segments(
    question: UsageReport,
    dimension: Dimension,
    columns: tuple[str, ...],
    *,
    largest: int | None = None,
    chosen: Sequence[str] | None = None,
) -> SegmentDays:
    """Return the sum of these columns by segment and day. The tenant's scope must be open.

    Args:
        columns: some of SUMMED, which are added.
        largest: the number of segments that are returned, those with the highest amounts.
        chosen: the segments that are returned. Without both, all are.
    """
    try:
        rows, values = group_changes(question, (_GROUPS[dimension],), "day", UTC, columns).query.sql_with_params()
    except EmptyResultSet:  # the selection has no keys
        return SegmentDays({}, 0)
    is_member = dimension == "member"
    condition = "true" if largest is None else "place <= %s"
    parameters: list[Any] = [*values, *([question.tenant_id] if is_member else [])]
    if chosen is not None:
        condition = "segment = ANY(%s::text[])"
        parameters.append(list(chosen))
    elif largest is not None:
        parameters.append(largest)
    names = [f"column_{number}" for number in range(len(columns))]
    statement = _STATEMENT.format(
        columns=", ".join(names),
        rows=rows,
        segment="coalesce(k.created_by_id::text, '')" if is_member else "found.segment::text",
        amount=" + ".join(names),
        join=_MEMBERS if is_member else "",
        chosen=condition,
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found = cursor.fetchall()
    amounts = {(segment, day.astimezone(UTC).date()): int(amount) for segment, day, amount, _count in found}
    return SegmentDays(amounts, found[0][3] if found else 0)
