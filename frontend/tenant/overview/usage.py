"""The overview's panels of usage: cache savings, key figures, tokens and time to first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from django.utils.translation import gettext as _

from billing.currencies.amounts import MILLIONTHS, half_up
from billing.metering.usage import UsageReport, count_accepted, sums, total
from billing.models import ExecutionOutcome
from frontend.core.chart_marks import marks_of
from frontend.core.charts import Chart, Series
from frontend.core.charts import legend_total as summed
from frontend.core.code_labels import code_text
from frontend.core.date_ranges import date_range_of, days_of
from frontend.core.languages import day_text, in_sentence
from frontend.core.numbers import Money, duration, share
from frontend.core.page_context import PageContext
from inference_worker.contract.request import PROMPT_CLASSES
from millrace.apps.request_log.selectors import Rates, rates, total_rates, ttft_slo_ms

_HOUR = timedelta(hours=1)
_HOURS = 48
_METERED = (*ExecutionOutcome.values, "cost_femto")


@dataclass(frozen=True)
class Delta:
    """The change of a figure since the previous date range."""

    text: str
    rose: bool
    kind: Literal["", "good", "bad"]


def by_day(ctx: PageContext, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Return the sums of each day from start to end, including days without usage."""
    question = UsageReport(ctx.tenant.pk, start=start, end=end)
    rows = ctx.once(question, lambda: sums(question, bucket="day"))
    found = {row["start"].date(): row for row in rows}
    return [found.get(at.date(), {**total([]), "start": at}) for at in days_of(start, end)]


