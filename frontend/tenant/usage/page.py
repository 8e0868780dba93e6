"""The usage panels: tokens, cost, cache and rejections."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _

from billing.currencies.amounts import TOKENS_A_PRICE, half_up
from billing.metering.usage import count_accepted, sums, total
from frontend.core.chart_marks import marks_of
from frontend.core.charts import Chart, Series
from frontend.core.charts import legend_total as summed
from frontend.core.code_labels import code_text
from frontend.core.date_ranges import days_of
from frontend.core.languages import in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import with_query
from frontend.core.numbers import Money, common_places, percent, share
from frontend.core.page_context import PageContext
from frontend.tenant.requests.log import CACHE_LABELS, bound_label
from frontend.tenant.usage.query import UsageReportQuery, query_of
from inference_worker.contract.request import PROMPT_CLASSES
from millrace.apps.answer_caches.cache_layers import cache_layers
from millrace.apps.answer_caches.prompt_advisor import prompt_advice
from millrace.apps.answer_caches.semantic_status import cache_misses, semantic_status
from millrace.apps.answer_caches.warming_status import warming_status
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import total_rates

_DAY = timedelta(days=1)
LAYER_LABELS: Mapping[str, str] = {**CACHE_LABELS, "host_memory": _lazy("Prompt cache in CPU memory")}
MAX_LIMITS = 12
REASONS: Mapping[str, tuple[str, str]] = {
    "": ("None", _lazy("All cacheable tokens were served from the cache.")),
    "too_short": (_lazy("Too short"), _lazy("Prompt shorter than one cache block")),
    "first_use": (_lazy("First use"), _lazy("Prefix not seen before")),
    "expired_or_evicted": (
        _lazy("Expired or evicted"),
        _lazy("Evicted to free space. Use cache_control to keep the prefix cached."),
    ),
    "prefix_changed": (
        _lazy("Prefix changed"),
        _lazy("The prompt differs from a cached one. Put changing content at the end."),
    ),
    "other_worker": (
        _lazy("Cached on another replica"),
        _lazy("The replica with the cached prefix was busy or restarted."),
    ),
}


def _days(ctx: PageContext, now: UsageReportQuery) -> list[dict[str, Any]]:
    """Return the sums of each day of the range, including days without usage."""
    rows = ctx.once(now.question, lambda: sums(now.question, bucket="day"))
    found = {row["start"].astimezone(UTC).date(): row for row in rows}
    days = days_of(now.date_range.start, now.date_range.end)
    return [found.get(at.date(), {**total([]), "start": at}) for at in days]


def _all_input(counts: Mapping[str, Any]) -> int:
    return sum(int(counts[name]) for name in PROMPT_CLASSES)


def stats(ctx: PageContext) -> dict[str, Any]:
    counts = total(_days(ctx, query_of(ctx)))
    context, cost = _all_input(counts), Money(counts["cost_femto"])
    tokens = context + counts["output"]
    return {
        "counts": counts,
        "accepted": count_accepted(counts),
        "input": context,
        "hit": share(counts["cache_read"], context),
        "cost": cost,
        "per_million": Money(half_up(cost.femto * TOKENS_A_PRICE, tokens)) if tokens else None,
    }


def tokens(ctx: PageContext) -> dict[str, Any]:
    """Return the tokens of each day by type."""
    now = query_of(ctx)
    days = _days(ctx, now)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        (_("Output"), "output", tuple(row["output"] for row in days)),
        (_("Uncached input"), "uncached", tuple(row["uncached"] for row in days)),
        (_("Cache writes, 5 min"), "written", tuple(row["cache_write_5m"] for row in days)),
        (_("Cache writes, 1 h"), "written", tuple(row["cache_write_1h"] for row in days)),
        (_("Cached input"), "cached", tuple(row["cache_read"] for row in days)),
    )
    if not any(any(values) for *_names, values in kinds):
        return {"chart": None, "date_range": now.date_range.label}
    series = tuple(
        Series(label, kind, values, "area", summed(values))
        for label, kind, values in kinds
        if any(values) or kind != "written"
    )
    message = ", ".join(f"{in_sentence(line.label)} {line.total}" for line in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    of = _("Tokens by type and day, %(label)s: %(message)s") % {"label": now.date_range.label, "message": message}
    marks, url = marks_of(ctx), _requests_url(ctx)
    return {"chart": Chart("tokens", of, at, series, "tokens", stacked=True, marks=marks, requests_url=url)}


def cost(ctx: PageContext) -> dict[str, Any]:
    """Return the cost of each day, and what it would be without caches."""
    now = query_of(ctx)
    days = _days(ctx, now)
    if not any(row["cost_femto"] for row in days):
        return {"chart": None, "date_range": now.date_range.label}
    spent = tuple(row["cost_femto"] for row in days)
    without = tuple(row["cost_femto"] + row["saved_femto"] for row in days)
    series = [Series(_("Cost"), "spend", spent, "area", Money(sum(spent)).text)]
    if without != spent:
        series.append(Series(_("Without caches"), "goal", without, "dots", Money(sum(without)).text))
    message = ", ".join(f"{in_sentence(line.label)} {line.total}" for line in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    return {
        "chart": Chart(
            "cost",
            _("Cost by day, %(label)s: %(message)s") % {"label": now.date_range.label, "message": message},
            at,
            tuple(series),
            "usd",
            marks=marks_of(ctx),
            requests_url=_requests_url(ctx),
        )
    }


def _requests_url(ctx: PageContext) -> str:
    """Return the URL of the request log with the page's filters."""
    return with_query(ctx.url("requests"), **{name: ctx.query.get(name, "") for name in ("model", "key", "project")})


