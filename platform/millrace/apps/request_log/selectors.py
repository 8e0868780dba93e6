"""Queries of the request log: pages, details of a request, and rates of outcomes.

Each function reads the rows of one tenant, whose scope must be open (`tenants.isolation.scopes.tenant_scope`), with a
bounded number of statements.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Count, DateTimeField, DurationField, F, Func, Q, QuerySet, Value

from billing.metering.usage import BUCKETS, Bucket, instant
from billing.models import Adjustment, Price, UsageEvent
from billing.rates.pricing import COMPONENTS
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.batches.models import Batch
from millrace.apps.request_log.models import RequestContent, RequestOutcome, RequestRecord
from millrace.apps.request_log.request_budgets import HeldFrom, budgets_of, rejecting_budget
from tenants.models import ApiKey, Tenant

PAGE, MAX_PAGE = 50, 200
MAX_SEARCHED = 1000  # stored requests that one search reads
MAX_SEARCHED_BYTES = 32 * 2**20  # bytes of stored requests that one search reads
MAX_EXECUTIONS = 200  # returned per request
LATEST_EVENT = timedelta(days=2)  # after a request's record, its executions are admitted: batches wait long
_MAX_LIMITS = 50
_MAX_BUCKETS = 1000


class BadCursor(ValueError):
    """An error of an invalid cursor."""


@dataclass(frozen=True)
class Filters:
    """Filters of a tenant's requests. `start` is inclusive, `end` exclusive."""

    tenant_id: int
    start: datetime | None = None
    end: datetime | None = None
    model: str | None = None  # requested or served
    key_id: int | None = None
    project_id: int | None = None
    outcome: str | None = None
    status: str | None = None
    code: str | None = None
    endpoint: str | None = None
    id_prefix: str | None = None
    request_ids: tuple[str, ...] | None = None  # only these
    min_total_ms: int | None = None
    cache_layer: str | None = None
    end_user: str | None = None
    member_id: int | None = None  # requests of the keys that this member created

    def rows(self) -> QuerySet[RequestRecord]:
        names = ("key_id", "project_id", "outcome", "status", "code", "endpoint", "cache_layer", "end_user")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        times = {"started_at__gte": self.start, "started_at__lt": self.end}
        given |= {name: value for name, value in times.items() if value is not None}
        records = RequestRecord.objects.for_tenant(self.tenant_id).filter(**given)
        if self.model is not None:
            records = records.filter(Q(requested_model=self.model) | Q(served_model=self.model))
        if self.member_id is not None:
            keys = ApiKey.objects.for_tenant(self.tenant_id).filter(created_by=self.member_id)
            records = records.filter(key_id__in=keys.values("pk"))
        if self.id_prefix is not None:
            records = records.filter(request_id__startswith=self.id_prefix)
        if self.min_total_ms is not None:
            records = records.filter(total_ms__gte=self.min_total_ms)
        if self.request_ids is not None:
            records = records.filter(request_id__in=self.request_ids)
        if self.outcome is not None and self.outcome != RequestOutcome.COMPLETED:
            records = records.filter(~Q(outcome=RequestOutcome.COMPLETED))  # the condition of a partial index
        return records


@dataclass(frozen=True)
class Usage:
    """What a request used, all its executions together, adjustments included. Tokens are in the order of
    TOKEN_CLASSES."""

    tokens: Mapping[str, int]
    cost_femto: int
    saved_femto: int
    executions: int


@dataclass(frozen=True)
class ListedRequest:
    """A request in a list. `usage` is None until the request is settled, and if no model ran."""

    record: RequestRecord
    usage: Usage | None


@dataclass(frozen=True)
class RequestPage:
    """A page of requests, newest first. `older` and `newer` are cursors of adjacent pages, or None."""

    rows: tuple[ListedRequest, ...]
    older: str | None
    newer: str | None


