"""The generated usage of the demo tenants: events as a worker reports them, the same in every run.

Each day of each tenant has its own random seed. A later run generates the same days again, and new ones.
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

import msgspec

from billing.rates.pricing import Component, PriceIndex, Tier, reservation_nano
from inference_worker.contract.messages import BillingContext, ExecutionUsage
from inference_worker.contract.request import TokenCounts
from millrace.demo.seeding import DemoModels, DemoTenant
from millrace.demo.tenants import DemoWorkload, KeySpec

DAYS = 61  # days of history before a tenant was created
LEARNING_DAYS = 75  # days in which a tenant learns to use the prefix cache
BLOCK = 32  # tokens, as the engine caches them
END_USERS = 24  # end users of a tenant
PREFIX = "demo_"  # prefix of request IDs
MAX_PROMPT_TOKENS = 7000
_HOURS = (2, 1, 1, 1, 1, 2, 4, 8, 14, 18, 19, 18, 16, 18, 19, 18, 16, 13, 10, 8, 7, 6, 5, 3)  # weights, UTC
_WEEK = (1.15, 1.2, 1.2, 1.15, 1.0, 0.45, 0.4)  # from Monday
_HOUR_SUMS = tuple(accumulate(_HOURS))
_MISSES = ("first_use", "prefix_changed", "expired_or_evicted")


@dataclass(frozen=True)
class DemoUsage:
    """A request, and what it would reserve from budgets."""

    key: str
    work: DemoWorkload
    event: ExecutionUsage
    need: dict[str, int]  # by unit


@dataclass(frozen=True)
class DemoPeriod:
    """The days of the history, and the amount of usage in them."""

    days: int
    events: int  # number of events of a tenant with volume 1 in DAYS days
    now: datetime

    def first_day(self, demo_tenant: DemoTenant) -> date:
        """Return the first day. It depends on the tenant's creation, so that later runs begin on the same day."""
        return demo_tenant.tenant.created_at.astimezone(UTC).date() - timedelta(days=self.days)

    def all_days(self, demo_tenant: DemoTenant) -> Iterator[date]:
        day, last = self.first_day(demo_tenant), self.now.astimezone(UTC).date()
        while day <= last:
            yield day
            day += timedelta(days=1)


def uses(
    demo_tenant: DemoTenant, day: date, period: DemoPeriod, models: DemoModels, prices: PriceIndex
) -> list[DemoUsage]:
    """Return the requests of one day until now, in the order of their admission."""
    keys = [key for key in demo_tenant.spec.keys if key.work and models.find_model(key.work.model)]
    if not keys:
        return []
    draw = random.Random(f"{demo_tenant.spec.slug} {day}")  # noqa: S311  (not used for secrets)
    started_on = demo_tenant.tenant.created_at.astimezone(UTC).date() - timedelta(days=DAYS)
    age = min(1.0, max(0.0, (day - started_on).days / LEARNING_DAYS))
    level = (0.7 + 0.6 * age) * _WEEK[day.weekday()] * draw.uniform(0.85, 1.15)
    number = round(period.events / DAYS * demo_tenant.spec.volume * level + draw.random() * 0.5)
    shares = list(accumulate(key.work.share for key in keys if key.work))
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000
    end = int(period.now.timestamp() * 1_000_000) - 60_000_000
    found = []
    for place in range(number):
        key = keys[bisect_right(shares, draw.random() * shares[-1])]
        hour = bisect_right(_HOUR_SUMS, draw.random() * _HOUR_SUMS[-1])
        admitted_at = midnight + hour * 3_600_000_000 + draw.randrange(3_600_000_000)
        use = _use(demo_tenant, key, admitted_at, f"{day} {place}", age, draw, models, prices)
        if use is not None and admitted_at <= end:
            found.append(use)
    found.sort(key=lambda use: use.event.billing_context.admitted_at)
    return found


def _use(
    demo_tenant: DemoTenant,
    key: KeySpec,
    admitted_at: int,
    name: str,
    age: float,
    draw: random.Random,
    models: DemoModels,
    prices: PriceIndex,
) -> DemoUsage | None:
    work = key.work
    model = None if work is None else models.find_model(work.model)
    if work is None or model is None:
        return None
    usage, miss_reason = _tokens(work, age, draw)
    max_tokens = max(BLOCK, math.ceil(usage.output / 128) * 128) if work.output else 0
    outcome, reason = _end(usage.output == max_tokens, draw)
    if outcome == "cancelled":
        usage = _cut(usage, draw.random())
    row, project = demo_tenant.keys[key.name], demo_tenant.projects[key.project]
    rate_card = prices.find(demo_tenant.tenant.pk, model, work.tier, admitted_at)
    if rate_card is None:
        return None
    writes_5m, writes_1h = work.writes == Component.CACHE_WRITE_5M, work.writes == Component.CACHE_WRITE_1H
    ttft = int(35_000 + 240 * usage.uncached + draw.expovariate(1 / 30_000))
    digest = hashlib.blake2b(f"{demo_tenant.spec.slug} {name}".encode(), digest_size=13).hexdigest()
    billing_context = BillingContext(
        admitted_at=admitted_at,
        request_id=PREFIX + digest,
        execution=0,
        tenant_id=demo_tenant.tenant.pk,
        project_id=project.pk,
        key_id=row.pk,
        model=model,
        price_version=rate_card.version,
        end_user=_end_user(digest) if work.output and work.tier != Tier.BATCH else "",
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
    hold = reservation_nano(rate_card, usage.prompt, max_tokens, admitted_at, writes_5m=writes_5m, writes_1h=writes_1h)
    return DemoUsage(key.name, work, event, {"money": hold, "tokens": usage.prompt + max_tokens, "requests": 1})


def _end_user(digest: str) -> str:
    """Return the end user of a request, of whom some send many requests and others few."""
    place = int(digest[-4:], 16) / 0x10000
    return f"user-{1 + int(place**2 * END_USERS):02}"


def _tokens(work: DemoWorkload, age: float, draw: random.Random) -> tuple[TokenCounts, str]:
    """Return the usage and the reason of a cache miss, if any."""
    prompt = min(MAX_PROMPT_TOKENS, max(8, int(work.prompt * math.exp(draw.gauss(0, 0.5)))))
    output = min(2000, max(1, int(work.output * math.exp(draw.gauss(0, 0.6))))) if work.output else 0
    blocks = prompt // BLOCK
    if not blocks:
        return TokenCounts(uncached=prompt, output=output), "too_short"
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
    return TokenCounts(**rest), "" if whole else draw.choice(_MISSES) if read else "first_use"


def _end(at_length: bool, draw: random.Random) -> tuple[str, str]:
    """Return the outcome and the finish reason."""
    number = draw.random()
    if number < 0.012:
        return "failed", "error"
    if number < 0.032:
        return "cancelled", "cancelled"
    return "completed", "length" if at_length else "stop"


def _cut(usage: TokenCounts, part: float) -> TokenCounts:
    return msgspec.structs.replace(usage, output=int(usage.output * part))


def months(days: Sequence[date]) -> list[datetime]:
    """Return a time in each month of the days."""
    return [datetime(day.year, day.month, 15, tzinfo=UTC) for day in sorted({day.replace(day=1) for day in days})]
