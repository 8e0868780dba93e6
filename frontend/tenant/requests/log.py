"""The request log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.core.date_ranges import date_range_of
from frontend.core.labels import outcome_label
from frontend.core.lists import ListPage, changed_url, named_rows, number_param, options, text_param, with_query
from frontend.core.numbers import Money, common_places, share
from frontend.core.page_context import PageContext
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.selectors import BadCursor, Filters, ListedRequest
from tenants.models import ApiKey, Project

PAGE_SIZE = 50
_FILTERS = ("model", "key", "project", "outcome", "code")


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
    def cost(self) -> Money | None:
        return Money(self.listed.usage.cost_femto) if self.listed.usage else None


def _filters(ctx: PageContext) -> Filters:
    """Return the filters of the query string. Invalid values are ignored."""
    date_range, outcome = date_range_of(ctx), text_param(ctx, "outcome")
    return Filters(
        ctx.tenant.pk,
        start=date_range.start,
        end=date_range.end,
        model=text_param(ctx, "model", 128) or None,
        key_id=number_param(ctx, "key"),
        project_id=number_param(ctx, "project"),
        outcome=outcome if outcome in RequestOutcome.values else None,
        code=text_param(ctx, "code", 128) or None,
    )


def filters(ctx: PageContext) -> dict[str, Any]:
    """Return the values of the filter form. `hidden` are the parameters of the date range."""
    selected = _filters(ctx)
    params = {name: value for name, value in ctx.query.items() if name in ("range", "from", "to")}
    outcomes = ((value, outcome_label(value)) for value in RequestOutcome.values)
    return {
        "keys": options(named_rows(ApiKey.objects.for_tenant(ctx.tenant)), selected.key_id),
        "projects": options(named_rows(Project.objects.for_tenant(ctx.tenant)), selected.project_id),
        "outcomes": options(outcomes, selected.outcome),
        "model": selected.model or "",
        "code": selected.code or "",
        "hidden": params.items(),
        "clear_url": with_query(ctx.url("requests"), **params) if _filtered(ctx) else "",
    }


def _filtered(ctx: PageContext) -> bool:
    return any(ctx.query.get(name) for name in _FILTERS)


def log(ctx: PageContext) -> dict[str, Any]:
    """Return a page of the log."""
    cursor, error = ctx.query.get("cursor") or None, ""
    try:
        page = selectors.requests_page(_filters(ctx), cursor, PAGE_SIZE)
    except BadCursor:
        error = "That page no longer exists. Showing the newest requests."
        page = selectors.requests_page(_filters(ctx), None, PAGE_SIZE)
    key_ids = {row.record.key_id for row in page.rows}
    keys = dict(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=key_ids).values_list("pk", "name"))
    rows = [RequestLogRow(row, keys.get(row.record.key_id, f"Key {row.record.key_id}, deleted")) for row in page.rows]
    newer, older = (changed_url(ctx, ctx.url("requests"), cursor=to) if to else "" for to in (page.newer, page.older))
    places = common_places(row.cost for row in rows)
    return {"page": ListPage(rows, newer, older, filtered=_filtered(ctx), places=places), "error": error}


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


def stats(ctx: PageContext) -> dict[str, Any]:
    """Return statistics of the requests in the date range. Other filters do not apply."""
    date_range = date_range_of(ctx)
    found = selectors.rates(ctx.tenant.pk, date_range.start, date_range.end, "day")
    total, objective = found.total, selectors.ttft_slo_ms()
    return {
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