def requests_page(filters: Filters, cursor: str | None = None, size: int = PAGE) -> RequestPage:
    """Return a page of requests from the newest, or from a cursor of another page.

    Raises:
        BadCursor: the cursor is not valid.
    """
    size = max(1, min(size, MAX_PAGE))
    rows, back = filters.rows(), False
    if cursor is not None:
        back, *place = _read(cursor)
        rows = rows.filter(**{"pk__gt" if back else "pk__lt": (filters.tenant_id, *place)})
    order = ("started_at", "request_id") if back else ("-started_at", "-request_id")
    page = list(rows.order_by(*order)[: size + 1])
    more, page = len(page) > size, page[:size]
    if back:
        page.reverse()
    older = _write(False, page[-1]) if page and (back or more) else None
    newer = _write(True, page[0]) if page and (more if back else cursor is not None) else None
    usage = usages(page)
    return RequestPage(tuple(ListedRequest(row, usage.get(row.request_id)) for row in page), older, newer)


def usages(records: Sequence[RequestRecord]) -> dict[str, Usage]:
    """Return the usage of each request, by request ID."""
    whole = {name: row.request_id for row in records for name in parts_of(row)}
    if not whole:
        return {}
    tenant_id, ats = records[0].tenant_id, [row.started_at for row in records]
    between = {"admitted_at__range": (min(ats), max(ats) + LATEST_EVENT), "request_id__in": list(whole)}
    columns = ("request_id", *TOKEN_CLASSES, "cost_femto", "saved_femto")
    sums: dict[str, list[int]] = {}
    for model, is_execution in ((UsageEvent, 1), (Adjustment, 0)):
        for name, *counts in model.objects.for_tenant(tenant_id).filter(**between).values_list(*columns):
            got = sums.setdefault(whole[name], [0] * (len(columns)))
            sums[whole[name]] = [total + int(other) for total, other in zip(got, (*counts, is_execution), strict=True)]
    return {
        name: Usage(dict(zip(TOKEN_CLASSES, counts, strict=False)), counts[-3], counts[-2], counts[-1])
        for name, counts in sums.items()
    }


def parts_of(record: RequestRecord) -> list[str]:
    """Return the request IDs of its prompts in usage events, and that of the summary of a long conversation."""
    return [
        record.request_id,
        f"{record.request_id}.0",
        *(f"{record.request_id}.{number}" for number in range(1, record.prompts)),
    ]


# Details of a request.


@dataclass(frozen=True)
class RequestLine:
    """A priced component of an execution: tokens x price = femto-USD, exactly."""

    component: str
    tokens: int
    nano_per_million: int
    femto: int
    price_id: int
    effective_from: datetime  # when the price became active


@dataclass(frozen=True)
class RequestExecution:
    """A priced call of a model, as reported by its worker."""

    event: UsageEvent
    lines: tuple[RequestLine, ...]
    adjustments: tuple[Adjustment, ...]

    @property
    def prefill_us(self) -> int:
        """Microseconds from the first scheduling to the first token."""
        return max(0, self.event.ttft_us - self.event.queue_us)

    @property
    def decode_us(self) -> int:
        """Microseconds from the first token to the end."""
        return max(0, self.event.duration_us - max(self.event.ttft_us, self.event.queue_us))


@dataclass(frozen=True)
class RequestStory:
    """All that is known of a request. `record` is None if it is expired or was not written."""

    request_id: str
    record: RequestRecord | None
    others: tuple[RequestRecord, ...]  # records of the same request at other gateways, and replays of its response
    executions: tuple[RequestExecution, ...]
    budgets: tuple[HeldFrom, ...]
    rejecting_budget: HeldFrom | None  # the budget that rejected the request, unless it was deleted
    batch: str | None  # name of its batch, unless it is internal
    content: RequestContent | None  # if stored
    cost_femto: int
    saved_femto: int
    reserved_nano: int | None

    @property
    def settled(self) -> bool:
        return bool(self.executions)


def story(tenant_id: int, request_id: str) -> RequestStory | None:
    """Return the details of a request; None if the tenant has no such request."""
    records = RequestRecord.objects.for_tenant(tenant_id)
    own_records = list(records.filter(request_id=request_id).order_by("started_at")[:20])
    record = own_records[0] if own_records else None
    names = parts_of(record) if record else [request_id]
    executions = _executions(tenant_id, names)
    if record is None and not executions:
        return None
    replays = list(records.filter(replay_of=request_id).order_by("started_at")[:20])
    rated: list[UsageEvent | Adjustment] = [execution.event for execution in executions]
    rated += [entry for execution in executions for entry in execution.adjustments]
    held = [execution.event.reserved_nano for execution in executions if execution.event.reserved_nano is not None]
    return RequestStory(
        request_id,
        record,
        (*own_records[1:], *replays),
        executions,
        budgets_of(tenant_id, record.budget_periods if record else ()),
        rejecting_budget(tenant_id, record),
        _batch(tenant_id, record),
        stored_content(tenant_id, request_id),
        sum(int(entry.cost_femto) for entry in rated),
        sum(int(entry.saved_femto) for entry in rated),
        record.reserved_nano
        if record is not None and record.reserved_nano is not None
        else sum(held)
        if held
        else None,
    )