def by_tier(ctx: PageContext, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Return requests and cost of each tier from start to end."""
    return sums(UsageReport(ctx.tenant.pk, start=start, end=end), group_by=("tier",), summed=_METERED)


def all_input(counts: Mapping[str, Any]) -> int:
    return sum(int(counts[name]) for name in PROMPT_CLASSES)


def cache(ctx: PageContext) -> dict[str, Any]:
    """Return the savings of the prompt cache in the date range."""
    date_range = date_range_of(ctx)
    days = by_day(ctx, date_range.start, date_range.end)
    counts = total(days)
    billed, saved = Money(counts["cost_femto"]), Money(counts["saved_femto"])
    read = [(row["cache_read"], all_input(row)) for row in days]
    hits = [share(part, whole) for part, whole in read if whole]
    hit = share(counts["cache_read"], all_input(counts))
    chart = Chart(
        "hits",
        _("Share of input served from cache by day, %(label)s: %(hit)s in total")
        % {"label": date_range.label, "hit": hit},
        tuple(row["start"].astimezone(UTC) for row in days),
        (
            Series(
                _("Cache hit"),
                "hit",
                tuple(part * MILLIONTHS // whole if whole else None for part, whole in read),
                "area",
            ),
        ),
        "percent",
        height=92,
        bare=True,
        requests_url=ctx.url("requests"),
    )
    return {
        "saved": saved,
        "without": billed + saved,
        "billed": billed,
        "part": share(saved.femto, (billed + saved).femto),
        "hit": hit,
        "hit_tokens": counts["cache_read"],
        "input_tokens": all_input(counts),
        "first_hit": hits[0] if hits else "–",
        "last_hit": hits[-1] if hits else "–",
        "chart": chart,
    }


def stats(ctx: PageContext) -> dict[str, Any]:
    date_range = date_range_of(ctx)
    start, end = date_range.previous
    now = _sum_rows(by_day(ctx, date_range.start, date_range.end))
    then = _sum_rows(sums(UsageReport(ctx.tenant.pk, start=start, end=end), summed=_METERED))
    traffic = total_rates(ctx.tenant.pk, date_range.start, date_range.end, with_ttft=False)
    first, last = start.astimezone(date_range.zone), (end - timedelta(microseconds=1)).astimezone(date_range.zone)
    return {
        "accepted": now[0],
        "accepted_delta": delta_of(now[0], then[0], ""),
        "cost": _per_thousand(*now),
        "cost_delta": delta_of(now[1] * then[0], then[1] * now[0], "good"),
        "failed": share(traffic.total.failed, traffic.total.requests),
        "limited": share(traffic.total.limited, traffic.total.requests),
        "limited_by": _bound(traffic),
        "total": traffic.total,
        "before": _("vs %(first)s – %(last)s")
        % {"first": day_text(first, "j" if first.month == last.month else "j M"), "last": day_text(last, "j M")},
    }


def _sum_rows(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of accepted requests and their cost in femto-USD."""
    return sum(map(count_accepted, rows)), sum(row["cost_femto"] for row in rows)


def _per_thousand(requests: int, femto: int) -> Money | None:
    return Money(half_up(femto * 1000, requests)) if requests else None


def delta_of(now: int, then: int, when_down: Literal["", "good"]) -> Delta | None:
    """Return the change of a figure; None without a previous value. `when_down`: "good" if less is better."""
    if then <= 0:
        return None
    rose = now > then
    kind: Literal["", "good", "bad"] = "" if not when_down or now == then else "bad" if rose else "good"
    return Delta(share(abs(now - then), then), rose, kind)


def _bound(traffic: Rates) -> str:
    if not traffic.bounds or not traffic.total.limited:
        return ""
    most = traffic.bounds[0]
    name = most.name if most.kind == "budget" else code_text(most.name)
    return _("%(share)s by %(name)s") % {
        "share": share(most.requests, traffic.total.limited),
        "name": name or most.kind,
    }


def tokens(ctx: PageContext) -> dict[str, Any]:
    date_range = date_range_of(ctx)
    days = by_day(ctx, date_range.start, date_range.end)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        (_("Output"), "output", tuple(row["output"] for row in days)),
        (_("Uncached input"), "uncached", tuple(row["uncached"] for row in days)),
        (_("Cache writes"), "written", tuple(row["cache_write_5m"] + row["cache_write_1h"] for row in days)),
        (_("Cached input"), "cached", tuple(row["cache_read"] for row in days)),
    )
    used = [item for item in kinds if any(item[2]) or item[1] != "written"]  # explicit cache writes are rare
    series = tuple(Series(label, kind, values, "area", summed(values)) for label, kind, values in used)
    message = ", ".join(f"{in_sentence(line.label)} {line.total}" for line in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    chart = Chart(
        "tokens",
        _("Tokens by day, %(label)s: %(message)s") % {"label": date_range.label, "message": message},
        at,
        series,
        "tokens",
        stacked=True,
        marks=marks_of(ctx),
        requests_url=ctx.url("requests"),
    )
    return {"chart": chart if any(any(values) for *_names, values in kinds) else None, "date_range": date_range.label}


def first_token(ctx: PageContext) -> dict[str, Any]:
    """Return the latency chart; None without a response in the last hours."""
    end = ctx.now.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + _HOUR
    start = end - _HOURS * _HOUR
    traffic = rates(ctx.tenant.pk, start, end, "hour")
    if traffic.total.ttft_p50_ms is None:
        return {"chart": None, "hours": _HOURS}
    found = {bucket.start.astimezone(UTC): bucket for bucket in traffic.buckets}
    hours = [start + i * _HOUR for i in range(_HOURS)]
    halves = [found[at].ttft_p50_ms if at in found else None for at in hours]
    slow = [found[at].ttft_p95_ms if at in found else None for at in hours]
    goal = ttft_slo_ms() * 1000
    series = (
        Series("p50", "p50", _micros(halves), total=_top_limit(traffic.total.ttft_p50_ms)),
        Series("p95", "p95", _micros(slow), total=_top_limit(traffic.total.ttft_p95_ms)),
        Series(_("Target, p95"), "goal", (goal,) * _HOURS, "dots", duration(goal)),
    )
    of = _("Time to first token by hour, last %(hours)s hours: p50 %(p50)s, p95 %(p95)s") % {
        "hours": _HOURS,
        "p50": series[0].total,
        "p95": series[1].total,
    }
    over = sum(value is not None and value * 1000 > goal for value in slow)
    of += _(", against a target of %(total)s missed in %(over)s hours") % {"total": series[2].total, "over": over}
    chart = Chart(
        "first-token",
        of,
        tuple(hours),
        series,
        "ms",
        "hour",
        ctx.zone,
        step=_HOUR,
        marks=marks_of(ctx),
        requests_url=ctx.url("requests"),
    )
    return {"chart": chart, "hours": _HOURS}


def _micros(values: list[int | None]) -> tuple[int | None, ...]:
    return tuple(None if value is None else value * 1000 for value in values)


def _top_limit(milliseconds: int | None) -> str:
    return "–" if milliseconds is None else duration(milliseconds * 1000)
