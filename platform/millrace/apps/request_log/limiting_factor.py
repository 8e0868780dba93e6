"""Limiting factors: the limits and budgets that would reject a key's next requests first.

They include those of the key's project, tenant and creator.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from django.conf import settings

from billing.amounts import whole_units
from billing.models import Budget, BudgetPeriod
from billing.models.budgets import current_periods
from inference_worker.contract import valkey
from millrace.apps.request_log.request_budgets import budget_scope
from tenants.limits.token_buckets import WINDOWS, remaining, start_of
from tenants.models import ApiKey, LimitSet

_FIXED = ("max_prompt_tokens", "max_output_tokens")  # per request, so usage does not accumulate
_COUNTED = ("concurrency",)


@dataclass(frozen=True)
class LimitingFactor:
    """A limit or hard budget that applies to a key. Money is in nano-USD."""

    kind: str  # limit or budget
    scope: str  # key, project, tenant or member
    id: int  # of the LimitSet or budget
    name: str  # of the limit or budget
    unit: str  # requests, tokens or money
    period: str  # minute, day, month, lifetime; empty: concurrent, or per request
    model: str  # empty: all models
    limit: int
    left: int | None  # None: unknown, because Valkey cannot be reached
    resets_at: datetime | None = None  # of a budget

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
    names = {
        (row.pk, name): start_of(tenant_id, row.pk) + short
        for row in rows
        for name, _, _, short in WINDOWS
        if getattr(row, name) is not None
    }
    held = _held(names, {row.pk: start_of(tenant_id, row.pk) + "c" for row in rows if row.concurrency is not None})
    return [(row, list(_bounds(row, held))) for row in rows]


def _bounds(row: LimitSet, held: Mapping[tuple[int, str], bytes | int | None] | None) -> Iterable[LimitingFactor]:
    now = time.time_ns() // 1_000_000
    for name, counts, period, _ in WINDOWS:
        limit = getattr(row, name)
        if limit is not None:
            of = held and held.get((row.pk, name))
            left = None if held is None else remaining(of if isinstance(of, bytes) else None, limit, period, now)
            unit = "requests" if counts == "requests" else "tokens"
            yield LimitingFactor(
                "limit", row.scope, row.pk, name, unit, name.rpartition("_per_")[2], row.model, limit, left
            )
    for name in (*_COUNTED, *_FIXED):
        limit = getattr(row, name)
        if limit is not None:
            taken = 0 if name in _FIXED else None if held is None else int(held.get((row.pk, name)) or 0)
            left = None if taken is None else max(0, limit - taken)
            unit = "requests" if name in _COUNTED else "tokens"
            yield LimitingFactor("limit", row.scope, row.pk, name, unit, "", row.model, limit, left)


def _held(
    buckets: Mapping[tuple[int, str], str], places: Mapping[int, str]
) -> dict[tuple[int, str], bytes | int | None] | None:
    """Read buckets and numbers of used concurrency slots from Valkey; None if it cannot be reached."""
    if not buckets and not places:
        return {}
    now = time.time_ns() // 1_000_000
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            pipe = broker.pipeline(transaction=False)
            for name in buckets.values():
                pipe.get(name)
            for name in places.values():
                pipe.zcount(name, now, "+inf")
            answers = pipe.execute()
    except redis.RedisError:
        return None
    return dict(zip([*buckets, *((pk, "concurrency") for pk in places)], answers, strict=True))


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
