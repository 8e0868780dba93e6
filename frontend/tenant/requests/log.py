"""The log: which requests, how they ended, what each used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from urllib.parse import urlencode

from frontend.core.date_ranges import span_of
from frontend.core.labels import verdict_label
from frontend.core.numbers import Money, share
from frontend.core.page_context import PageContext
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import BadCursor, Filters, ListedRequest
from tenants.models import ApiKey, Project

MOST_CHOICES = 500
SIZE = 50
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
    """What stands in the filters."""

    keys: tuple[RequestLogOption, ...]
    projects: tuple[RequestLogOption, ...]
    verdicts: tuple[RequestLogOption, ...]
    model: str
    code: str
    hidden: tuple[tuple[str, str], ...]  # the span, kept
    clear_url: str  # "" where nothing is filtered


@dataclass(frozen=True)
class RequestLogRow:
    request_id: str
    url: str
    at: datetime
    verdict: str
    verdict_kind: str
    status: str
    said: str  # why it was not answered; empty if it was
    asked: str
    served: str  # if that is another name
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
    fault: str
    filtered: bool


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


def _filters(visit: PageContext) -> Filters:
    """Return what the address asks for; what is no value of ours is not asked for."""
    query, span = {name: value.strip()[:128] for name, value in visit.query.items()}, span_of(visit)
    outcome = query.get("outcome", "")
    return Filters(
        visit.tenant.pk,
        start=span.start,
        end=span.end,
        model=query.get("model", "").replace("\0", "") or None,
        key_id=_number(query.get("key", "")),
        project_id=_number(query.get("project", "")),
        outcome=outcome if outcome in RequestOutcome.values else None,
        code=query.get("code", "").replace("\0", "") or None,
    )


def fields(visit: PageContext) -> RequestLogFilters:
    asked = _filters(visit)
    keys = ApiKey.objects.for_tenant(visit.tenant).order_by("name", "pk").values_list("pk", "name")[:MOST_CHOICES]
    projects = Project.objects.for_tenant(visit.tenant).order_by("name", "pk").values_list("pk", "name")[:MOST_CHOICES]
    kept = {name: value for name, value in visit.query.items() if name in ("range", "from", "to")}
    filtered = any(visit.query.get(name) for name in _FILTERS)
    return RequestLogFilters(
        tuple(RequestLogOption(str(pk), name, pk == asked.key_id) for pk, name in keys),
        tuple(RequestLogOption(str(pk), name, pk == asked.project_id) for pk, name in projects),
        tuple(RequestLogOption(value, verdict_label(value), value == asked.outcome) for value in RequestOutcome.values),
        asked.model or "",
        asked.code or "",
        tuple(kept.items()),
        f"{visit.url('requests')}?{urlencode(kept)}" if filtered else "",
    )


def log(visit: PageContext) -> RequestLogPanel:
    """Return a page of the log."""
    cursor, fault = visit.query.get("cursor") or None, ""
    try:
        page = selectors.requests_page(_filters(visit), cursor, SIZE)
    except BadCursor:
        fault = "That page no longer exists. Showing the newest requests."
        page = selectors.requests_page(_filters(visit), None, SIZE)
    wanted = {row.record.key_id for row in page.rows}
    keys = dict(ApiKey.objects.for_tenant(visit.tenant).filter(pk__in=wanted).values_list("pk", "name"))
    return RequestLogPanel(
        tuple(_row(visit, row, keys) for row in page.rows),
        _turned(visit, page.older),
        _turned(visit, page.newer),
        fault,
        any(visit.query.get(name) for name in _FILTERS),
    )


def _turned(visit: PageContext, cursor: str | None) -> str:
    if cursor is None:
        return ""
    return f"{visit.url('requests')}?{urlencode({**visit.query, 'cursor': cursor})}"


def _row(visit: PageContext, listed: ListedRequest, keys: dict[int, str]) -> RequestLogRow:
    record, usage = listed.record, listed.usage
    tokens = usage.tokens if usage else None
    prompt = sum(count for name, count in tokens.items() if name != "output") if tokens else record.prompt_tokens
    return RequestLogRow(
        record.request_id,
        visit.url("requests-detail", record.request_id),
        record.started_at,
        verdict_label(record.outcome),
        KINDS[record.outcome],
        record.status,
        said(record.code, record.limited_by),
        record.requested_model,
        record.served_model if record.served_model != record.requested_model else "",
        keys.get(record.key_id, f"Key {record.key_id}, deleted"),
        record.endpoint,
        None if record.ttft_ms is None else record.ttft_ms * 1000,
        record.total_ms * 1000,
        prompt,
        tokens["cache_read"] if tokens else None,
        tokens["output"] if tokens else None,
        Money(usage.cost_femto) if usage else None,
    )


def said(code: str, bound: dict[str, object] | None) -> str:
    """Why a request was not answered, in a few words."""
    if bound is None:
        return code.replace("_", " ")
    return bound_label(str(bound["kind"]), str(bound.get("scope", "")), str(bound["name"]), str(bound.get("model", "")))


def bound_label(kind: str, scope: str, name: str, model: str) -> str:
    """Return a limit or budget, named."""
    if kind == "budget":
        return f"budget {name}"
    return f"{name.replace('_', ' ')} of the {scope}" + (f", {model}" if model else "")


def figures(visit: PageContext) -> RequestLogStats:
    """How the span's requests went; no filter but the span counts here."""
    span = span_of(visit)
    found = selectors.rates(visit.tenant.pk, span.start, span.end, "day")
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
            RequestLogBoundRow(bound_label(each.kind, each.scope, each.name, each.model), each.kind, each.requests)
            for each in found.bounds[:8]
        ),
    )
