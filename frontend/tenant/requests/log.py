"""View models of the request log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from urllib.parse import urlencode

from frontend.core.date_ranges import date_range_of
from frontend.core.labels import outcome_label
from frontend.core.numbers import Money, common_places, share
from frontend.core.page_context import PageContext
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import BadCursor, Filters, ListedRequest
from tenants.models import ApiKey, Project

MAX_CHOICES = 500
PAGE_SIZE = 50
KINDS: dict[str, Literal["good", "warn", "bad", ""]] = {
    RequestOutcome.COMPLETED: "good",
    RequestOutcome.CANCELLED: "",
    RequestOutcome.LIMITED: "warn",
    RequestOutcome.REFUSED: "warn",
    RequestOutcome.FAILED: "bad",
}
_FILTERS = ("model", "key", "project", "outcome", "code")


@dataclass(frozen=True)
class RequestLogOption:
    value: str
    label: str
    chosen: bool


@dataclass(frozen=True)
class RequestLogFilters:
    """Values of the filter form."""

    keys: tuple[RequestLogOption, ...]
    projects: tuple[RequestLogOption, ...]
    outcomes: tuple[RequestLogOption, ...]
    model: str
    code: str
    hidden: tuple[tuple[str, str], ...]  # parameters of the date range
    clear_url: str  # empty without filters


@dataclass(frozen=True)
class RequestLogRow:
    request_id: str
    url: str
    at: datetime
    outcome: str
    outcome_kind: str
    status: str
    status_text: str  # reason for a missing answer; empty for an answered request
    asked: str
    served: str  # set if it differs from the requested model
    key: str
    endpoint: str
    ttft_us: int | None
    total_us: int
    input: int | None
    cached: int | None
    output: int | None
    cost: Money | None


@dataclass(frozen=True)
class RequestLogPanel:
    rows: tuple[RequestLogRow, ...]
    older_url: str
    newer_url: str
    error: str
    filtered: bool
    cost_places: int  # decimals of the column


@dataclass(frozen=True)
class RequestLogBoundRow:
    label: str
    kind: str
    requests: int


@dataclass(frozen=True)
class RequestLogStats:
    requests: int
    failed: str
    failed_of: int
    limited: str
    limited_of: int
    ttft_p50_us: int | None
    ttft_p95_us: int | None
    objective_us: int
    misses_objective: bool
    bounds: tuple[RequestLogBoundRow, ...]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _filters(ctx: PageContext) -> Filters:
    """Return the filters of the query string. Invalid values are ignored."""
    query, date_range = {name: value.strip()[:128] for name, value in ctx.query.items()}, date_range_of(ctx)
    outcome = query.get("outcome", "")
    return Filters(
        ctx.tenant.pk,
        start=date_range.start,
        end=date_range.end,
        model=query.get("model", "").replace("\0", "") or None,
        key_id=_number(query.get("key", "")),
        project_id=_number(query.get("project", "")),
        outcome=outcome if outcome in RequestOutcome.values else None,
        code=query.get("code", "").replace("\0", "") or None,
    )


def filters(ctx: PageContext) -> RequestLogFilters:
    selected = _filters(ctx)
    keys = ApiKey.objects.for_tenant(ctx.tenant).order_by("name", "pk").values_list("pk", "name")[:MAX_CHOICES]
    projects = Project.objects.for_tenant(ctx.tenant).order_by("name", "pk").values_list("pk", "name")[:MAX_CHOICES]
    params = {name: value for name, value in ctx.query.items() if name in ("range", "from", "to")}
    filtered = any(ctx.query.get(name) for name in _FILTERS)
    return RequestLogFilters(
        tuple(RequestLogOption(str(pk), name, pk == selected.key_id) for pk, name in keys),
        tuple(RequestLogOption(str(pk), name, pk == selected.project_id) for pk, name in projects),
        tuple(
            RequestLogOption(value, outcome_label(value), value == selected.outcome) for value in RequestOutcome.values
        ),
        selected.model or "",
        selected.code or "",
        tuple(params.items()),
        f"{ctx.url('requests')}?{urlencode(params)}" if filtered else "",
    )


def log(ctx: PageContext) -> RequestLogPanel:
    """Return a page of the log."""
    cursor, error = ctx.query.get("cursor") or None, ""
    try:
        page = selectors.requests_page(_filters(ctx), cursor, PAGE_SIZE)
    except BadCursor:
        error = "That page no longer exists. Showing the newest requests."
        page = selectors.requests_page(_filters(ctx), None, PAGE_SIZE)
    key_ids = {row.record.key_id for row in page.rows}
    keys = dict(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=key_ids).values_list("pk", "name"))
    rows = tuple(_row(ctx, row, keys) for row in page.rows)
    return RequestLogPanel(
        rows,
        _turned(ctx, page.older),
        _turned(ctx, page.newer),
        error,
        any(ctx.query.get(name) for name in _FILTERS),
        common_places(row.cost for row in rows),
    )


def _turned(ctx: PageContext, cursor: str | None) -> str:
    if cursor is None:
        return ""
    return f"{ctx.url('requests')}?{urlencode({**ctx.query, 'cursor': cursor})}"


def _row(ctx: PageContext, listed: ListedRequest, keys: dict[int, str]) -> RequestLogRow:
    record, usage = listed.record, listed.usage
    served = selectors.served_model(record)
    tokens = usage.tokens if usage else None
    prompt = sum(count for name, count in tokens.items() if name != "output") if tokens else record.prompt_tokens
    return RequestLogRow(
        record.request_id,
        ctx.url("requests-detail", record.request_id),
        record.started_at,
        outcome_label(record.outcome),
        KINDS[record.outcome],
        record.status,
        status_text(record.code, record.limited_by),
        record.requested_model,
        served if served != record.requested_model else "",
        keys.get(record.key_id, f"Key {record.key_id}, deleted"),
        record.endpoint,
        None if record.ttft_ms is None else record.ttft_ms * 1000,
        record.total_ms * 1000,
        prompt,
        tokens["cache_read"] if tokens else None,
        tokens["output"] if tokens else None,
        Money(usage.cost_femto) if usage else None,
    )


def status_text(code: str, bound: Mapping[str, object] | None) -> str:
    """Return a short reason why a request was not answered."""
    return code.replace("_", " ") if bound is None else bound_text(bound)


def bound_text(bound: Mapping[str, object]) -> str:
    """Return the label of the limit or budget that rejected a request, from its record."""
    kind, scope, name, model = (str(bound.get(field, "")) for field in ("kind", "scope", "name", "model"))
    return bound_label(kind, scope, name, model)


def bound_label(kind: str, scope: str, name: str, model: str) -> str:
    """Return the label of a limit or budget."""
    if kind == "budget":
        return f"budget {name}".strip()
    return f"{name.replace('_', ' ')} of the {scope}" + (f", {model}" if model else "")


def stats(ctx: PageContext) -> RequestLogStats:
    """Return statistics of the requests in the date range. Other filters do not apply."""
    date_range = date_range_of(ctx)
    found = selectors.rates(ctx.tenant.pk, date_range.start, date_range.end, "day")
    total, objective = found.total, selectors.ttft_slo_ms()
    return RequestLogStats(
        total.requests,
        share(total.failed, total.requests),
        total.failed,
        share(total.limited, total.requests),
        total.limited,
        None if total.ttft_p50_ms is None else total.ttft_p50_ms * 1000,
        None if total.ttft_p95_ms is None else total.ttft_p95_ms * 1000,
        objective * 1000,
        total.ttft_p95_ms is not None and total.ttft_p95_ms > objective,
        tuple(
            RequestLogBoundRow(
                bound_label(limit.kind, limit.scope, limit.name, limit.model), limit.kind, limit.requests
            )
            for limit in found.bounds[:8]
        ),
    )
