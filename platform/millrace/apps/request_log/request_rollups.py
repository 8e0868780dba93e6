"""Sums of requests by tenant and UTC day, and the queries that read them.

A day is summed once it is over, and again after each change of it: a late record, usage that is settled or corrected
later, feedback. Triggers write the changed days. A query reads the other days from the sums and the rest of its period
from the requests, so results are exact at any time. Both are computed by the same statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection

from billing.models import UsageChange, UsageEvent
from millrace.apps.request_log.models import ChangedDay, RequestRollup, RequestRollupState
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

WAIT = timedelta(minutes=10)  # after a day or a change, until it is summed; no transaction takes longer
REBUILT = 100  # changed days that one transaction sums again
GOOD_SCORE = 0.5
RETRY_SECONDS = 120  # after the end of a request
_LOCK = 0x72657164  # an arbitrary advisory lock, used only here
_DAY = timedelta(days=1)
_GROUPED = ("project_id", "served_model", "policy", "cache_layer", "answer_miss")
_BY_REQUEST = ("key_id", "end_user")  # groups that only the requests have
# Requests that were tried, not rejected by a limit, and those with a known cache layer.
_COUNTS = {
    "requests": "is_tried",
    "succeeded": "is_tried AND coalesce(reported, outcome = 'completed' AND failure = '' AND NOT retried)",
    "feedback": "is_tried AND reported IS NOT NULL",
    "bad_feedback": "is_tried AND NOT reported",
    "schema_failures": "is_tried AND failure = 'schema'",
    "tool_failures": "is_tried AND failure = 'tool'",
    "retried": "is_tried AND retried",
    "cancelled": "is_tried AND outcome = 'cancelled'",
    "errors": "is_tried AND outcome IN ('failed', 'refused')",
    "layer_requests": "is_layered",
    "misses": "answer_miss <> ''",
}
_ADDED = {"cost_femto": "is_tried"} | dict.fromkeys(
    ("input_tokens", "read_tokens", "output_tokens", "hit_input", "hit_output", "saved_femto", "host_tokens"),
    "is_layered",
)
SUMS = {name: f"count(*) FILTER (WHERE {condition})" for name, condition in _COUNTS.items()} | {
    name: f"coalesce(sum({name}) FILTER (WHERE {condition}), 0)" for name, condition in _ADDED.items()
}
# The record of another gateway that has continued the same line of a batch: only the last one counts.
_LAST = """(r.batch_id IS NULL OR NOT EXISTS (SELECT 1 FROM request_log_requestrecord l
            WHERE l.tenant_id = r.tenant_id AND l.request_id = r.request_id AND l.started_at > r.started_at AND {0}))"""
_IS_TRIED = "{0}.outcome <> 'limited' AND {0}.replay_of = ''"
_IS_LAYERED = "{0}.cache_layer <> ''"
# The prompts of a request are usage of `<request>.<number>`; its shadow, `<request>.s`, does not count. Lines of a
# batch wait for hours, and may be continued by another gateway. Feedback decides, if it reports success or a score.
_REQUESTS = f"""
WITH records AS (
    SELECT r.tenant_id, r.request_id, r.started_at, r.project_id, r.key_id, r.served_model, r.cache_layer, r.end_user,
        r.outcome, r.failure, r.retry_key, r.started_at + r.total_ms * interval '1 ms' AS ended_at,
        CASE WHEN r.route ? 'policy'
            THEN concat(r.requested_model, ' v', r.route->'policy'->>'version') ELSE '' END AS policy,
        CASE WHEN r.route #>> '{{{{answer_cache,miss}}}}' IS NULL THEN ''
            ELSE coalesce('semantic_' || (r.route #>> '{{{{answer_cache,semantic,miss}}}}'),
                r.route #>> '{{{{answer_cache,miss}}}}') END AS answer_miss,
        {_IS_TRIED.format("r")} AND {_LAST.format(_IS_TRIED.format("l"))} AS is_tried,
        {_IS_LAYERED.format("r")} AND {_LAST.format(_IS_LAYERED.format("l"))} AS is_layered
    FROM request_log_requestrecord r
    WHERE r.started_at >= %(start)s AND r.started_at < %(end)s {{records}}
), usage AS (
    SELECT r.tenant_id, r.request_id, r.started_at, sum(u.cost_femto) AS cost_femto,
        sum(u.uncached + u.cache_write_5m + u.cache_write_1h) AS input_tokens, sum(u.cache_read) AS read_tokens,
        sum(u.output) AS output_tokens, sum(u.answer_hit_input) AS hit_input, sum(u.answer_hit_output) AS hit_output,
        sum(u.saved_femto) AS saved_femto
    FROM records r JOIN {UsageChange._meta.db_table} u ON u.tenant_id = r.tenant_id
        AND split_part(u.request_id, '.', 1) = r.request_id
        AND u.admitted_at >= r.started_at - interval '1 day' AND u.admitted_at < r.started_at + interval '2 days'
    WHERE u.admitted_at >= %(start)s::timestamptz - interval '1 day'
        AND u.admitted_at < %(end)s::timestamptz + interval '2 days'
        AND split_part(u.request_id, '.', 2) <> 's' AND (r.is_tried OR r.is_layered) {{usage}}
    GROUP BY 1, 2, 3
), host AS (
    SELECT r.tenant_id, r.request_id, r.started_at, sum(least(u.host_tokens, u.cache_read)) AS host_tokens
    FROM records r JOIN {UsageEvent._meta.db_table} u ON u.tenant_id = r.tenant_id
        AND split_part(u.request_id, '.', 1) = r.request_id
        AND u.admitted_at >= r.started_at - interval '1 day' AND u.admitted_at < r.started_at + interval '2 days'
    WHERE u.admitted_at >= %(start)s::timestamptz - interval '1 day'
        AND u.admitted_at < %(end)s::timestamptz + interval '2 days'
        AND u.host_tokens > 0 AND u.outcome <> 'failed' AND r.is_layered AND r.cache_layer = 'prefix' {{usage}}
    GROUP BY 1, 2, 3
), judged AS (
    SELECT r.tenant_id, (r.started_at AT TIME ZONE 'UTC')::date AS day, r.project_id, r.key_id, r.served_model,
        r.policy, r.end_user, r.answer_miss,
        CASE WHEN h.host_tokens > 0 THEN 'host_memory' ELSE r.cache_layer END AS cache_layer,
        r.is_tried, r.is_layered, r.outcome, r.failure, coalesce(f.success, f.score >= {GOOD_SCORE}) AS reported,
        r.is_tried AND r.retry_key IS NOT NULL AND EXISTS (
            SELECT 1 FROM request_log_requestrecord l
            WHERE l.tenant_id = r.tenant_id AND l.retry_key = r.retry_key
                AND l.started_at BETWEEN r.ended_at AND r.ended_at + {RETRY_SECONDS} * interval '1 s'
        ) AS retried, u.cost_femto, u.input_tokens, u.read_tokens, u.output_tokens, u.hit_input, u.hit_output,
        u.saved_femto, h.host_tokens
    FROM records r LEFT JOIN usage u USING (tenant_id, request_id, started_at)
        LEFT JOIN host h USING (tenant_id, request_id, started_at)
        LEFT JOIN feedback_submittedfeedback f ON f.tenant_id = r.tenant_id AND f.request_id = r.request_id
    WHERE r.is_tried OR r.is_layered OR r.answer_miss <> ''
)
"""  # noqa: S608  (names from above, nothing from outside)
_ROLLUP = RequestRollup._meta.db_table
_INSERT = f"""
INSERT INTO {_ROLLUP} (tenant_id, day, {", ".join(_GROUPED)}, {", ".join(SUMS)})
{_REQUESTS} SELECT tenant_id, %(day)s::date, {", ".join(_GROUPED)}, {", ".join(SUMS.values())}
FROM judged GROUP BY tenant_id, {", ".join(_GROUPED)}
"""  # noqa: S608
_PROGRESS = f"""
SELECT built_from, built_until,
    ARRAY(SELECT DISTINCT day FROM {ChangedDay._meta.db_table} WHERE tenant_id = %(tenant)s)
FROM {RequestRollupState._meta.db_table}
"""  # noqa: S608


@dataclass(frozen=True)
class RequestFilters:
    """Filters of a tenant's requests."""

    model: str | None = None  # the model that served the request
    key_id: int | None = None
    project_id: int | None = None
    key_ids: tuple[int, ...] | None = None
    end_user: str | None = None


# Conditions of the fields of RequestFilters. Those of the last three need the requests.
_CONDITIONS = {
    "model": "{0}served_model = %(model)s",
    "project_id": "{0}project_id = %(project_id)s",
    "key_id": "{0}key_id = %(key_id)s",
    "key_ids": "{0}key_id = ANY(%(key_ids)s::bigint[])",
    "end_user": "{0}end_user = %(end_user)s",
}
_NEED_REQUESTS = ("key_id", "key_ids", "end_user")


def request_sums(
    tenant_id: int,
    start: datetime,
    end: datetime,
    groups: Sequence[str],
    names: Sequence[str],
    filters: RequestFilters | None = None,
) -> dict[tuple[Any, ...], dict[str, int]]:
    """Return the SUMS with these names by group. The tenant's scope must be open.

    Args:
        groups: columns of `RequestRollup`, or key_id and end_user, whose requests are read one by one.
    """
    given = {name: value for name, value in asdict(filters or RequestFilters()).items() if value is not None}
    days, parts = split(tenant_id, start, end)
    if given.keys() & set(_NEED_REQUESTS) or any(group in _BY_REQUEST for group in groups):
        days, parts = [], [(start, end)]
    condition = " ".join(f"AND {_CONDITIONS[name]}" for name in given)
    given |= {"tenant": tenant_id, "key_ids": list(given.get("key_ids", ()))}
    grouping = f"GROUP BY {', '.join(groups)}" if groups else ""
    records = f"AND r.tenant_id = %(tenant)s {condition.format('r.')}"
    raw = _REQUESTS.format(records=records, usage="AND u.tenant_id = %(tenant)s")
    raw += f"SELECT {', '.join([*groups, *(SUMS[name] for name in names)])} FROM judged {grouping}"  # noqa: S608
    statements: list[tuple[str, dict[str, Any]]] = [(raw, {"start": first, "end": last}) for first, last in parts]
    if days:
        sums = ", ".join([*groups, *(f"coalesce(sum({name}), 0)" for name in names)])
        rows = f"tenant_id = %(tenant)s AND day = ANY(%(days)s) {condition.format('')}"
        rolled = f"SELECT {sums} FROM {_ROLLUP} WHERE {rows} {grouping}"  # noqa: S608
        statements.append((rolled, {"days": days}))
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    with connection.cursor() as cursor:
        for statement, values in statements:
            cursor.execute(statement, given | values)
            for row in cursor.fetchall():
                counts = found.setdefault(row[: len(groups)], dict.fromkeys(names, 0))
                for name, count in zip(names, row[len(groups) :], strict=True):
                    counts[name] += int(count)
    return found


def split(tenant_id: int, start: datetime, end: datetime) -> tuple[list[date], list[tuple[datetime, datetime]]]:
    """Return the days of the period whose sums are complete, and the other parts of the period."""
    with connection.cursor() as cursor:
        cursor.execute(_PROGRESS, {"tenant": tenant_id})
        built_from, built_until, changed = cursor.fetchone() or (date.max, date.min, ())
    day, last = max(_next_day(start), built_from), min(end.astimezone(UTC).date(), built_until)
    days, parts, at = [], [], start
    while day < last:
        if day not in changed:
            days.append(day)
            if at < _midnight(day):
                parts.append((at, _midnight(day)))
            at = _midnight(day + _DAY)
        day += _DAY
    return days, [*parts, (at, end)] if at < end else parts


def build(wait: timedelta = WAIT) -> int:
    """Sum the days that are over, and those that have changed. Return their number, counting changes by tenant.

    It is safe to call at any time, from any number of processes, and after a crash.
    """
    days = 0
    while _build_next(wait):
        days += 1
    while changed := _rebuild(wait):
        days += changed
    return days


def forget_before(before: datetime) -> None:
    """Remove the sums of the days with requests before a time, because these requests will be removed."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        _lock()
        first = _next_day(before)
        RequestRollup.objects.all_tenants().filter(day__lt=first).delete()
        ChangedDay.objects.all_tenants().filter(day__lt=first).delete()
        state = RequestRollupState.objects.first()
        if state is not None and state.built_from < first:
            state.built_from, state.built_until = first, max(first, state.built_until)
            state.save()


def _build_next(wait: timedelta) -> bool:
    """Sum the first day that is not summed. Return whether there was one that is over."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        now = _lock()
        state = RequestRollupState.objects.first() or _first_state(now)
        day = state.built_until
        if _midnight(day + _DAY) + wait > now:
            return False
        ChangedDay.objects.all_tenants().filter(day=day, changed_at__lt=now - wait).delete()
        cursor.execute(_INSERT.format(records="", usage=""), _bounds(day))
        state.built_until = day + _DAY
        state.save()
    return True


def _first_state(now: datetime) -> RequestRollupState:
    with connection.cursor() as cursor:
        cursor.execute("SELECT min(started_at) FROM request_log_requestrecord")
        (oldest,) = cursor.fetchone()
    kept = _next_day(now - timedelta(days=settings.MILLRACE.request_log_retention_days))  # older ones are removed
    first = max(kept, (oldest or now).astimezone(UTC).date())
    return RequestRollupState(pk=1, built_from=first, built_until=first)


def _rebuild(wait: timedelta) -> int:
    """Sum some of the changed days again. Return how many."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        now = _lock()
        state = RequestRollupState.objects.first()
        if state is None:
            return 0
        changes = ChangedDay.objects.all_tenants().filter(changed_at__lt=now - wait, day__lt=state.built_until)
        pairs = list(changes.order_by("tenant_id", "day").values_list("tenant_id", "day").distinct()[:REBUILT])
        condition = "AND {0}.tenant_id = %(tenant)s"
        statement = _INSERT.format(records=condition.format("r"), usage=condition.format("u"))
        for tenant_id, day in pairs:
            # NOTE: first, so that the statements below see everything that these rows are about.
            changes.filter(tenant_id=tenant_id, day=day).delete()
            RequestRollup.objects.all_tenants().filter(tenant_id=tenant_id, day=day).delete()
            if day >= state.built_from:
                cursor.execute(statement, {**_bounds(day), "tenant": tenant_id})
    return len(pairs)


def _lock() -> datetime:
    """Wait for other runs, and return the time of the database."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    return now


def _bounds(day: date) -> dict[str, Any]:
    return {"start": _midnight(day), "end": _midnight(day + _DAY), "day": day}


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _next_day(moment: datetime) -> date:
    """Return the first day that begins at the time or later."""
    day = moment.astimezone(UTC).date()
    return day if _midnight(day) == moment else day + _DAY