def stored_content(tenant_id: int, request_id: str) -> RequestContent | None:
    """Return the stored prompt and completions within the tenant's retention."""
    tenant = Tenant.objects.for_tenant(tenant_id).only("content_retention_days").first()
    if tenant is None or not tenant.content_retention_days:
        return None
    since = datetime.now(UTC) - timedelta(days=tenant.content_retention_days)
    return RequestContent.objects.for_tenant(tenant_id).filter(request_id=request_id, started_at__gte=since).first()


_SEARCH = """
SELECT request_id, (strpos(lower(body), %(text)s) > 0 OR strpos(lower(answers::text), %(text)s) > 0) AS is_match,
    %(rows)s < count OR %(bytes)s < all_bytes AS is_cut
FROM (
    SELECT *, sum(size) OVER (ORDER BY started_at DESC, request_id) AS total, sum(size) OVER () AS all_bytes,
        row_number() OVER (ORDER BY started_at DESC, request_id) AS number, count(*) OVER () AS count
    FROM (
        SELECT request_id, started_at, body, answers, octet_length(body) + pg_column_size(answers) AS size
        FROM request_log_requestcontent
        WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
        ORDER BY started_at DESC LIMIT %(rows)s + 1
    ) newest
) sizes WHERE number = 1 OR number <= %(rows)s AND total <= %(bytes)s
"""


@dataclass(frozen=True)
class ContentSearch:
    """The IDs of requests whose stored prompt or completion has a text. `complete`: all of the period were searched."""

    request_ids: tuple[str, ...]
    searched: int
    complete: bool


def search_content(tenant_id: int, text: str, start: datetime, end: datetime) -> ContentSearch:
    """Search the newest stored prompts and completions of the period without case, within the bounds of a search."""
    tenant = Tenant.objects.for_tenant(tenant_id).only("content_retention_days").first()
    if tenant is None or not tenant.content_retention_days:
        return ContentSearch((), 0, complete=True)
    since = max(start, datetime.now(UTC) - timedelta(days=tenant.content_retention_days))
    fields: dict[str, Any] = {"tenant": tenant_id, "text": text.lower(), "start": since, "end": end}
    fields |= {"rows": MAX_SEARCHED, "bytes": MAX_SEARCHED_BYTES}
    with connection.cursor() as cursor:
        cursor.execute(_SEARCH, fields)
        rows = cursor.fetchall()
    found = tuple(request_id for request_id, is_match, _ in rows if is_match)
    return ContentSearch(found, len(rows), complete=not any(is_cut for *_, is_cut in rows))


def _executions(tenant_id: int, names: Sequence[str]) -> tuple[RequestExecution, ...]:
    rows = UsageEvent.objects.for_tenant(tenant_id).filter(request_id__in=names)
    events = list(rows.order_by("admitted_at", "request_id", "execution")[:MAX_EXECUTIONS])
    if not events:
        return ()
    adjustments = list(Adjustment.objects.for_tenant(tenant_id).filter(request_id__in=names).order_by("created_at"))
    wanted = {price_id for event in events for price_id in event.price_ids or () if price_id}
    prices = Price.objects.in_bulk(wanted)
    return tuple(
        RequestExecution(
            event,
            tuple(_lines(event, prices)),
            tuple(
                adjustment
                for adjustment in adjustments
                if (adjustment.request_id, adjustment.execution) == (event.request_id, event.execution)
            ),
        )
        for event in events
    )


