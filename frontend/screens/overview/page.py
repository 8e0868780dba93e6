"""What a tenant's overview shows, one view model a panel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from billing.models import Budget, Window
from billing.usage import Question, sums, this_month, total
from frontend.charts import Chart, Series
from frontend.charts import total as summed
from frontend.gauges import Gauge, Mark, percent
from frontend.metering import Metering, metering
from frontend.numbers import Money, share
from frontend.spans import Span, span_of
from frontend.visits import Visit
from millrace.config import platform_settings
from tenants.models import ApiKey

TOP = 5
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class FirstRequest:
    """What to type to see something here."""

    base_url: str
    model: str

    @property
    def curl(self) -> str:
        return f"""curl {self.base_url}/chat/completions \\
  -H "Authorization: Bearer $MILLRACE_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{self.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""

    @property
    def python(self) -> str:
        return f"""import os

from openai import OpenAI

client = OpenAI(base_url="{self.base_url}", api_key=os.environ["MILLRACE_KEY"])
answer = client.chat.completions.create(
    model="{self.model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.choices[0].message.content)"""


@dataclass(frozen=True)
class Head:
    span: Span
    metering: Metering
    suspended: bool
    first_request: FirstRequest | None  # only while there has been none


@dataclass(frozen=True)
class Spend:
    """This month's spend, against the tenant's own hard monthly budget if it has one."""

    amount: Money
    limit: Money | None
    left: Money | None
    used: str
    gauge: Gauge | None
    chart: Chart


@dataclass(frozen=True)
class Cache:
    """What the prompt cache saved in the span."""

    saved: Money
    uncached: Money  # what the same would have cost without
    billed: Money
    part: str
    hit: str
    hit_tokens: int
    input_tokens: int
    chart: Chart


@dataclass(frozen=True)
class Tokens:
    chart: Chart
    is_empty: bool


@dataclass(frozen=True)
class KeyRow:
    name: str
    prefix: str
    url: str
    tokens: int
    hit: str
    hit_tokens: int
    input_tokens: int
    spend: Money


@dataclass(frozen=True)
class Keys:
    rows: tuple[KeyRow, ...]
    shown: Money
    everything: Money
    part: str
    others: int


def head(visit: Visit) -> Head:
    """What stands above the panels."""
    seen = Question(visit.tenant.pk).events().exists()
    return Head(span_of(visit), metering(visit.now), visit.tenant.is_suspended, None if seen else _first_request())


def spend(visit: Visit) -> Spend:
    start, now = this_month(visit.now)
    by_day = _by_day(visit, start, now)
    amount = Money(sum(row["cost_femto"] for row in by_day))
    limit = _limit(visit, start)
    days = [start + i * _DAY for i in range((now - start).days + 1)]
    running, so_far = [], 0
    for at in days:
        so_far += by_day_cost(by_day, at)
        running.append(so_far)
    series = [Series("Spend so far", "spend", tuple(running), "area")]
    if limit is not None:
        series.append(Series("Hard limit", "limit", (limit.femto,) * len(days)))
    of = f"Spend by day, cumulative: {amount.text} until {now:%-d %B}"
    chart = Chart("spend", of, tuple(days), tuple(series), "usd", height=214)
    if limit is None:
        return Spend(amount, None, None, "", None, chart)
    scale = max(limit.femto, amount.femto) * 17 // 15
    used = share(amount.femto, limit.femto)
    marks = (Mark(percent(limit.femto, scale), f"Limit {limit.text}", is_limit=True),)
    gauge = Gauge(percent(amount.femto, scale), None, marks, f"Spent {used} of the limit of {limit.text}")
    return Spend(amount, limit, Money(max(0, limit.femto - amount.femto)), used, gauge, chart)


def by_day_cost(by_day: Iterable[Mapping[str, Any]], at: datetime) -> int:
    return sum(row["cost_femto"] for row in by_day if row["start"].date() == at.date())


