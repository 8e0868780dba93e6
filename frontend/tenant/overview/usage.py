"""The overview's panels of usage: cache saving, key figures, tokens, time to first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from billing.metering.usage import UsageReport, sums, this_month, total
from billing.models import ExecutionOutcome
from frontend.core.charts import Chart, Series
from frontend.core.charts import total as summed
from frontend.core.date_ranges import DateRange, days_of, span_of
from frontend.core.numbers import Money, duration, share
from frontend.core.page_context import PageContext
from millrace.apps.request_log.selectors import Rates, rates, ttft_slo_ms

_DAY, _HOUR = timedelta(days=1), timedelta(hours=1)
_HOURS = 48


@dataclass(frozen=True)
class Cache:
    """What the prompt cache saved in the span."""

    saved: Money
    without: Money  # what the same would have cost without it
    billed: Money
    part: str
    hit: str
    hit_tokens: int
    input_tokens: int
    first_hit: str
    last_hit: str
    span: str
    chart: Chart


@dataclass(frozen=True)
class Delta:
    """How a figure moved against the span before."""

    text: str
    rose: bool
    kind: Literal["", "good", "bad"]


@dataclass(frozen=True)
class OverviewStats:
    requests: int
    requests_delta: Delta | None
    cost: Money | None  # of 1,000 requests
    cost_delta: Delta | None
    failed: str
    failed_of: str
    limited: str
    limited_of: str
    before: str


@dataclass(frozen=True)
class OverviewTokens:
    chart: Chart
    is_empty: bool
    span: str


@dataclass(frozen=True)
class FirstToken:
    """`chart` is None if nobody was answered in those hours."""

    chart: Chart | None
    hours: int


def by_day(visit: PageContext, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Return the sums of each day from start to end, also of those without use."""
    question = UsageReport(visit.tenant.pk, start=start, end=end)
    rows = visit.once(question, lambda: sums(question, bucket="day"))
    found = {row["start"].date(): row for row in rows}
    return [found.get(at.date(), {**total([]), "start": at}) for at in days_of(start, end)]


def all_input(counts: Mapping[str, Any]) -> int:
    names = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h")
    return sum(int(counts[name]) for name in names)