def _lines(event: UsageEvent, prices: Mapping[int, Price]) -> Iterable[RequestLine]:
    for component, price_id in zip(COMPONENTS, event.price_ids or (), strict=False):
        price = None if price_id is None else prices.get(price_id)
        if price is not None:
            tokens = getattr(event, component)
            femto = tokens * price.nano_per_million
            yield RequestLine(
                component.value,
                tokens,
                price.nano_per_million,
                femto,
                price.pk,
                price.effective_from,
            )


def served_model(record: RequestRecord) -> str:
    """Return the model that answered, or that was attempted last; empty if the request was rejected before it ran."""
    is_rejected = record.outcome in (RequestOutcome.LIMITED, RequestOutcome.REFUSED)
    return "" if is_rejected and not record.placements else record.served_model


def _batch(tenant_id: int, record: RequestRecord | None) -> str | None:
    if record is None or record.batch_id is None:
        return None
    rows = Batch.objects.for_tenant(tenant_id).filter(pk=record.batch_id, is_internal=False)
    return rows.values_list("name", flat=True).first()


# Rates.


@dataclass(frozen=True)
class Counts:
    """Numbers of requests of an hour or a day (UTC) by outcome, and percentiles of the time to the first token."""

    start: datetime
    requests: int
    completed: int
    cancelled: int
    failed: int
    limited: int
    refused: int
    ttft_p50_ms: int | None
    ttft_p95_ms: int | None


@dataclass(frozen=True)
class BoundBy:
    """A limit or budget, and the number of requests that it rejected."""

    kind: str  # limit or budget
    scope: str  # tenant, project or key, for a limit
    id: int
    name: str
    model: str
    requests: int


@dataclass(frozen=True)
class Rates:
    buckets: tuple[Counts, ...]  # oldest first, without empty buckets
    total: Counts  # sum of all buckets
    bounds: tuple[BoundBy, ...]  # most frequent first


_COUNTS = """
SELECT CASE WHEN grouping(bucket) = 1 THEN %(start)s ELSE bucket END, grouping(bucket), count(*),
    count(*) FILTER (WHERE outcome = 'completed'), count(*) FILTER (WHERE outcome = 'cancelled'),
    count(*) FILTER (WHERE outcome = 'failed'), count(*) FILTER (WHERE outcome = 'limited'),
    count(*) FILTER (WHERE outcome = 'refused'),
    percentile_disc(0.5) WITHIN GROUP (ORDER BY ttft_ms), percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM (SELECT date_trunc(%(bucket)s, started_at, 'UTC') AS bucket, outcome, ttft_ms FROM request_log_requestrecord
    WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s) r
GROUP BY GROUPING SETS ((bucket), ()) ORDER BY 2 DESC, 1 DESC LIMIT %(most)s
"""
_BOUNDS = """
SELECT limited_by ->> 'kind', coalesce(limited_by ->> 'scope', ''), coalesce((limited_by ->> 'id')::bigint, 0),
    coalesce(limited_by ->> 'name', ''), coalesce(limited_by ->> 'model', ''), count(*)
FROM request_log_requestrecord
WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
    AND outcome <> 'completed' AND outcome = 'limited' AND limited_by IS NOT NULL
GROUP BY 1, 2, 3, 4, 5 ORDER BY 6 DESC, 1, 3 LIMIT %(most)s
"""


# The number of all requests is read from an index, the others from the index of requests that failed.
_OUTCOMES = """
SELECT 'all', count(*) FROM request_log_requestrecord
WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
UNION ALL
SELECT outcome, count(*) FROM request_log_requestrecord
WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s AND outcome <> 'completed'
GROUP BY outcome
"""


# Both percentiles of one sorted list, from the index of outcomes.
_TTFT = """
SELECT percentile_disc(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY ttft_ms) FROM request_log_requestrecord
WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
"""


