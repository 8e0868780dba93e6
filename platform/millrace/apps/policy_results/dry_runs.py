"""Dry runs: the number of recent requests that a proposed budget or limit would have rejected.

This is an estimate from settled usage. Rejected requests are not included. A request counts with its usage, not with
its reservation, and clients are assumed not to react. The counts of limits and budgets with `dry_run` are exact; see
`refused_counts`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import redis
from django.conf import settings
from django.core.exceptions import EmptyResultSet
from django.db import connection
from django.db.models import F, QuerySet, Sum, Value

from billing.currencies.amounts import FEMTO_A_NANO
from billing.metering.usage import UsageReport, sums, total
from billing.models import Budget, BudgetPeriod, UsageEvent, UsageRollup, token_sum
from billing.periods import billing_zone
from inference_worker.contract import valkey
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES
from tenants.models import ApiKey

DAYS = 7
MAX_REQUESTS = 100_000  # evaluated, from the start of the period
MAX_MIXED_CHUNKS = 20  # read one by one; after them, all requests are
_CHUNK = timedelta(minutes=15)
_CHUNKS = """
SELECT date_bin('15 minutes', admitted_at, '1970-01-01 00:00:00+00') AS start, count(*), sum(cost), min(cost)
FROM ({}) r GROUP BY 1 ORDER BY 1
"""
_PERIODS = {"minute": 60.0, "day": 86_400.0}


@dataclass(frozen=True)
class DryRunResult:
    """The number of rejected requests among `requests`. `complete`: all requests of the period were evaluated."""

    requests: int
    refused: int
    complete: bool


@dataclass(frozen=True)
class DryRunScope:
    """The requests of a dry run: all of a tenant, or only those of a project, key, member or model."""

    tenant_id: int
    project_id: int | None = None
    key_id: int | None = None
    member_id: int | None = None  # the user who created the keys
    model: str | None = None

    def events(self, start: datetime, end: datetime) -> QuerySet[UsageEvent]:
        """Return the billed usage events of the period."""
        rows = UsageEvent.objects.for_tenant(self.tenant_id).filter(admitted_at__gte=start, admitted_at__lt=end)
        for name in ("project_id", "key_id", "model"):
            if (value := getattr(self, name)) is not None:
                rows = rows.filter(**{name: value})
        if self.member_id is not None:
            rows = rows.filter(key_id__in=self._members_keys())
        return rows.exclude(outcome="failed")

    def hours(self, start: datetime, end: datetime) -> QuerySet[UsageRollup]:
        """Return the hourly sums of the period, without the usage of the last minutes, which is not summed yet."""
        rows = UsageRollup.objects.for_tenant(self.tenant_id).filter(
            bucket=UsageRollup.Bucket.HOUR, start__gte=start, start__lt=end
        )
        for name in ("project_id", "key_id", "model"):
            if (value := getattr(self, name)) is not None:
                rows = rows.filter(**{name: value})
        return rows if self.member_id is None else rows.filter(key_id__in=self._members_keys())

    def used_before(self, unit: str, start: datetime, end: datetime) -> int:
        """Return the usage of the period in the unit (money: femto-USD)."""
        if start >= end:
            return 0
        if self.member_id is not None:
            keys = self._members_keys()
            return sum(DryRunScope(self.tenant_id, key_id=key).used_before(unit, start, end) for key in keys)
        report = UsageReport(self.tenant_id, start, end, self.model, self.key_id, self.project_id)
        found = total(sums(report))
        if unit == "money":
            return found["cost_femto"]
        if unit == "requests":
            return found["completed"] + found["cancelled"]
        return sum(found[name] for name in TOKEN_CLASSES)

    def _members_keys(self) -> list[int]:
        keys = ApiKey.objects.for_tenant(self.tenant_id).filter(created_by_id=self.member_id)
        return list(keys.values_list("pk", flat=True)[:1000])


def budget_would_refuse(
    scope: DryRunScope, unit: str, period: str, amount: int, *, days: int = DAYS, now: datetime | None = None
) -> DryRunResult:
    """Return the result of a hard budget of `amount` (nano-USD, tokens or requests) per period.

    The first period includes its usage before the start. Lifetime budgets count from the start. Only the requests of
    chunks in which some fit and some do not are read one by one: periods begin at quarters of an hour.
    """
    end = now or datetime.now(UTC)
    start, zone = end - timedelta(days=days), billing_zone(scope.tenant_id)
    most = amount * FEMTO_A_NANO if unit == "money" else amount
    window = period_start(period, start, zone)
    used = 0 if period == Budget.Period.LIFETIME else scope.used_before(unit, window, start)
    cost = {"money": F("cost_femto"), "tokens": token_sum()}.get(unit, Value(1))

    def events(since: datetime, until: datetime) -> QuerySet[UsageEvent, tuple[datetime, Any]]:
        rows = scope.events(since, until).order_by("admitted_at", "request_id", "execution")
        return rows.annotate(cost=cost).values_list("admitted_at", "cost")

    chunks = _chunks(events(start, end)[: MAX_REQUESTS + 1])
    requests = sum(chunk.requests for chunk in chunks)
    complete = requests <= MAX_REQUESTS
    refused = mixed = 0
    for chunk in chunks:
        if (begun := period_start(period, chunk.start, zone)) != window:
            window, used = begun, 0
        is_cut = not complete and chunk is chunks[-1]  # has one request that is not evaluated
        if not is_cut and used + chunk.cost <= most:
            used += chunk.cost
        elif not is_cut and used + chunk.least > most:
            refused += chunk.requests
        elif mixed == MAX_MIXED_CHUNKS:
            left = MAX_REQUESTS - sum(each.requests for each in chunks if each.start < chunk.start)
            for at, needed in events(max(start, chunk.start), end)[:left]:
                if (begun := period_start(period, at, zone)) != window:
                    window, used = begun, 0
                fits = used + int(needed) <= most
                used, refused = (used + int(needed), refused) if fits else (used, refused + 1)
            break
        else:
            mixed += 1
            rows = events(max(start, chunk.start), min(end, chunk.start + _CHUNK))
            for _at, needed in rows[: chunk.requests - is_cut]:
                fits = used + int(needed) <= most
                used, refused = (used + int(needed), refused) if fits else (used, refused + 1)
    return DryRunResult(min(requests, MAX_REQUESTS), refused, complete)


@dataclass(frozen=True)
class _Chunk:
    """The requests of a quarter of an hour, with their cost together and the least cost of one."""

    start: datetime
    requests: int
    cost: int
    least: int


def _chunks(rows: QuerySet[UsageEvent, tuple[datetime, Any]]) -> list[_Chunk]:
    try:
        statement, params = rows.query.sql_with_params()
    except EmptyResultSet:  # a member without keys
        return []
    with connection.cursor() as cursor:
        cursor.execute(_CHUNKS.format(statement), params)
        return [_Chunk(at, count, int(cost), int(least)) for at, count, cost, least in cursor.fetchall()]


def limits_would_refuse(
    scope: DryRunScope, limits: Mapping[str, int], *, days: int = DAYS, now: datetime | None = None
) -> dict[str, DryRunResult]:
    """Return the result of each limit by itself. Names are those of LimitSet.

    Raises:
        KeyError: a limit is unknown or cannot be simulated.
    """
    end = now or datetime.now(UTC)
    tries = {name: _Try(name, limit) for name, limit in limits.items() if limit is not None}
    prompt = token_sum(PROMPT_CLASSES)
    rows = scope.events(end - timedelta(days=days), end).order_by("admitted_at", "request_id", "execution")
    seen, complete = 0, True
    columns = ("admitted_at", "prompt", "output", "duration_us", "cache_read")
    for at, *counts in rows.annotate(prompt=prompt).values_list(*columns)[: MAX_REQUESTS + 1]:
        if seen == MAX_REQUESTS:
            complete = False
            break
        seen += 1
        moment = at.timestamp()
        for simulation in tries.values():
            simulation.take(moment, *counts)
    return {name: DryRunResult(seen, simulation.refused, complete) for name, simulation in tries.items()}


class _Try:
    """The simulation of a limit."""

    def __init__(self, name: str, limit: int) -> None:
        self.refused = 0
        self._limit = limit
        self._level, self._at = 0.0, 0.0  # amount in a token bucket, and the time at which it was computed
        self._ends: list[float] = []  # times at which running requests end
        self._counts, _, period = name.partition("_per_")
        if self._counts in ("requests", "tokens", "input_tokens", "output_tokens"):
            self._seconds = _PERIODS[period]
        elif name not in ("concurrency", "max_prompt_tokens", "max_output_tokens"):
            raise KeyError(name)

    def take(self, at: float, prompt: int, output: int, duration_us: int, cached: int) -> None:
        needed = {
            "requests": 1,
            "tokens": prompt - cached + output,
            "input_tokens": prompt - cached,
            "output_tokens": output,
            "max_prompt_tokens": prompt,
            "max_output_tokens": output,
        }
        if self._counts == "concurrency":
            while self._ends and self._ends[0] <= at:
                heapq.heappop(self._ends)
            if len(self._ends) < self._limit:
                heapq.heappush(self._ends, at + duration_us / 1e6)
                return
        elif self._counts.startswith("max_"):
            if needed[self._counts] <= self._limit:
                return
        else:
            drained = max(0.0, self._level - (at - self._at) * self._limit / self._seconds)
            self._level, self._at = drained, at
            if drained + needed[self._counts] <= self._limit:
                self._level += needed[self._counts]
                return
        self.refused += 1


@dataclass(frozen=True)
class Counted:
    """The rejections of a limit, or the would-be rejections of a dry run."""

    kind: str  # limit or budget
    id: int  # ID of the LimitSet or budget
    name: str  # name of the limit; empty for a budget
    refused: int
    dry: int


def refused_counts(tenant_id: int, *, days: int = DAYS, now: datetime | None = None) -> list[Counted]:
    """Return the counts of limits and dry-run budgets, of today and the previous days (UTC)."""
    end = now or datetime.now(UTC)
    counts: dict[tuple[int, str], list[int]] = {}
    for text, number in _counters(tenant_id, end, days):
        why, _, name = text.partition(":")
        set_id, _, limit = name.partition(":")
        counts.setdefault((int(set_id), limit), [0, 0])[why == "dry"] += number
    results = [Counted("limit", pk, name, *both) for (pk, name), both in sorted(counts.items())]
    since = BudgetPeriod.objects.for_tenant(tenant_id).filter(
        period_start__gte=end - timedelta(days=days), rejected__gt=0
    )
    budgets = since.order_by("budget_id").values_list("budget_id").annotate(count=Sum("rejected"))
    return results + [Counted("budget", pk, "", 0, count) for pk, count in budgets]


def _counters(tenant_id: int, end: datetime, days: int) -> Iterator[tuple[str, int]]:
    """Yield the counters of rejections in Valkey; none if Valkey cannot be reached."""
    names = [f"millrace:limit_counters:{{{tenant_id}}}:{end - timedelta(days=day):%Y%m%d}" for day in range(days + 1)]
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            pipe = broker.pipeline(transaction=False)
            for name in names:
                pipe.hgetall(name)
            replies: list[dict[bytes, Any]] = pipe.execute()
    except redis.RedisError:
        return
    for fields in replies:
        for field, number in fields.items():
            yield field.decode(), int(number)


def period_start(period: str, at: datetime, zone: ZoneInfo) -> datetime:
    """Return the start of the period that contains the time."""
    if period == Budget.Period.LIFETIME:
        return datetime(1970, 1, 1, tzinfo=UTC)
    local = at.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    return (local.replace(day=1) if period == Budget.Period.MONTH else local).astimezone(UTC)