def cache(visit: PageContext) -> Cache:
    span = span_of(visit)
    days = by_day(visit, span.start, span.end)
    counts = total(days)
    billed, saved = Money(counts["cost_femto"]), Money(counts["saved_femto"])
    read = [(row["cache_read"], all_input(row)) for row in days]
    hits = [share(part, whole) for part, whole in read if whole]
    hit = share(counts["cache_read"], all_input(counts))
    chart = Chart(
        "hits",
        f"Share of input served from cache by day, {span.label}: {hit} in total",
        tuple(row["start"].astimezone(UTC) for row in days),
        (Series("Cache hit", "hit", tuple(part * 10_000 // whole if whole else None for part, whole in read), "area"),),
        "percent",
        height=92,
        bare=True,
    )
    return Cache(
        saved,
        billed + saved,
        billed,
        share(saved.femto, (billed + saved).femto),
        hit,
        counts["cache_read"],
        all_input(counts),
        hits[0] if hits else "–",
        hits[-1] if hits else "–",
        span.label,
        chart,
    )


def figures(visit: PageContext) -> OverviewStats:
    span = span_of(visit)
    start, end = _before(span)
    now = _metered(visit, span.start, span.end)
    then = _metered(visit, start, end)
    went = rates(visit.tenant.pk, span.start, span.end, "day")
    first, last = start.astimezone(span.zone), (end - timedelta(microseconds=1)).astimezone(span.zone)
    return OverviewStats(
        requests=now[0],
        requests_delta=_delta(now[0], then[0], ""),
        cost=_per_thousand(*now),
        cost_delta=_delta(now[1] * then[0], then[1] * now[0], "good"),
        failed=_rate(went.total.failed, went),
        failed_of=f"{went.total.failed:,} of {went.total.requests:,}",
        limited=_rate(went.total.limited, went),
        limited_of=_bound(went),
        before=f"vs {first:{'%-d' if first.month == last.month else '%-d %b'}} – {last:%-d %b}",
    )


def _metered(visit: PageContext, start: datetime, end: datetime) -> tuple[int, int]:
    """Return the number of requests and their cost in femto-USD."""
    counts = total(sums(UsageReport(visit.tenant.pk, start=start, end=end)))
    return sum(counts[outcome] for outcome in ExecutionOutcome.values), counts["cost_femto"]


def _before(span: DateRange) -> tuple[datetime, datetime]:
    """Return the span to compare with: of a month the same days of the month before, else as long, just before."""
    length = span.end - span.start
    if span.name == "month":
        start = this_month(span.start - _DAY, span.zone)[0]
        return start, min(start + length, span.start)
    return span.start - length, span.start


def _per_thousand(requests: int, femto: int) -> Money | None:
    return Money(femto * 1000 // requests) if requests else None


def _delta(now: int, then: int, when_down: Literal["", "good"]) -> Delta | None:
    if then <= 0:
        return None
    rose = now > then
    kind: Literal["", "good", "bad"] = "" if not when_down or now == then else "bad" if rose else "good"
    return Delta(share(abs(now - then), then), rose, kind)


def _rate(part: int, went: Rates) -> str:
    """Return a rate with two places: errors are rare."""
    whole = went.total.requests
    if not whole:
        return "–"
    hundredths = part * 10_000 // whole
    return f"{hundredths // 100}.{hundredths % 100:02}%"


def _bound(went: Rates) -> str:
    if not went.bounds or not went.total.limited:
        return f"{went.total.limited:,} of {went.total.requests:,}"
    most = went.bounds[0]
    name = most.name if most.kind == "budget" else most.name.replace("_", " ")
    return f"{share(most.requests, went.total.limited)} by {name or most.kind}"


def tokens(visit: PageContext) -> OverviewTokens:
    span = span_of(visit)
    days = by_day(visit, span.start, span.end)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("Output", "output", tuple(row["output"] for row in days)),
        ("Uncached input", "uncached", tuple(row["uncached"] for row in days)),
        ("Cache writes", "written", tuple(row["cache_write_5m"] + row["cache_write_1h"] for row in days)),
        ("Cached input", "cached", tuple(row["cache_read"] for row in days)),
    )
    used = [one for one in kinds if any(one[2]) or one[1] != "written"]  # few write to a cache of their own accord
    series = tuple(Series(label, kind, values, "area", summed(values)) for label, kind, values in used)
    said = ", ".join(f"{one.label.lower()} {one.total}" for one in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    chart = Chart("tokens", f"Tokens by day, {span.label}: {said}", at, series, "tokens", stacked=True)
    return OverviewTokens(chart, not any(any(values) for _, _, values in kinds), span.label)


def first_token(visit: PageContext) -> FirstToken:
    end = visit.now.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + _HOUR
    start = end - _HOURS * _HOUR
    went = rates(visit.tenant.pk, start, end, "hour")
    if went.total.ttft_p50_ms is None:
        return FirstToken(None, _HOURS)
    found = {bucket.start.astimezone(UTC): bucket for bucket in went.buckets}
    hours = [start + i * _HOUR for i in range(_HOURS)]
    halves = [found[at].ttft_p50_ms if at in found else None for at in hours]
    slow = [found[at].ttft_p95_ms if at in found else None for at in hours]
    goal = ttft_slo_ms() * 1000
    series = (
        Series("p50", "p50", _micros(halves), total=_told(went.total.ttft_p50_ms)),
        Series("p95", "p95", _micros(slow), total=_told(went.total.ttft_p95_ms)),
        Series("Target, p95", "goal", (goal,) * _HOURS, "dots", duration(goal)),
    )
    of = f"Time to first token by hour, last {_HOURS} hours: p50 {series[0].total}, p95 {series[1].total}"
    over = sum(one is not None and one * 1000 > goal for one in slow)
    of += f", against a target of {series[2].total} missed in {over} hours"
    return FirstToken(Chart("first-token", of, tuple(hours), series, "ms", "hour", visit.zone), _HOURS)


def _micros(values: list[int | None]) -> tuple[int | None, ...]:
    return tuple(None if value is None else value * 1000 for value in values)


def _told(milliseconds: int | None) -> str:
    return "–" if milliseconds is None else duration(milliseconds * 1000)
