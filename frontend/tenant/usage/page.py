"""The panels of usage over time, of what caches saved, and of what limits refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import urlencode

from billing.metering.usage import sums, total
from frontend.core.charts import Chart, Series
from frontend.core.charts import total as summed
from frontend.core.date_ranges import days_of
from frontend.core.numbers import Money, share
from frontend.core.page_context import PageContext
from frontend.tenant.requests.log import bound_label
from frontend.tenant.usage.groups import INPUT
from frontend.tenant.usage.query import UsageReportQuery, asked
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import rates

_DAY = timedelta(days=1)
MOST_BOUNDS = 12
REASONS: Mapping[str, tuple[str, str]] = {
    "": ("None", "All cacheable tokens were served from the cache."),
    "too_short": ("Too short", "Prompt shorter than one cache block"),
    "first_use": ("First use", "Prefix not seen before"),
    "expired_or_evicted": ("Expired or evicted", "Evicted to free space. Use cache_control to keep the prefix cached."),
    "prefix_changed": ("Prefix changed", "The prompt differs from a cached one. Put changing content at the end."),
    "other_worker": ("Cached on another replica", "The replica with the cached prefix was busy or restarted."),
}


@dataclass(frozen=True)
class UsageStats:
    requests: int
    failed: int
    input: int
    output: int
    hit: str
    cached: int
    cost: Money
    saved: Money
    per_million: Money | None


@dataclass(frozen=True)
class Drawn:
    chart: Chart | None  # None: nothing was used
    span: str


@dataclass(frozen=True)
class Miss:
    label: str
    said: str
    requests: int
    uncached: int
    part: str
    part_of: int


@dataclass(frozen=True)
class Caches:
    """What the prompt cache saved. `misses`: why it did not give the rest, the most tokens first."""

    saved: Money
    without: Money
    billed: Money
    hit: str
    hit_tokens: int
    input_tokens: int
    answer_tokens: int  # that cached answers made needless
    misses: tuple[Miss, ...]


@dataclass(frozen=True)
class Bound:
    label: str
    kind: str
    requests: int
    part: str
    most: int
    url: str


@dataclass(frozen=True)
class Refusals:
    limited: int
    requests: int
    part: str
    bounds: tuple[Bound, ...]
    log_url: str
    filtered: bool  # the page is, these are not


def _days(visit: PageContext, now: UsageReportQuery) -> list[dict[str, Any]]:
    """Return the sums of each day of the span, also of those without use."""
    rows = visit.once(now.question, lambda: sums(now.question, bucket="day"))
    found = {row["start"].astimezone(UTC).date(): row for row in rows}
    days = days_of(now.span.start, now.span.end)
    return [found.get(at.date(), {**total([]), "start": at}) for at in days]


def _all_input(counts: Mapping[str, Any]) -> int:
    return sum(int(counts[name]) for name in INPUT)


def figures(visit: PageContext) -> UsageStats:
    counts = total(_days(visit, asked(visit)))
    given, cost = _all_input(counts), Money(counts["cost_femto"])
    tokens = given + counts["output"]
    return UsageStats(
        counts["completed"] + counts["cancelled"] + counts["failed"],
        counts["failed"],
        given,
        counts["output"],
        share(counts["cache_read"], given),
        counts["cache_read"],
        cost,
        Money(counts["saved_femto"]),
        Money(cost.femto * 10**6 // tokens) if tokens else None,
    )


def tokens(visit: PageContext) -> Drawn:
    """Tokens by billing class and day."""
    now = asked(visit)
    days = _days(visit, now)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("Output", "output", tuple(row["output"] for row in days)),
        ("Uncached input", "uncached", tuple(row["uncached"] for row in days)),
        ("Cache writes, 5 min", "written", tuple(row["cache_write_5m"] for row in days)),
        ("Cache writes, 1 h", "written", tuple(row["cache_write_1h"] for row in days)),
        ("Cached input", "cached", tuple(row["cache_read"] for row in days)),
    )
    if not any(any(values) for _, _, values in kinds):
        return Drawn(None, now.span.label)
    series = tuple(
        Series(label, kind, values, "area", summed(values))
        for label, kind, values in kinds
        if any(values) or kind != "written"
    )
    said = ", ".join(f"{one.label.lower()} {one.total}" for one in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    of = f"Tokens by type and day, {now.span.label}: {said}"
    return Drawn(Chart("tokens", of, at, series, "tokens", stacked=True), now.span.label)


def cost(visit: PageContext) -> Drawn:
    """Return what each day cost, and would have cost without caches."""
    now = asked(visit)
    days = _days(visit, now)
    if not any(row["cost_femto"] for row in days):
        return Drawn(None, now.span.label)
    spent = tuple(row["cost_femto"] for row in days)
    without = tuple(row["cost_femto"] + row["saved_femto"] for row in days)
    series = [Series("Cost", "spend", spent, "area", Money(sum(spent)).text)]
    if without != spent:
        series.append(Series("Without caches", "goal", without, "dots", Money(sum(without)).text))
    said = ", ".join(f"{one.label.lower()} {one.total}" for one in series)
    at = tuple(row["start"].astimezone(UTC) for row in days)
    return Drawn(Chart("cost", f"Cost by day, {now.span.label}: {said}", at, tuple(series), "usd"), now.span.label)


def caches(visit: PageContext) -> Caches:
    now = asked(visit)
    rows = sums(now.question, group_by=("miss_reason",))
    counts = total(rows)
    missed = sorted((row for row in rows if row["miss_reason"]), key=lambda row: -row["uncached"])
    all_missed = sum(row["uncached"] for row in missed)
    billed, saved = Money(counts["cost_femto"]), Money(counts["saved_femto"])
    return Caches(
        saved,
        billed + saved,
        billed,
        share(counts["cache_read"], _all_input(counts)),
        counts["cache_read"],
        _all_input(counts),
        counts["answer_hit_input"] + counts["answer_hit_output"],
        tuple(_miss(row, all_missed) for row in missed),
    )


def _miss(row: Mapping[str, Any], all_missed: int) -> Miss:
    label, said = REASONS.get(row["miss_reason"], (row["miss_reason"].replace("_", " "), ""))
    requests = row["completed"] + row["cancelled"] + row["failed"]
    return Miss(label, said, requests, row["uncached"], share(row["uncached"], all_missed), all_missed)


def refusals(visit: PageContext) -> Refusals:
    """Return what was answered 429, by the limit or budget that bound."""
    now = asked(visit)
    went = rates(visit.tenant.pk, now.span.start, now.span.end, "day")
    kept = {name: value for name, value in visit.query.items() if name in ("range", "from", "to")}
    log = visit.link("requests")
    most = max((each.requests for each in went.bounds), default=0)
    bounds = tuple(
        Bound(
            bound_label(each.kind, each.scope, each.name, each.model),
            each.kind,
            each.requests,
            share(each.requests, went.total.limited),
            most,
            visit.link("budgets") if each.kind == "budget" else "",
        )
        for each in went.bounds[:MOST_BOUNDS]
    )
    return Refusals(
        went.total.limited,
        went.total.requests,
        share(went.total.limited, went.total.requests),
        bounds,
        f"{log}?{urlencode({**kept, 'outcome': RequestOutcome.LIMITED.value})}" if log else "",
        any(visit.query.get(name) for name in ("model", "key", "project")),
    )