def caches(ctx: PageContext) -> dict[str, Any]:
    """Return the savings of the prompt cache, and the reasons of cache misses, most tokens first."""
    now = query_of(ctx)
    rows = sums(now.question, group_by=("miss_reason",))
    counts = total(rows)
    missed = sorted((row for row in rows if row["miss_reason"]), key=lambda row: -row["uncached"])
    all_missed = sum(row["uncached"] for row in missed)
    billed, saved = Money(counts["cost_femto"]), Money(counts["saved_femto"])
    advice = prompt_advice(ctx.tenant.pk, now.date_range.start, now.date_range.end)
    return {
        "saved": saved,
        "without": billed + saved,
        "billed": billed,
        "hit": share(counts["cache_read"], _all_input(counts)),
        "hit_tokens": counts["cache_read"],
        "input_tokens": _all_input(counts),
        "answer_tokens": counts["answer_hit_input"] + counts["answer_hit_output"],  # saved by cached responses
        "misses": [_miss(row, all_missed) for row in missed],
        "all_missed": all_missed,
        "advice": [
            {"advice": each, "month": Money(each.month_femto), "url": ctx.url("requests-detail", each.request_ids[0])}
            for each in advice
        ],
        "advice_places": common_places(Money(each.month_femto) for each in advice),
    }


def layers(ctx: PageContext) -> dict[str, Any]:
    """Return requests, tokens and savings by cache layer."""
    now = query_of(ctx)
    start, end = now.date_range.start, now.date_range.end
    found = cache_layers(ctx.tenant.pk, start, end)
    misses = cache_misses(ctx.tenant.pk, start, end)
    return {
        "misses": [(ANSWER_MISSES.get(miss.reason) or code_text(miss.reason), miss.requests) for miss in misses],
        **_semantic(ctx),
        **_warming(ctx, start, end),
        "found": found,
        "hit_rate": share(found.hits, found.requests),
        "saved_seconds": found.saved_ms // 1000,
        "rows": [
            {
                "label": LAYER_LABELS[layer.layer],
                "usage": layer,
                "part": share(layer.requests, found.requests),
                "saved": Money(layer.saved_femto),
            }
            for layer in found.layers
        ],
        "places": common_places(Money(layer.saved_femto) for layer in found.layers),
        "filtered": is_filtered(ctx),
    }


def _semantic(ctx: PageContext) -> dict[str, Any]:
    """Return the error rate of answers to similar questions, with its bound."""
    if not ctx.tenant.semantic_cache_max_error_percent:
        return {"semantic": None}
    status = semantic_status(ctx.tenant)
    rates = {"upper_bound": status.upper_bound, "error_rate": status.error_rate}
    return {"semantic": status, **{name: percent(rate or 0) for name, rate in rates.items()}}


def _warming(ctx: PageContext, start: datetime, end: datetime) -> dict[str, Any]:
    """Return what cache warming has spent and saved; nothing if it is off and no prompt was warmed."""
    status = warming_status(ctx.tenant, start, end)
    if not (status.budget_nano or status.prompts):
        return {"warming": None}
    amounts = {"warming_spent": status.spent_femto, "warming_saved": status.saved_femto}
    return {"warming": status, **{name: Money(femto) for name, femto in amounts.items()}}


# Reason of the answer cache -> text of the usage page.
ANSWER_MISSES: Mapping[str, str] = {
    "not_cached": _lazy("No equal request was cached"),
    "sampled": _lazy("Temperature above 0"),
    "no-store": _lazy("The request turned the cache off"),
    "no-cache": _lazy("The request asked for a new answer"),
    "unpriced": _lazy("Cached answers have no price"),
    "not_generated": _lazy("Embedding or reranking"),
    "leader_failed": _lazy("The equal concurrent request failed"),
    "semantic_margin": _lazy("No similar question, or several with different answers"),
    "semantic_guard": _lazy("A similar question differed in a number, name, date or negation"),
    "semantic_evidence": _lazy("Not enough checks to serve similar questions"),
    "semantic_no_questions": _lazy("No question was stored for this prompt"),
    "semantic_late": _lazy("The similarity was not computed in time"),
}


def is_filtered(ctx: PageContext) -> bool:
    """Return whether the page is filtered. Numbers from the request log are not."""
    return any(ctx.query.get(name) for name in ("model", "key", "project"))


def _miss(row: Mapping[str, Any], all_missed: int) -> dict[str, Any]:
    label, message = REASONS.get(row["miss_reason"], (code_text(row["miss_reason"]), ""))
    tokens = row["uncached"]
    part = share(tokens, all_missed)
    return {"label": label, "message": message, "accepted": count_accepted(row), "uncached": tokens, "part": part}


def rejections(ctx: PageContext) -> dict[str, Any]:
    """Return the requests answered with 429, by limit or budget."""
    now = query_of(ctx)
    traffic = total_rates(ctx.tenant.pk, now.date_range.start, now.date_range.end, with_ttft=False)
    params = {name: value for name, value in ctx.query.items() if name in ("range", "from", "to")}
    limited = traffic.total.limited
    return {
        "total": traffic.total,
        "part": share(limited, traffic.total.requests),
        "bounds": [
            (limit, bound_label(limit.kind, limit.scope, limit.name, limit.model), share(limit.requests, limited))
            for limit in traffic.bounds[:MAX_LIMITS]
        ],
        "log_url": with_query(ctx.url("requests"), **params, outcome=RequestOutcome.LIMITED.value),
        "filtered": is_filtered(ctx),
    }
