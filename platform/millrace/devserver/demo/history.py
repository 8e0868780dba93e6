"""What the demo tenants are said to have used: events as a worker reports them, the same at every run.

Each day of each tenant is drawn from a seed of its own, so that a later run makes the same days again, and new ones.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import accumulate

from billing.pricing.pricing import Component, PriceIndex, hold_nano
from inference_worker.contract.messages import BillingContext, ExecutionUsage
from inference_worker.contract.request import TokenUsage
from millrace.devserver.demo.seeding import DemoModels, DemoTenant
from millrace.devserver.demo.tenants import DemoWorkload, KeySpec

DAYS = 61  # of history before a tenant was made
LEARNING_DAYS = 75  # in which a customer learns to use the cache
BLOCK = 32  # tokens, as the engine caches them
PREFIX = "demo_"  # of request ids
MAX_PROMPT_TOKENS = 7000
_HOURS = (2, 1, 1, 1, 1, 2, 4, 8, 14, 18, 19, 18, 16, 18, 19, 18, 16, 13, 10, 8, 7, 6, 5, 3)  # weights, UTC
_WEEK = (1.15, 1.2, 1.2, 1.15, 1.0, 0.45, 0.4)  # from Monday
_UPTO = tuple(accumulate(_HOURS))
_MISSES = ("first_use", "prefix_changed", "expired_or_evicted")


@dataclass(frozen=True)
class DemoUsage:
    """A request, and what it would hold of budgets."""

    key: str
    work: DemoWorkload
    event: ExecutionUsage
    need: dict[str, int]  # by unit


@dataclass(frozen=True)
class DemoPeriod:
    """The days of history that are wanted, and how much use there is in all of them together."""

    days: int
    events: int  # of a tenant of volume 1, in DAYS days
    now: datetime

    def first_day(self, player: DemoTenant) -> date:
        """NOTE: counted from when the tenant was made, not from now: a later run must not begin elsewhere."""
        return player.tenant.created_at.astimezone(UTC).date() - timedelta(days=self.days)

    def all_days(self, player: DemoTenant) -> Iterator[date]:
        day, last = self.first_day(player), self.now.astimezone(UTC).date()
        while day <= last:
            yield day
            day += timedelta(days=1)


def uses(player: DemoTenant, day: date, span: DemoPeriod, models: DemoModels, prices: PriceIndex) -> list[DemoUsage]:
    """Return the requests of one day until now, in order."""
    keys = [key for key in player.spec.keys if key.work and models.named(key.work.model)]
    if not keys:
        return []
    draw = random.Random(f"{player.spec.slug} {day}")  # noqa: S311  (nothing is to be kept from anybody)
    began = player.tenant.created_at.astimezone(UTC).date() - timedelta(days=DAYS)
    age = min(1.0, max(0.0, (day - began).days / LEARNING_DAYS))
    level = (0.7 + 0.6 * age) * _WEEK[day.weekday()] * draw.uniform(0.85, 1.15)
    number = round(span.events / DAYS * player.spec.volume * level + draw.random() * 0.5)
    shares = list(accumulate(key.work.share for key in keys if key.work))
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000
    upto = int(span.now.timestamp() * 1_000_000) - 60_000_000
    found = []
    for place in range(number):
        key = keys[bisect_right(shares, draw.random() * shares[-1])]
        hour = bisect_right(_UPTO, draw.random() * _UPTO[-1])
        at = midnight + hour * 3_600_000_000 + draw.randrange(3_600_000_000)
        use = _use(player, key, at, f"{day} {place}", age, draw, models, prices)
        if use is not None and at <= upto:
            found.append(use)
    found.sort(key=lambda use: use.event.billing_context.admitted_at)
    return found


def _use(
    player: DemoTenant,
    key: KeySpec,
    at: int,
    name: str,
    age: float,
    draw: random.Random,
    models: DemoModels,
    prices: PriceIndex,
) -> DemoUsage | None:
    work = key.work
    model = None if work is None else models.named(work.model)
    if work is None or model is None:
        return None
    usage, miss_reason = _tokens(work, age, draw)
    asked = max(BLOCK, math.ceil(usage.output / 128) * 128) if work.output else 0
    outcome, reason = _end(usage.output == asked, draw)
    if outcome == "cancelled":
        usage = _cut(usage, draw.random())
    row, project = player.keys[key.name], player.projects[key.project]
    sheet = prices.find(player.tenant.pk, model, work.tier, at)
    if sheet is None:
        return None
    writes_5m, writes_1h = work.writes == Component.CACHE_WRITE_5M, work.writes == Component.CACHE_WRITE_1H
    ttft = int(35_000 + 240 * usage.uncached + draw.expovariate(1 / 30_000))
    billing_context = BillingContext(
        admitted_at=at,
        request_id=PREFIX + hashlib.blake2b(f"{player.spec.slug} {name}".encode(), digest_size=13).hexdigest(),
        execution=0,
        tenant_id=player.tenant.pk,
        project_id=project.pk,
        key_id=row.pk,
        model=model,
        price_version=sheet.version,
    )
    event = ExecutionUsage(
        billing_context=billing_context,
        attempt=1,
        outcome=outcome,
        finish_reason=reason if work.output else "stop",
        usage=usage,
        replica_id=f"{model}-0.demo",
        block_size=BLOCK,
        queue_us=int(draw.expovariate(1 / 4_000)),
        ttft_us=ttft,
        duration_us=ttft + int(usage.output * draw.uniform(14_000, 22_000)),
        miss_reason=miss_reason,
        changed_at=usage.cache_read if miss_reason == "prefix_changed" else None,
    )
    hold = hold_nano(sheet, usage.prompt, asked, at, writes_5m=writes_5m, writes_1h=writes_1h)
    return DemoUsage(key.name, work, event, {"money": hold, "tokens": usage.prompt + asked, "requests": 1})


def _tokens(work: DemoWorkload, age: float, draw: random.Random) -> tuple[TokenUsage, str]:
    """By class, and why the cache did not give it all."""
    prompt = min(MAX_PROMPT_TOKENS, max(8, int(work.prompt * math.exp(draw.gauss(0, 0.5)))))
    output = min(2000, max(1, int(work.output * math.exp(draw.gauss(0, 0.6))))) if work.output else 0
    blocks = prompt // BLOCK
    if not blocks:
        return TokenUsage(uncached=prompt, output=output), "too_short"
    read = written = 0
    if draw.random() < 0.25 + 0.7 * age:
        read = BLOCK * int(blocks * work.reused * (0.35 + 0.65 * age) * draw.uniform(0.8, 1.25))
        read = min(read, BLOCK * blocks)
    elif work.writes:
        written = BLOCK * int(blocks * work.reused)
    rest = {"uncached": prompt - read - written, "cache_read": read, "output": output}
    if written:
        rest[work.writes.value if work.writes else ""] = written
    whole = prompt - read < BLOCK
    return TokenUsage(**rest), "" if whole else draw.choice(_MISSES) if read else "first_use"


def _end(at_length: bool, draw: random.Random) -> tuple[str, str]:
    """How it ended, and why."""
    drawn = draw.random()
    if drawn < 0.012:
        return "failed", "error"
    if drawn < 0.032:
        return "cancelled", "cancelled"
    return "completed", "length" if at_length else "stop"


def _cut(usage: TokenUsage, part: float) -> TokenUsage:
    return TokenUsage(
        usage.uncached, usage.cache_read, usage.cache_write_5m, usage.cache_write_1h, int(usage.output * part)
    )


def months(days: Sequence[date]) -> list[datetime]:
    """Return a moment in each month that the days lie in."""
    return [datetime(day.year, day.month, 15, tzinfo=UTC) for day in sorted({day.replace(day=1) for day in days})]