def cache(visit: Visit) -> Cache:
    span = span_of(visit)
    by_day = _by_day(visit, span.start, span.end)
    counts = total(by_day)
    billed, saved = Money(counts["cost_femto"]), Money(counts["saved_femto"])
    hits = tuple(_hundredths(row["cache_read"], _input(row)) for row in by_day)
    days = tuple(row["start"].astimezone(UTC) for row in by_day)
    hit = share(counts["cache_read"], _input(counts))
    chart = Chart(
        "hits",
        f"Part of the input served from cache by day, {span.label}: {hit} in all",
        days,
        (Series("Cache hit", "hit", hits, "area"),),
        "percent",
        height=92,
        bare=True,
    )
    uncached = billed + saved
    part = share(saved.femto, uncached.femto)
    return Cache(saved, uncached, billed, part, hit, counts["cache_read"], _input(counts), chart)


def tokens(visit: Visit) -> Tokens:
    span = span_of(visit)
    by_day = _by_day(visit, span.start, span.end)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("Output", "output", tuple(row["output"] for row in by_day)),
        ("Uncached input", "uncached", tuple(row["uncached"] for row in by_day)),
        ("Written to cache", "written", tuple(row["cache_write_5m"] + row["cache_write_1h"] for row in by_day)),
        ("Cached input", "cached", tuple(row["cache_read"] for row in by_day)),
    )
    series = tuple(Series(label, kind, values, "area", summed(values)) for label, kind, values in kinds)
    said = ", ".join(f"{one.label.lower()} {one.total}" for one in series)
    days = tuple(row["start"].astimezone(UTC) for row in by_day)
    chart = Chart("tokens", f"Tokens by day, {span.label}: {said}", days, series, "tokens", stacked=True)
    return Tokens(chart, not by_day)


def keys(visit: Visit) -> Keys:
    span = span_of(visit)
    rows = sums(Question(visit.tenant.pk, start=span.start, end=span.end), group_by=("key",))
    rows.sort(key=lambda row: (-row["cost_femto"], row["key_id"]))
    top = rows[:TOP]
    known = {key.pk: key for key in ApiKey.objects.for_tenant(visit.tenant).filter(pk__in=[r["key_id"] for r in top])}
    shown = Money(sum(row["cost_femto"] for row in top))
    everything = Money(sum(row["cost_femto"] for row in rows))
    return Keys(
        tuple(_key(visit, row, known.get(row["key_id"])) for row in top),
        shown,
        everything,
        share(shown.femto, everything.femto),
        len(rows),
    )


def _key(visit: Visit, row: Mapping[str, Any], key: ApiKey | None) -> KeyRow:
    return KeyRow(
        name=key.name if key else f"Key {row['key_id']}, deleted",
        prefix=f"{key.prefix}…" if key else "",
        url="",
        tokens=_input(row) + row["output"],
        hit=share(row["cache_read"], _input(row)),
        hit_tokens=row["cache_read"],
        input_tokens=_input(row),
        spend=Money(row["cost_femto"]),
    )


def _limit(visit: Visit, start: datetime) -> Money | None:
    """The least of the tenant's own hard monthly budgets in money."""
    budgets = Budget.objects.for_tenant(visit.tenant).filter(
        active=True,
        unit=Window.Unit.MONEY,
        period=Budget.Period.MONTH,
        mode=Budget.Mode.HARD,
        project=None,
        key=None,
        member=None,
    )
    amounts = [budget.amount for budget in budgets]
    return Money.nano(min(amounts)) if amounts else None


def _by_day(visit: Visit, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Sums of each day of the span, also of those without use."""
    rows = sums(Question(visit.tenant.pk, start=start, end=end), bucket="day")
    found = {row["start"].date(): row for row in rows}
    days = [start + i * _DAY for i in range(-(-(end - start) // _DAY))]
    return [found.get(at.date(), {**total([]), "start": at}) for at in days]


def _input(counts: Mapping[str, Any]) -> int:
    names = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h")
    return sum(int(counts[name]) for name in names)


def _hundredths(part: int, whole: int) -> int | None:
    return part * 10_000 // whole if whole else None


def _first_request() -> FirstRequest:
    settings = platform_settings()
    return FirstRequest(f"{settings.base_url}/v1", settings.models[0].name)
