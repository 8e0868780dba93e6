"""Questions about requests: pages of them, the whole story of one, and how often they were refused, and when.

Each function answers for one tenant, whose scope must be open (`tenants.isolation.scopes.tenant_scope`), with a bounded
number of statements.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet

from billing.metering.usage import BUCKETS, Bucket, instant
from billing.models import TOKEN_CLASSES, Adjustment, Budget, Price, UsageEvent, Window
from billing.pricing.pricing import COMPONENTS
from millrace.apps.batches.models import Batch
from millrace.apps.request_log.models import RequestContent, RequestOutcome, RequestRecord
from millrace.conf.environment import platform_settings
from tenants.models import Tenant

PAGE, MOST_PAGE = 50, 200
MAX_EXECUTIONS = 200  # told of one request
LATEST_EVENT = timedelta(days=2)  # after a request's record, its legs are admitted: batches wait long
_MAX_LIMITS = 50
_MAX_BUCKETS = 1000


class BadCursor(ValueError):
    """No cursor of ours."""


@dataclass(frozen=True)
class Filters:
    """Which requests of a tenant. Times are half-open: `start` is in, `end` is not."""

    tenant_id: int
    start: datetime | None = None
    end: datetime | None = None
    model: str | None = None  # as asked for, or as served
    key_id: int | None = None
    project_id: int | None = None
    outcome: str | None = None
    status: str | None = None
    code: str | None = None
    endpoint: str | None = None

    def rows(self) -> QuerySet[RequestRecord]:
        names = ("key_id", "project_id", "outcome", "status", "code", "endpoint")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        times = {"started_at__gte": self.start, "started_at__lt": self.end}
        given |= {name: value for name, value in times.items() if value is not None}
        found = RequestRecord.objects.for_tenant(self.tenant_id).filter(**given)
        if self.model is not None:
            found = found.filter(Q(requested_model=self.model) | Q(served_model=self.model))
        if self.outcome is not None and self.outcome != RequestOutcome.COMPLETED:
            found = found.filter(~Q(outcome=RequestOutcome.COMPLETED))  # the condition of a partial index
        return found


@dataclass(frozen=True)
class Usage:
    """What a request used, all its legs together, adjustments included. Tokens are in the order of TOKEN_CLASSES."""

    tokens: Mapping[str, int]
    cost_femto: int
    saved_femto: int
    legs: int


@dataclass(frozen=True)
class ListedRequest:
    """A request in a list; `usage` is None until it is settled, and where nothing ran."""

    record: RequestRecord
    usage: Usage | None


@dataclass(frozen=True)
class RequestPage:
    """Requests, newest first. `older` and `newer` are cursors; None: there are none."""

    rows: tuple[ListedRequest, ...]
    older: str | None
    newer: str | None


def requests_page(filters: Filters, cursor: str | None = None, size: int = PAGE) -> RequestPage:
    """Return a page of the requests, from the newest on or from a cursor of another page.

    Raises:
        BadCursor: it is no cursor.
    """
    size = max(1, min(size, MOST_PAGE))
    rows, back = filters.rows(), False
    if cursor is not None:
        back, *place = _read(cursor)
        rows = rows.filter(**{"pk__gt" if back else "pk__lt": (filters.tenant_id, *place)})
    order = ("started_at", "request_id") if back else ("-started_at", "-request_id")
    found = list(rows.order_by(*order)[: size + 1])
    more, found = len(found) > size, found[:size]
    if back:
        found.reverse()
    older = _write(False, found[-1]) if found and (back or more) else None
    newer = _write(True, found[0]) if found and (more if back else cursor is not None) else None
    usage = usages(found)
    return RequestPage(tuple(ListedRequest(row, usage.get(row.request_id)) for row in found), older, newer)


def usages(records: Sequence[RequestRecord]) -> dict[str, Usage]:
    """Return what each of these requests used, by its name."""
    whole = {name: row.request_id for row in records for name in parts_of(row)}
    if not whole:
        return {}
    tenant_id, ats = records[0].tenant_id, [row.started_at for row in records]
    between = {"admitted_at__range": (min(ats), max(ats) + LATEST_EVENT), "request_id__in": list(whole)}
    columns = ("request_id", *TOKEN_CLASSES, "cost_femto", "saved_femto")
    sums: dict[str, list[int]] = {}
    for model, is_leg in ((UsageEvent, 1), (Adjustment, 0)):
        for name, *counts in model.objects.for_tenant(tenant_id).filter(**between).values_list(*columns):
            got = sums.setdefault(whole[name], [0] * (len(columns)))
            sums[whole[name]] = [one + int(other) for one, other in zip(got, (*counts, is_leg), strict=True)]
    return {
        name: Usage(dict(zip(TOKEN_CLASSES, counts, strict=False)), counts[-3], counts[-2], counts[-1])
        for name, counts in sums.items()
    }


def parts_of(record: RequestRecord) -> list[str]:
    """Return the names its prompts were answered under, as usage events have them."""
    return [record.request_id, *(f"{record.request_id}.{number}" for number in range(1, record.prompts))]


# The story of one.


@dataclass(frozen=True)
class RequestLine:
    """A step of the arithmetic: tokens x price = femto-USD, exactly."""

    component: str
    tokens: int
    nano_per_million: int
    femto: int
    price_id: int
    effective_from: datetime  # since when that has been the price


@dataclass(frozen=True)
class RequestExecution:
    """A priced call of a model for the request, as its worker reported it."""

    event: UsageEvent
    lines: tuple[RequestLine, ...]
    adjustments: tuple[Adjustment, ...]

    @property
    def prefill_us(self) -> int:
        """From when it was first scheduled to its first token."""
        return max(0, self.event.ttft_us - self.event.queue_us)

    @property
    def decode_us(self) -> int:
        """From the first token to the end."""
        return max(0, self.event.duration_us - max(self.event.ttft_us, self.event.queue_us))


@dataclass(frozen=True)
class HeldFrom:
    """A budget that the request had to fit, by the window it was held from."""

    budget_id: int
    name: str
    unit: str
    period: str
    scope: str
    mode: str
    amount: int


@dataclass(frozen=True)
class RequestStory:
    """All that is known of a request. `record` is None where it is too old, or was never written."""

    request_id: str
    record: RequestRecord | None
    others: tuple[RequestRecord, ...]  # the same request at other gateways, and calls that were given its answer
    legs: tuple[RequestExecution, ...]
    budgets: tuple[HeldFrom, ...]
    batch: str | None  # the name of the batch it is a line of
    content: RequestContent | None  # prompt and answer, where they are kept
    cost_femto: int
    saved_femto: int
    reserved_nano: int | None

    @property
    def settled(self) -> bool:
        return bool(self.legs)


def story(tenant_id: int, request_id: str) -> RequestStory | None:
    """Return the whole story of a request; None: the tenant has none of this name."""
    records = RequestRecord.objects.for_tenant(tenant_id)
    found = list(records.filter(request_id=request_id).order_by("started_at")[:20])
    record = found[0] if found else None
    names = parts_of(record) if record else [request_id]
    legs = _legs(tenant_id, names)
    if record is None and not legs:
        return None
    replays = list(records.filter(replay_of=request_id).order_by("started_at")[:20])
    rated: list[UsageEvent | Adjustment] = [leg.event for leg in legs]
    rated += [each for leg in legs for each in leg.adjustments]
    held = [leg.event.hold for leg in legs if leg.event.hold is not None]
    return RequestStory(
        request_id,
        record,
        (*found[1:], *replays),
        legs,
        _budgets(tenant_id, record.budget_periods if record else ()),
        _batch(tenant_id, record),
        stored_content(tenant_id, request_id),
        sum(int(each.cost_femto) for each in rated),
        sum(int(each.saved_femto) for each in rated),
        record.reserved_nano
        if record is not None and record.reserved_nano is not None
        else sum(held)
        if held
        else None,
    )


def stored_content(tenant_id: int, request_id: str) -> RequestContent | None:
    """Its prompt and answer, as long as the tenant wants them kept."""
    tenant = Tenant.objects.for_tenant(tenant_id).only("content_retention_days").first()
    if tenant is None or not tenant.content_retention_days:
        return None
    since = datetime.now(UTC) - timedelta(days=tenant.content_retention_days)
    return RequestContent.objects.for_tenant(tenant_id).filter(request_id=request_id, started_at__gte=since).first()


def _legs(tenant_id: int, names: Sequence[str]) -> tuple[RequestExecution, ...]:
    rows = UsageEvent.objects.for_tenant(tenant_id).filter(request_id__in=names)
    events = list(rows.order_by("admitted_at", "request_id", "leg")[:MAX_EXECUTIONS])
    if not events:
        return ()
    adjustments = list(Adjustment.objects.for_tenant(tenant_id).filter(request_id__in=names).order_by("made_at"))
    wanted = {price_id for event in events for price_id in event.price_ids or () if price_id}
    prices = Price.objects.in_bulk(wanted)
    return tuple(
        RequestExecution(
            event,
            tuple(_lines(event, prices)),
            tuple(each for each in adjustments if (each.request_id, each.leg) == (event.request_id, event.leg)),
        )
        for event in events
    )


def _lines(event: UsageEvent, prices: Mapping[int, Price]) -> Iterable[RequestLine]:
    for component, price_id in zip(COMPONENTS, event.price_ids or (), strict=False):
        price = None if price_id is None else prices.get(price_id)
        if price is not None:
            tokens = getattr(event, component)
            femto = tokens * price.nano_per_million
            yield RequestLine(component.value, tokens, price.nano_per_million, femto, price.pk, price.effective_from)


def _budgets(tenant_id: int, windows: Iterable[int]) -> tuple[HeldFrom, ...]:
    ids = Window.objects.for_tenant(tenant_id).filter(pk__in=list(windows)).values("budget_id")
    rows = Budget.objects.for_tenant(tenant_id).filter(pk__in=ids).order_by("pk")
    return tuple(
        HeldFrom(row.pk, row.name, row.unit, row.period, budget_scope(row), row.mode, row.amount) for row in rows
    )


def budget_scope(budget: Budget) -> str:
    """Whose it is: `tenant`, `project`, `key` or `member`."""
    named = {"project": budget.project_id, "key": budget.key_id, "member": budget.member_id}
    return next((scope for scope, pk in named.items() if pk), "tenant")


def _batch(tenant_id: int, record: RequestRecord | None) -> str | None:
    if record is None or record.batch_id is None:
        return None
    return Batch.objects.for_tenant(tenant_id).filter(pk=record.batch_id).values_list("name", flat=True).first()


# How they went.


@dataclass(frozen=True)
class Counts:
    """Requests of an hour or a day (UTC) by how they ended, and the time to the first token that callers saw."""

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
    """A limit or budget, and how many requests it did not allow."""

    kind: str  # limit or budget
    scope: str  # of a limit: tenant, project or key
    id: int
    name: str
    model: str
    requests: int


@dataclass(frozen=True)
class Rates:
    buckets: tuple[Counts, ...]  # oldest first; those without a request are left out
    total: Counts  # percentiles over all, too
    bounds: tuple[BoundBy, ...]  # the most frequent first


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


def rates(tenant_id: int, start: datetime, end: datetime, bucket: Bucket = "hour") -> Rates:
    """How many requests there were, how they ended, and how soon they began to be answered; the newest 1,000 buckets.

    Raises:
        ValueError: there is no such bucket.
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


def ttft_slo_ms() -> int:
    """Return what the time to the first token is to stay below for 95 of 100 requests."""
    return platform_settings().ttft_slo_ms


# Cursors: which way, and the row to go on from.


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
        raise BadCursor("Give one from another page.") from exc
