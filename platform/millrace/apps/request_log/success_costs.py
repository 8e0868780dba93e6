"""Successful requests of a tenant and their cost, by group.

What counts as successful is described in docs/reference/requests.md, and `millrace.apps.experiments.success` decides it
for single requests. The cost is that of all requests of the group, so cost per success includes failed attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, get_args

from django.db import connection

from billing.metering.usage import TooManyRows
from billing.models import UsageChange

SuccessGroup = Literal["model", "policy", "cache_layer", "key", "end_user"]
SUCCESS_GROUPS: tuple[SuccessGroup, ...] = get_args(SuccessGroup)
GOOD_SCORE = 0.5
RETRY_SECONDS = 120  # after the end of a request
MAX_GROUPS = 10_000
_COLUMNS: dict[SuccessGroup, str] = {
    "model": "r.served_model",
    "policy": "CASE WHEN r.route ? 'policy'"
    " THEN concat(r.requested_model, ' v', r.route->'policy'->>'version') ELSE '' END",
    "cache_layer": "r.cache_layer",
    "key": "r.key_id::text",
    "end_user": "r.end_user",
}
# A request has one record, except for a line of a batch that another gateway has continued; the last record counts.
# The prompts of a request are usage of `<request>.<number>`; its shadow, `<request>.s`, does not count. Feedback
# decides, if it reports success or a score.
_SUCCESSES = """
WITH records AS (
    SELECT DISTINCT ON (r.request_id) r.request_id, {group} AS name, r.outcome, r.failure, r.retry_key,
        r.started_at + r.total_ms * interval '1 ms' AS ended_at
    FROM request_log_requestrecord r
    WHERE r.tenant_id = %(tenant)s AND r.started_at >= %(start)s AND r.started_at < %(end)s
        AND r.outcome <> 'limited' AND r.replay_of = ''
        AND (%(model)s::text IS NULL OR r.served_model = %(model)s) AND (%(key)s::bigint IS NULL OR r.key_id = %(key)s)
        AND (%(project)s::bigint IS NULL OR r.project_id = %(project)s)
    ORDER BY r.request_id, r.started_at DESC
), usage AS (
    SELECT split_part(u.request_id, '.', 1) AS request_id, sum(u.cost_femto) AS cost
    FROM {changes} u
    WHERE u.tenant_id = %(tenant)s AND u.admitted_at >= %(start)s - interval '1 hour'
        AND u.admitted_at < %(end)s + interval '2 days'
        AND split_part(u.request_id, '.', 1) IN (SELECT request_id FROM records)
        AND split_part(u.request_id, '.', 2) <> 's'
    GROUP BY 1
), judged AS (
    SELECT r.*, coalesce(u.cost, 0) AS cost, coalesce(f.success, f.score >= %(good)s) AS reported,
        r.retry_key IS NOT NULL AND EXISTS (
            SELECT 1 FROM request_log_requestrecord l
            WHERE l.tenant_id = %(tenant)s AND l.retry_key = r.retry_key
                AND l.started_at BETWEEN r.ended_at AND r.ended_at + %(retry)s * interval '1 s'
        ) AS retried
    FROM records r LEFT JOIN usage u USING (request_id)
    LEFT JOIN feedback_submittedfeedback f ON f.tenant_id = %(tenant)s AND f.request_id = r.request_id
)
SELECT name, count(*),
    count(*) FILTER (WHERE coalesce(reported, outcome = 'completed' AND failure = '' AND NOT retried)),
    count(reported), count(*) FILTER (WHERE NOT reported), count(*) FILTER (WHERE failure = 'schema'),
    count(*) FILTER (WHERE failure = 'tool'), count(*) FILTER (WHERE retried),
    count(*) FILTER (WHERE outcome = 'cancelled'), count(*) FILTER (WHERE outcome IN ('failed', 'refused')), sum(cost)
FROM judged GROUP BY 1 ORDER BY 11 DESC, 2 DESC, 1 LIMIT %(most)s
"""


@dataclass(frozen=True)
class SuccessCosts:
    """The requests of a group. A request can have several signs of failure."""

    name: str = ""
    requests: int = 0
    succeeded: int = 0
    feedback: int = 0  # requests with feedback that reports success or a score
    bad_feedback: int = 0
    schema_failures: int = 0
    tool_failures: int = 0
    retried: int = 0  # the end user sent the same prompt again
    cancelled: int = 0
    errors: int = 0
    cost_femto: int = 0

    @property
    def success_rate(self) -> float | None:
        return self.succeeded / self.requests if self.requests else None

    @property
    def cost_per_success_femto(self) -> int | None:
        """Return the cost of all requests divided by the successful ones, rounded up; None without a success."""
        return -(-self.cost_femto // self.succeeded) if self.succeeded else None


def success_costs(
    tenant_id: int,
    start: datetime,
    end: datetime,
    group: SuccessGroup,
    *,
    model: str | None = None,
    key_id: int | None = None,
    project_id: int | None = None,
) -> list[SuccessCosts]:
    """Return the groups with the highest cost first. The tenant's scope must be open.

    Args:
        model: only requests that this model served.

    Raises:
        TooManyRows: there are more than `MAX_GROUPS` groups.
    """
    values: dict[str, Any] = {
        "tenant": tenant_id,
        "start": start,
        "end": end,
        "model": model,
        "key": key_id,
        "project": project_id,
    }
    values |= {"good": GOOD_SCORE, "retry": RETRY_SECONDS, "most": MAX_GROUPS + 1}
    statement = _SUCCESSES.format(group=_COLUMNS[group], changes=UsageChange._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        rows = cursor.fetchall()
    if len(rows) > MAX_GROUPS:
        raise TooManyRows
    return [SuccessCosts(name, *map(int, counts)) for name, *counts in rows]


def total_success_costs(rows: list[SuccessCosts]) -> SuccessCosts:
    """Return the sum of all groups."""
    counts = [field.name for field in fields(SuccessCosts) if field.name != "name"]
    return SuccessCosts("", **{name: sum(getattr(row, name) for row in rows) for name in counts})
