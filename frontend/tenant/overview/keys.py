"""View models of the overview's panels of keys and batch jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from billing.metering.usage import UsageReport, accepted, sums
from billing.models import Budget, BudgetPeriod
from billing.pricing.pricing import Tier
from frontend.core.date_ranges import date_range_of
from frontend.core.numbers import Money, common_places, share
from frontend.core.page_context import PageContext
from frontend.tenant.overview.spend import OverviewStatus, budget_statuses, hard_budgets
from frontend.tenant.overview.usage import all_input, by_tier
from millrace.apps.batches.models import Batch
from tenants.models import ApiKey

MAX_KEYS = 5
MAX_BATCHES = 4


@dataclass(frozen=True)
class OverviewKeyRow:
    """A key with its hard budget in money that has the smallest part left."""

    name: str
    prefix: str
    url: str
    tokens: int
    hit: str
    hit_tokens: int
    input_tokens: int
    spend: Money
    used: str
    used_femto: int
    limit_femto: int
    limit: Money | None
    tenant_left: Money | None  # left of the tenant's budget, for a key without a budget
    status: str
    status_kind: Literal["good", "warn", "bad", ""]


@dataclass(frozen=True)
class OverviewKeys:
    rows: tuple[OverviewKeyRow, ...]
    shown: Money
    everything: Money
    part: str
    others: int
    keys_url: str
    new_url: str
    spend_places: int  # decimals of the column


@dataclass(frozen=True)
class BatchRow:
    name: str
    endpoint: str
    ended: int
    total: int
    status: str
    status_kind: Literal["good", "warn", "bad", "info"]


@dataclass(frozen=True)
class Batches:
    """The latest batch jobs. Usage stays when its job is deleted: `used` counts the batch requests of the range."""

    rows: tuple[BatchRow, ...]
    used: int  # accepted requests of deleted jobs; 0 if jobs are listed
    cost: Money


def keys(ctx: PageContext) -> OverviewKeys:
    date_range = date_range_of(ctx)
    rows = sums(UsageReport(ctx.tenant.pk, start=date_range.start, end=date_range.end), group_by=("key",))
    rows.sort(key=lambda row: (-row["cost_femto"], row["key_id"]))
    top = rows[:MAX_KEYS]
    ids = [row["key_id"] for row in top]
    known = ApiKey.objects.for_tenant(ctx.tenant).in_bulk(ids)
    filters = {"unit": BudgetPeriod.Unit.MONEY, "mode": Budget.Mode.HARD, "active": True, "key_id__in": ids}
    budgets = list(Budget.objects.for_tenant(ctx.tenant).filter(**filters)) if ids else []
    tightest = {status.budget.key_id: status for status in reversed(budget_statuses(ctx, budgets))}
    whole = next(iter(hard_budgets(ctx)), None)
    shown = Money(sum(row["cost_femto"] for row in top))
    everything = Money(sum(row["cost_femto"] for row in rows))
    return OverviewKeys(
        tuple(_key(ctx, row, known.get(row["key_id"]), tightest.get(row["key_id"]), whole) for row in top),
        shown,
        everything,
        share(shown.femto, everything.femto),
        len(rows),
        ctx.url("keys"),
        ctx.url("keys-new"),
        common_places(Money(row["cost_femto"]) for row in top),
    )


def _key(
    ctx: PageContext,
    row: Mapping[str, Any],
    key: ApiKey | None,
    budget: OverviewStatus | None,
    whole: OverviewStatus | None,
) -> OverviewKeyRow:
    status, kind = _status(key, whole if whole and whole.is_full else budget)
    return OverviewKeyRow(
        name=key.name if key else f"Key {row['key_id']}, deleted",
        prefix=f"{key.prefix}…" if key else "",
        url=ctx.url("keys-detail", key.pk) if key else "",
        tokens=all_input(row) + row["output"],
        hit=share(row["cache_read"], all_input(row)),
        hit_tokens=row["cache_read"],
        input_tokens=all_input(row),
        spend=Money(row["cost_femto"]),
        used=share(budget.used.femto, budget.limit.femto) if budget else "",
        used_femto=budget.used.femto if budget else 0,
        limit_femto=budget.limit.femto if budget else 0,
        limit=budget.limit if budget else None,
        tenant_left=whole.left if whole and not budget else None,
        status=status,
        status_kind=kind,
    )


def _status(key: ApiKey | None, budget: OverviewStatus | None) -> tuple[str, Literal["good", "warn", "bad", ""]]:
    if key is None or key.revoked_at is not None:
        return "Revoked", ""
    if not key.is_live:
        return "Expired", ""
    if budget is not None and budget.is_full:
        return "Blocked", "bad"
    if budget is not None and budget.used.femto * 10 >= budget.limit.femto * 9:
        return "Near limit", "warn"
    return "Active", "good"


def batches(ctx: PageContext) -> Batches:
    """Return the latest batch jobs; without one, the batch usage in the date range."""
    rows = tuple(_batch(row) for row in Batch.objects.for_tenant(ctx.tenant).order_by("-id")[:MAX_BATCHES])
    if rows:
        return Batches(rows, 0, Money(0))
    date_range = date_range_of(ctx)
    used = [row for row in by_tier(ctx, date_range.start, date_range.end) if row["tier"] == Tier.BATCH]
    return Batches((), sum(accepted(row) for row in used), Money(sum(row["cost_femto"] for row in used)))


def _batch(row: Batch) -> BatchRow:
    kinds: Mapping[str, Literal["good", "warn", "bad", "info"]] = {
        Batch.Status.COMPLETED: "good",
        Batch.Status.FAILED: "bad",
        Batch.Status.EXPIRED: "warn",
        Batch.Status.CANCELLED: "warn",
    }
    ended = row.succeeded + row.errored + row.cancelled + row.expired
    return BatchRow(
        row.name, row.endpoint, ended, row.total, Batch.Status(row.status).label, kinds.get(row.status, "info")
    )
