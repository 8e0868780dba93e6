"""What a tenant's overview shows: this month's and today's use, and the latest requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from billing.models import UsageEvent, Verdict
from billing.partitions import month_of
from billing.usage import Question, sums, this_month, total
from frontend.metering import Metering, metering
from frontend.numbers import compact, duration, exact, share
from millrace.config import platform_settings
from tenants.models import ApiKey, Tenant

LATEST = 20
CHART_WIDTH, CHART_HEIGHT = 720, 180  # units of the drawing, which scales with the page


@dataclass(frozen=True)
class Figure:
    """A number of the month with today's beside it."""

    label: str
    month: str
    month_exact: str
    today: str


@dataclass(frozen=True)
class ClassRow:
    """The tokens of one class."""

    label: str
    kind: str  # names the colour: output, uncached, cached, written
    today: str
    month: str
    part: str  # of all tokens of the month


@dataclass(frozen=True)
class Slab:
    """One piece of a day's column, in the drawing's units."""

    kind: str
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Day:
    """A row of the chart's table twin."""

    day: date
    requests: str
    uncached: str
    cached: str
    written: str
    output: str


@dataclass(frozen=True)
class Chart:
    slabs: tuple[Slab, ...]
    days: tuple[Day, ...]
    top: str  # what the drawing's full height stands for
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT


@dataclass(frozen=True)
class RequestRow:
    """One leg of a request, as it was metered."""

    at: datetime
    request_id: str
    key: str
    model: str
    uncached: str
    cache_read: str
    cache_write: str
    output: str
    ttft: str
    duration: str
    verdict: str
    verdict_label: str
    finish_reason: str


@dataclass(frozen=True)
class FirstRequest:
    """What to type to see something here."""

    base_url: str
    model: str


@dataclass(frozen=True)
class Overview:
    start: datetime
    now: datetime
    metering: Metering
    suspended: bool
    figures: tuple[Figure, ...]
    classes: tuple[ClassRow, ...]
    chart: Chart
    latest: tuple[RequestRow, ...]
    first_request: FirstRequest | None  # only while there has been none


def overview(tenant: Tenant, now: datetime | None = None) -> Overview:
    """The overview of a tenant at the instant `now`."""
    start, now = this_month(now)
    by_day = sums(Question(tenant.pk, start=start, end=now), bucket="day")
    today = total([row for row in by_day if row["start"].date() == now.date()])
    month = total(by_day)
    latest = _latest(tenant)
    return Overview(
        start=start,
        now=now,
        metering=metering(now),
        suspended=tenant.is_suspended,
        figures=_figures(month, today),
        classes=_classes(month, today),
        chart=_chart(by_day, now),
        latest=latest,
        first_request=None if latest else _first_request(),
    )


def _requests(counts: Mapping[str, Any]) -> int:
    return sum(counts[verdict] for verdict in Verdict.values)


def _written(counts: Mapping[str, Any]) -> int:
    return int(counts["cache_write_5m"]) + int(counts["cache_write_1h"])


def _input(counts: Mapping[str, Any]) -> int:
    return int(counts["uncached"]) + int(counts["cache_read"]) + _written(counts)


def _figures(month: Mapping[str, int], today: Mapping[str, int]) -> tuple[Figure, ...]:
    def figure(label: str, of_month: int, of_today: int) -> Figure:
        return Figure(label, compact(of_month), exact(of_month), exact(of_today))

    cached = f"{exact(month['cache_read'])} of {exact(_input(month))}"
    return (
        figure("Requests", _requests(month), _requests(today)),
        figure("Input tokens", _input(month), _input(today)),
        figure("Output tokens", month["output"], today["output"]),
        Figure(
            "Input served from cache",
            share(month["cache_read"], _input(month)),
            cached,
            share(today["cache_read"], _input(today)),
        ),
        figure("Failed, not billed", month[Verdict.FAILED], today[Verdict.FAILED]),
    )


def _classes(month: Mapping[str, int], today: Mapping[str, int]) -> tuple[ClassRow, ...]:
    everything = _input(month) + month["output"]
    labels = (
        ("Uncached input", "uncached", "uncached"),
        ("Read from cache", "cached", "cache_read"),
        ("Written to cache, 5 min", "written", "cache_write_5m"),
        ("Written to cache, 1 h", "written", "cache_write_1h"),
        ("Output", "output", "output"),
    )
    return tuple(
        ClassRow(label, kind, exact(today[name]), exact(month[name]), share(month[name], everything))
        for label, kind, name in labels
    )


def _chart(by_day: list[dict[str, Any]], now: datetime) -> Chart:
    """A column a day of the month, stacked from cached input at the bottom to output at the top."""
    found = {row["start"].date(): row for row in by_day}
    first = month_of(now)
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    highest = max((_input(row) + row["output"] for row in by_day), default=0)
    slot = CHART_WIDTH // last.day
    slabs: list[Slab] = []
    for day, row in found.items():
        floor = CHART_HEIGHT
        for kind, tokens in _stack(row):
            height = tokens * CHART_HEIGHT // highest if highest else 0
            floor -= height
            if height:
                slabs.append(Slab(kind, (day.day - 1) * slot + 3, floor, slot - 6, height))
    return Chart(tuple(slabs), tuple(_day(day, row) for day, row in sorted(found.items())), compact(highest))


def _stack(row: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    yield "cached", row["cache_read"]
    yield "written", _written(row)
    yield "uncached", row["uncached"]
    yield "output", row["output"]


def _day(day: date, row: Mapping[str, Any]) -> Day:
    counts = (_requests(row), row["uncached"], row["cache_read"], _written(row), row["output"])
    return Day(day, *(exact(count) for count in counts))


def _latest(tenant: Tenant) -> tuple[RequestRow, ...]:
    events = list(Question(tenant.pk).events().order_by("-admitted_at", "-request_id", "-leg")[:LATEST])
    keys = ApiKey.objects.for_tenant(tenant).filter(pk__in={event.key_id for event in events})
    prefixes = {key.pk: f"{key.prefix}…" for key in keys}
    return tuple(_request(event, prefixes.get(event.key_id, f"key {event.key_id}")) for event in events)


def _request(event: UsageEvent, key: str) -> RequestRow:
    return RequestRow(
        at=event.admitted_at.astimezone(UTC),
        request_id=event.request_id,
        key=key,
        model=event.model,
        uncached=exact(event.uncached),
        cache_read=exact(event.cache_read),
        cache_write=exact(event.cache_write_5m + event.cache_write_1h),
        output=exact(event.output),
        ttft=duration(event.ttft_us) if event.ttft_us else "–",
        duration=duration(event.duration_us),
        verdict=event.verdict,
        verdict_label=Verdict(event.verdict).label,
        finish_reason=event.finish_reason,
    )


def _first_request() -> FirstRequest:
    settings = platform_settings()
    return FirstRequest(f"{settings.base_url}/v1", settings.models[0].name)