def total_rates(tenant_id: int, start: datetime, end: datetime, *, with_ttft: bool) -> Rates:
    """Return the total of `rates` without buckets, and without times to the first token if they are not needed.

    It reads fewer rows.
    """
    values: dict[str, Any] = {"tenant": tenant_id, "start": start, "end": end}
    with connection.cursor() as cursor:
        cursor.execute(_OUTCOMES, values)
        counts = dict(cursor.fetchall())
        cursor.execute(_BOUNDS, {**values, "most": _MAX_LIMITS})
        bounds = tuple(BoundBy(*row) for row in cursor.fetchall())
        ttft: tuple[int | None, int | None] = (None, None)
        if with_ttft:
            cursor.execute(_TTFT, values)
            ttft = cursor.fetchone()[0] or ttft
    requests = counts.pop("all")
    total = Counts(
        start,
        requests,
        completed=requests - sum(counts.values()),
        cancelled=counts.get(RequestOutcome.CANCELLED, 0),
        failed=counts.get(RequestOutcome.FAILED, 0),
        limited=counts.get(RequestOutcome.LIMITED, 0),
        refused=counts.get(RequestOutcome.REFUSED, 0),
        ttft_p50_ms=ttft[0],
        ttft_p95_ms=ttft[1],
    )
    return Rates((), total, bounds)


def rates(tenant_id: int, start: datetime, end: datetime, bucket: Bucket = "hour") -> Rates:
    """Return numbers of requests by outcome and bucket, and by the limit or budget that rejected them.

    At most the newest 1,000 buckets are returned.

    Raises:
        ValueError: the bucket is not `hour` or `day`.
    """
    if bucket not in BUCKETS:
        raise ValueError(f"want one of {', '.join(BUCKETS)}")
    values: dict[str, Any] = {"tenant": tenant_id, "start": start, "end": end, "bucket": bucket}
    with connection.cursor() as cursor:
        cursor.execute(_COUNTS, {**values, "most": _MAX_BUCKETS + 1})
        rows = cursor.fetchall()
        cursor.execute(_BOUNDS, {**values, "most": _MAX_LIMITS})
        bounds = tuple(BoundBy(*row) for row in cursor.fetchall())
    (total,) = (Counts(first, *rest) for first, whole, *rest in rows if whole)
    buckets = [Counts(first, *rest) for first, whole, *rest in rows if not whole]
    return Rates(tuple(reversed(buckets)), total, bounds)


@dataclass(frozen=True)
class HistogramBin:
    """Numbers of requests that started within a part of a period."""

    start: datetime
    end: datetime
    requests: int
    failed: int
    limited: int  # by a limit, or refused


def histogram(filters: Filters, step: timedelta, origin: datetime) -> tuple[HistogramBin, ...]:
    """Return the requests of the filters in parts of their period, oldest first, with the empty parts.

    Args:
        step: the length of a part.
        origin: a time at which a part starts, or would start outside of the period.

    Raises:
        ValueError: the filters have no period.
    """
    if filters.start is None or filters.end is None or filters.start >= filters.end:
        raise ValueError("a histogram needs a period")
    start = origin + (filters.start - origin) // step * step
    number = -((start - filters.end) // step)
    at = Func(
        *(Value(step, DurationField()), F("started_at"), Value(start, DateTimeField())),
        function="date_bin",
        output_field=DateTimeField(),
    )
    outcome = RequestOutcome
    rows = (
        filters.rows()
        .order_by()
        .annotate(bin=at)
        .values("bin")
        .annotate(
            requests=Count("*"),
            failed=Count("outcome", filter=Q(outcome=outcome.FAILED)),
            limited=Count("outcome", filter=Q(outcome__in=(outcome.LIMITED, outcome.REFUSED))),
        )
    )
    counts = [(0, 0, 0)] * number
    for row in rows:
        counts[(row["bin"] - start) // step] = row["requests"], row["failed"], row["limited"]
    return tuple(
        HistogramBin(start + step * place, start + step * (place + 1), *found) for place, found in enumerate(counts)
    )


def ttft_slo_ms() -> int:
    """Return the target of the 95th percentile of the time to the first token, in milliseconds."""
    return settings.MILLRACE.ttft_slo_ms


# Cursors: the direction and the last row.


def _write(back: bool, row: RequestRecord) -> str:
    text = f"{'b' if back else 'f'} {row.started_at.astimezone(UTC).isoformat()} {row.request_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read(cursor: str) -> tuple[bool, datetime, str]:
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        way, at, name = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split(" ")
        if way not in ("b", "f") or not name or "\0" in name:
            raise ValueError(way)
        return way == "b", instant(at), name
    except (ValueError, binascii.Error) as exc:
        raise BadCursor("Send a cursor from another page.") from exc
