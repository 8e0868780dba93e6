"""Limiting factors: the limits and budgets that would reject a key's next requests first.

They include those of the key's project, tenant and creator.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import redis
from django.conf import settings

from billing.currencies.amounts import whole_units
from billing.models import Budget, BudgetPeriod
from billing.models.budgets import current_periods
from inference_worker.contract import valkey
from millrace.apps.request_log.request_budgets import budget_scope
from tenants.limits.token_buckets import WINDOWS, buckets_key, compute_remaining, start_of
from tenants.models import ApiKey, LimitSet

_FIXED = ("max_prompt_tokens", "max_output_tokens")  # per request, so usage does not accumulate
_COUNTED = ("concurrency",)


@dataclass(frozen=True)
class LimitingFactor:
    """A limit or hard budget that applies to a key. Money is in nano-USD."""

    kind: str  # limit or budget
    scope: str  # key, project, tenant or member
    id: int  # ID of the LimitSet or budget
    name: str  # name of the limit or budget
    unit: str  # requests, tokens or money
    period: str  # minute, day, month, lifetime; empty: concurrent, or per request
    model: str  # empty: all models
    limit: int
    left: int | None  # None: unknown, because Valkey cannot be reached
    resets_at: datetime | None = None  # end of a budget's period

    @property
    def per_mille(self) -> int:
        """The amount left, in thousandths of the limit."""
        return 1000 if self.left is None or not self.limit else self.left * 1000 // self.limit


def binding(tenant_id: int, keys: Iterable[ApiKey]) -> dict[int, tuple[LimitingFactor, ...]]:
    """Return the limiting factors of each key by key ID, least left first.

    The tenant's scope must be open. The number of queries does not depend on the number of keys.
    """
    keys = list(keys)
    limits, budgets = _limits(tenant_id), _budgets(tenant_id)
    found = {}
    for key in keys:
        holds = [bound for row, bounds in limits if _applies(row, key) for bound in bounds]
        holds += [bound for row, bound in budgets if _applies(row, key)]
        found[key.pk] = tuple(sorted(holds, key=lambda bound: (bound.per_mille, bound.limit)))
    return found


def _applies(row: LimitSet | Budget, key: ApiKey) -> bool:
    member = row.member_id if isinstance(row, Budget) else None
    return (
        row.key_id in (None, key.pk)
        and row.project_id in (None, key.project_id)
        and member in (None, key.created_by_id)
    )


def _limits(tenant_id: int) -> list[tuple[LimitSet, list[LimitingFactor]]]:
    rows = list(LimitSet.objects.for_tenant(tenant_id).filter(dry_run=False).order_by("pk"))
    buckets = {row.pk: buckets_key(tenant_id, row.pk) for row in rows}
    slots = {row.pk: start_of(tenant_id, row.pk) + "c" for row in rows if row.concurrency is not None}
    held = _read_held(buckets, slots)
    return [(row, list(_bounds(row, held))) for row in rows]


def _bounds(row: LimitSet, held: _Held | None) -> Iterable[LimitingFactor]:
    now = time.time_ns() // 1_000_000
    for name, counts, _ in WINDOWS:
        limit = getattr(row, name)
        if limit is not None:
            left = None if held is None else compute_remaining(held.buckets.get(row.pk), name, limit, now)
            unit = "requests" if counts == "requests" else "tokens"
            yield LimitingFactor(
                "limit", row.scope, row.pk, name, unit, name.rpartition("_per_")[2], row.model, limit, left
            )
    for name in (*_COUNTED, *_FIXED):
        limit = getattr(row, name)
        if limit is not None:
            taken = 0 if name in _FIXED else None if held is None else held.slots.get(row.pk, 0)
            left = None if taken is None else max(0, limit - taken)
            unit = "requests" if name in _COUNTED else "tokens"
            yield LimitingFactor("limit", row.scope, row.pk, name, unit, "", row.model, limit, left)


class _Held(NamedTuple):
    """The state of limit sets in Valkey, by their IDs."""

    buckets: dict[int, bytes | None]
    slots: dict[int, int]  # number of used concurrency slots


def _read_held(buckets: Mapping[int, str], slots: Mapping[int, str]) -> _Held | None:
    """Read the keys of buckets and slots from Valkey; None if it cannot be reached."""
    if not buckets:
        return _Held({}, {})
    now = time.time_ns() // 1_000_000
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            pipe = broker.pipeline(transaction=False)
            pipe.mget(list(buckets.values()))
            for key in slots.values():
                pipe.zcount(key, now, "+inf")
            stored, *counts = pipe.execute()
    except redis.RedisError:
        return None
    return _Held(dict(zip(buckets, stored, strict=True)), dict(zip(slots, counts, strict=True)))


def _budgets(tenant_id: int) -> list[tuple[Budget, LimitingFactor]]:
    now = datetime.now(UTC)
    rows = list(Budget.objects.for_tenant(tenant_id).filter(active=True, mode=Budget.Mode.HARD).order_by("pk"))
    budget_periods = current_periods(tenant_id, rows, now)
    return [(row, _of_budget(row, budget_periods.get(row.pk), now)) for row in rows]


def _of_budget(row: Budget, budget_period: BudgetPeriod | None, now: datetime) -> LimitingFactor:
    limit = row.limit_in(budget_period, now)
    used = whole_units(int(budget_period.used)) + budget_period.reserved if budget_period else 0
    return LimitingFactor(
        "budget",
        budget_scope(row),
        row.pk,
        row.name,
        row.unit,
        row.period,
        "",
        limit,
        max(0, limit - used),
        budget_period.period_end if budget_period else None,
    )
