"""The request log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.utils.translation import gettext as _

from frontend.core.code_labels import code_text
from frontend.core.date_ranges import date_range_of
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar, text_chip
from frontend.core.labels import outcome_label
from frontend.core.languages import in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, changed_url, key_creators, named_rows, number_param, text_param
from frontend.core.numbers import Money, common_places, exact, share
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.keys.key_limits import NAMES
from frontend.tenant.overview.usage import delta_of
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.selectors import BadCursor, ContentSearch, Filters, ListedRequest
from tenants.models import ApiKey, Project

PAGE_SIZE = 50
ID_PREFIX = "req_"
_FILTERS = ("model", "key", "project", "member", "user", "outcome", "code", "slow", "cache", "q")
SLOW = {"1": _lazy("Over 1 s"), "10": _lazy("Over 10 s"), "60": _lazy("Over 60 s")}
MAX_BARS = 60  # bars of the histogram
_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
BAR_LENGTHS = (
    *(_MINUTE * number for number in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * number for number in (1, 2, 3, 6, 12)),
    *(_DAY * number for number in (1, 2, 7)),
)
COLUMNS = {  # after the time, which is always shown
    "status": _lazy("Status"),
    "model": _lazy("Model"),
    "key": _lazy("API key"),
    "input": _lazy("Input"),
    "output": _lazy("Output"),
    "ttft": _lazy("First token"),
    "duration": _lazy("Duration"),
    "cost": _lazy("Cost"),
    "endpoint": _lazy("Endpoint"),
    "user": _lazy("End user"),
    "id": _lazy("Request ID"),
}
CACHE_LABELS = {
    "computed": _lazy("Computed"),
    "prefix": _lazy("Prompt cache"),
    "exact": _lazy("Cached response"),
    "single_flight": _lazy("Concurrent equal request"),
    "semantic": _lazy("Cached response to a similar question"),
}
SCOPES = {
    "tenant": _lazy("Organization"),
    "project": _lazy("Project"),
    "key": _lazy("API key"),
    "member": _lazy("Member"),
}
DEFAULT_COLUMNS = ("status", "model", "key", "input", "output", "ttft", "duration", "cost")
NUMERIC = ("input", "output", "ttft", "duration", "cost")
VIEWS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (_lazy("All"), {}),
    (_lazy("Failed"), {"outcome": "failed"}),
    (_lazy("Rate limited"), {"outcome": "limited"}),
    (_lazy("Slow (over 10 s)"), {"slow": "10"}),
    (_lazy("Not cached"), {"cache": "computed"}),
)


@dataclass(frozen=True)
class RequestLogRow:
    """A request with the name of its key. The token counts are None before the request is settled."""

    listed: ListedRequest
    key: str

    @property
    def record(self) -> RequestRecord:
        return self.listed.record

    @property
    def status_text(self) -> str:
        return status_text(self.record.code, self.record.limited_by)

    @property
    def served(self) -> str:
        """The model that answered, if it differs from the requested one."""
        served = selectors.served_model(self.record)
        return served if served != self.record.requested_model else ""

    @property
    def tokens(self) -> Mapping[str, int | None]:
        counts = self.listed.usage.tokens if self.listed.usage else None
        if counts is None:
            return {"input": self.record.prompt_tokens, "cache_read": None, "output": None}
        return {**counts, "input": sum(count for name, count in counts.items() if name != "output")}

    @property
    def cached(self) -> str:
        """The part of the input that came from the cache; empty before the request is settled."""
        read, whole = self.tokens["cache_read"], self.tokens["input"]
        return "" if read is None or not whole else share(read, whole)

    @property
    def cost(self) -> Money | None:
        return Money(self.listed.usage.cost_femto) if self.listed.usage else None


def _filters(ctx: PageContext) -> Filters:
    """Return the filters of the query string. Invalid values are ignored.

    The beginning of a request ID is searched in all requests, a stored text in the date range.
    """
    date_range, outcome = date_range_of(ctx), text_param(ctx, "outcome")
    typed = text_param(ctx, "q")
    slow, layer = text_param(ctx, "slow"), text_param(ctx, "cache")
    is_id = typed.startswith(ID_PREFIX)
    text = search_of(ctx) if typed and not is_id else None
    return Filters(
        ctx.tenant.pk,
        start=None if is_id else date_range.start,
        end=None if is_id else date_range.end,
        model=text_param(ctx, "model", 128) or None,
        key_id=number_param(ctx, "key"),
        project_id=number_param(ctx, "project"),
        outcome=outcome if outcome in RequestOutcome.values else None,
        code=text_param(ctx, "code", 128) or None,
        min_total_ms=int(slow) * 1000 if slow in SLOW else None,
        cache_layer=layer if layer in CACHE_LABELS else None,
        end_user=text_param(ctx, "user", 128) or None,
        member_id=number_param(ctx, "member"),
        id_prefix=typed if is_id else None,
        request_ids=None if text is None else text.request_ids,
    )


def search_of(ctx: PageContext) -> ContentSearch:
    """Return the result of the search in stored texts, read once per page."""
    date_range, typed = date_range_of(ctx), text_param(ctx, "q")
    return ctx.once(
        ("search", typed),
        lambda: selectors.search_content(ctx.tenant.pk, typed, date_range.start, date_range.end),
    )


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips."""
    outcome, url = text_param(ctx, "outcome"), ctx.url("requests")
    outcomes = ((value, outcome_label(value)) for value in RequestOutcome.values)
    keys, projects = (named_rows(model.objects.for_tenant(ctx.tenant)) for model in (ApiKey, Project))
    chips = (
        choice_chip(ctx, url, "outcome", _("Status"), outcomes, outcome if outcome in RequestOutcome.values else None),
        choice_chip(ctx, url, "key", _("API key"), keys, number_param(ctx, "key")),
        choice_chip(ctx, url, "project", _("Project"), projects, number_param(ctx, "project")),
        choice_chip(ctx, url, "slow", _("Duration"), SLOW.items(), text_param(ctx, "slow") or None),
        choice_chip(ctx, url, "cache", _("Answer"), CACHE_LABELS.items(), text_param(ctx, "cache") or None),
        choice_chip(ctx, url, "member", _("Member"), key_creators(ctx), number_param(ctx, "member")),
        text_chip(ctx, url, "model", _("Model"), most=128),
        text_chip(ctx, url, "user", _("End user"), most=128),
        text_chip(ctx, url, "code", _("Error code"), "rate_limit_exceeded", most=128),
    )
    return filter_bar(ctx, url, chips, text_chip(ctx, url, "q", _("Request ID or stored text")))


def bar_length(period: timedelta) -> timedelta:
    """Return the time of one bar of the histogram: a natural part of a day, or days."""
    longest = BAR_LENGTHS[-1]
    weeks = longest * max(1, -(-period // (longest * MAX_BARS)))
    return next((length for length in BAR_LENGTHS if length * MAX_BARS >= period), weeks)


def histogram(ctx: PageContext) -> dict[str, Any]:
    """Return the requests over time with the page's filters, as bars of a drawing of 100 by 100."""
    wanted = _filters(ctx)
    if wanted.start is None or wanted.end is None:  # a search by ID has no period
        return {"bars": ()}
    midnight = datetime.combine(wanted.start.astimezone(ctx.zone).date(), time.min, ctx.zone).astimezone(UTC)
    bins = selectors.histogram(wanted, bar_length(wanted.end - wanted.start), midnight)
    most = max(bar.requests for bar in bins) or 1
    total, failed, limited = (sum(getattr(bar, name) for bar in bins) for name in ("requests", "failed", "limited"))
    width = 100 / len(bins)
    bars = []
    for number, bar in enumerate(bins):
        parts, top = [], 100.0
        for kind, count in (
            ("completed", bar.requests - bar.failed - bar.limited),
            ("limited", bar.limited),
            ("failed", bar.failed),
        ):
            height = 100 * count / most
            top -= height
            if count:
                parts.append((kind, f"{top:.2f}", f"{height:.2f}"))
        url = changed_url(
            ctx, ctx.url("requests"), range="times", **{"from": bar.start.isoformat(), "to": bar.end.isoformat()}
        )
        bars.append({"x": f"{number * width:.3f}", "parts": parts, "bar": bar, "url": url})
    return {
        "bars": bars,
        "width": f"{width * 0.84:.3f}",
        "slot": f"{width:.3f}",
        "most": most,
        "total": total,
        "start": wanted.start,
        "middle": bins[len(bins) // 2].start,
        "end": wanted.end,
        "completed": share(total - failed - limited, total),
        "limited": share(limited, total),
        "failed": share(failed, total),
        "form": "minute" if wanted.end - wanted.start <= timedelta(days=3) else "day",
    }


def _is_filtered(ctx: PageContext) -> bool:
    return any(ctx.query.get(name) for name in _FILTERS)


def listed_rows(ctx: PageContext, listed: Sequence[ListedRequest]) -> list[RequestLogRow]:
    """Return requests with the names of their keys."""
    keys = dict(
        ApiKey.objects.for_tenant(ctx.tenant)
        .filter(pk__in={row.record.key_id for row in listed})
        .values_list("pk", "name")
    )
    return [
        RequestLogRow(row, keys.get(row.record.key_id, _("Key %(key_id)s, deleted") % {"key_id": row.record.key_id}))
        for row in listed
    ]


EXPORTED_COLUMNS = (
    *("request_id", "started_at", "outcome", "status", "code", "endpoint", "requested_model", "served_model", "key"),
    *("input_tokens", "cached_tokens", "output_tokens", "ttft_ms", "total_ms", "cost_usd"),
)


def export_row(row: RequestLogRow) -> tuple[str | int | None, ...]:
    """Return a request's values of EXPORTED_COLUMNS."""
    record, tokens = row.record, row.tokens
    return (
        *(record.request_id, record.started_at.isoformat(), record.outcome, record.status, record.code),
        *(record.endpoint, record.requested_model, selectors.served_model(record), row.key),
        *(tokens["input"], tokens["cache_read"], tokens["output"], record.ttft_ms, record.total_ms),
        row.cost.exact if row.cost else None,
    )


def export_rows(ctx: PageContext) -> Iterator[RequestLogRow]:
    """Yield the newest requests with the page's filters, at most MAX_EXPORTED. Call inside `ctx.scope()`."""
    wanted, cursor = _filters(ctx), None
    for _number in range(MAX_EXPORTED // selectors.MAX_PAGE):
        page = selectors.requests_page(wanted, cursor, selectors.MAX_PAGE)
        yield from listed_rows(ctx, page.rows)
        cursor = page.older
        if cursor is None:
            return


TOOLS = ListTools(
    "requests",
    exported=EXPORTED_COLUMNS,
    rows=lambda ctx: map(export_row, export_rows(ctx)),
    columns=COLUMNS,
    views=VIEWS,
    default=DEFAULT_COLUMNS,
)


def log(ctx: PageContext) -> dict[str, Any]:
    """Return a page of the log."""
    cursor, error = ctx.query.get("cursor") or None, ""
    try:
        page = selectors.requests_page(_filters(ctx), cursor, PAGE_SIZE)
    except BadCursor:
        error = _("That page no longer exists. Showing the newest requests.")
        page = selectors.requests_page(_filters(ctx), None, PAGE_SIZE)
    rows = listed_rows(ctx, page.rows)
    newer, older = (changed_url(ctx, ctx.url("requests"), cursor=to) if to else "" for to in (page.newer, page.older))
    places = common_places(row.cost for row in rows)
    return {
        "headings": [(name, COLUMNS[name], name in NUMERIC) for name in TOOLS.read_columns(ctx)],
        "longest_ms": max((row.record.total_ms for row in rows), default=0),
        "page": ListPage(rows, newer, older, filtered=_is_filtered(ctx), places=places),
        "error": error,
        "note": _search_note(ctx),
    }


def _search_note(ctx: PageContext) -> str:
    """Return what a search in stored texts has not searched."""
    typed = text_param(ctx, "q")
    if not typed or typed.startswith(ID_PREFIX):
        return ""
    if not ctx.tenant.content_retention_days:
        return _("Prompt logging is off, so only request IDs can be searched. They start with %(prefix)s.") % {
            "prefix": ID_PREFIX
        }
    found = search_of(ctx)
    return (
        ""
        if found.complete
        else _("Searched the newest %(searched)s stored requests of this period.") % {"searched": exact(found.searched)}
    )


def status_text(code: str, bound: Mapping[str, object] | None) -> str:
    """Return a short reason why a request was not answered."""
    return code_text(code) if bound is None else bound_text(bound)


def bound_text(bound: Mapping[str, object]) -> str:
    """Return the label of the limit or budget that rejected a request, from its record."""
    kind, scope, name, model = (str(bound.get(field, "")) for field in ("kind", "scope", "name", "model"))
    return bound_label(kind, scope, name, model)


def bound_label(kind: str, scope: str, name: str, model: str) -> str:
    """Return the label of a limit or budget."""
    if kind == "budget":
        return (_("budget %(name)s") % {"name": name}).strip()
    label = f"{in_sentence(NAMES.get(name, name))} ({SCOPES.get(scope, scope)}"
    return f"{label}, {model})" if model else f"{label})"


def compares(ctx: PageContext) -> bool:
    """Return true if the figures are compared with the previous period."""
    return ctx.query.get("compare") == "previous"


def stats(ctx: PageContext) -> dict[str, Any]:
    """Return statistics of the requests in the date range. Other filters do not apply."""
    date_range = date_range_of(ctx)
    found = selectors.total_rates(ctx.tenant.pk, date_range.start, date_range.end, with_ttft=True)
    total, objective = found.total, selectors.ttft_slo_ms()
    previous = date_range.previous if compares(ctx) else None
    before = previous and selectors.total_rates(ctx.tenant.pk, *previous, with_ttft=True).total
    return {
        "requests_delta": before and delta_of(total.requests, before.requests, ""),
        "failed_delta": before and delta_of(total.failed * before.requests, before.failed * total.requests, "good"),
        "limited_delta": before and delta_of(total.limited * before.requests, before.limited * total.requests, "good"),
        "p50_delta": before and delta_of(total.ttft_p50_ms or 0, before.ttft_p50_ms or 0, "good"),
        "p95_delta": before and delta_of(total.ttft_p95_ms or 0, before.ttft_p95_ms or 0, "good"),
        "total": total,
        "failed": share(total.failed, total.requests),
        "limited": share(total.limited, total.requests),
        "objective_ms": objective,
        "misses_objective": total.ttft_p95_ms is not None and total.ttft_p95_ms > objective,
        "bounds": [
            (bound_label(limit.kind, limit.scope, limit.name, limit.model), limit.requests)
            for limit in found.bounds[:8]
        ],
    }


def find_requests(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield requests by the beginning of their ID, as in the header `x-request-id`, newest first."""
    if not (typed.startswith(ID_PREFIX) and len(typed) > len(ID_PREFIX)):
        return
    page = selectors.requests_page(Filters(ctx.tenant.pk, id_prefix=typed), size=MAX_RESULTS_PER_KIND)
    for row in page.rows:
        name = row.record.request_id
        yield SearchResult(name, ctx.url("requests-detail", name), "requests", outcome_label(row.record.outcome))
