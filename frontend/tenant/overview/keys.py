"""The overview's panels of keys and batch jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext as _

from billing.metering.usage import UsageReport, count_accepted, sums
from billing.models import Budget, BudgetPeriod
from billing.rates.pricing import Tier
from frontend.core.date_ranges import date_range_of
from frontend.core.numbers import Money, common_places, share
from frontend.core.page_context import PageContext
from frontend.tenant.batches.page import KINDS
from frontend.tenant.budgets.page import BudgetUsage
from frontend.tenant.overview.spend import budget_statuses, hard_budgets
from frontend.tenant.overview.usage import all_input, by_tier
from inference_worker.contract.request import PROMPT_CLASSES
from millrace.apps.batches.models import Batch
from tenants.models import ApiKey

MAX_KEYS = 5
MAX_BATCHES = 4
MANY_KEYS = 200  # the sums of more keys are loaded after the page
_KEY_SUMS = ("cost_femto", "output", *PROMPT_CLASSES)


def has_many_keys(ctx: PageContext) -> bool:
    """Return whether the tenant has more than MANY_KEYS keys, including revoked ones."""
    with ctx.scope():
        return bool(ApiKey.objects.for_tenant(ctx.tenant).order_by()[MANY_KEYS : MANY_KEYS + 1].exists())


def keys(ctx: PageContext) -> dict[str, Any]:
    date_range = date_range_of(ctx)
    question = UsageReport(ctx.tenant.pk, start=date_range.start, end=date_range.end)
    rows = sums(question, group_by=("key",), summed=("cost_femto",))
    rows.sort(key=lambda row: (-row["cost_femto"], row["key_id"]))
    ids = [row["key_id"] for row in rows[:MAX_KEYS]]
    top = sums(replace(question, key_ids=tuple(ids)), group_by=("key",), summed=_KEY_SUMS) if ids else []
    top.sort(key=lambda row: ids.index(row["key_id"]))
    known = ApiKey.objects.for_tenant(ctx.tenant).in_bulk(ids)
    filters = {"unit": BudgetPeriod.Unit.MONEY, "mode": Budget.Mode.HARD, "active": True, "key_id__in": ids}
    budgets = list(Budget.objects.for_tenant(ctx.tenant).filter(**filters)) if ids else []
    tightest = {status.budget.key_id: status for status in reversed(budget_statuses(ctx, budgets))}
    whole = next(iter(hard_budgets(ctx)), None)
    shown, everything = (sum(row["cost_femto"] for row in found) for found in (top, rows))
    return {
        "rows": [_key(row, known.get(row["key_id"]), tightest.get(row["key_id"]), whole) for row in top],
        "shown": Money(shown),
        "everything": Money(everything),
        "part": share(shown, everything),
        "others": len(rows),
        "spend_places": common_places(Money(row["cost_femto"]) for row in top),
    }


def _key(
    row: Mapping[str, Any], key: ApiKey | None, budget: BudgetUsage | None, whole: BudgetUsage | None
) -> dict[str, Any]:
    """Return a key with its hard budget in money that has the smallest part left."""
    status, kind = _status(key, whole if whole and whole.is_full else budget)
    return {
        "key": key,
        "usage": row,
        "tokens": all_input(row) + row["output"],
        "hit": share(row["cache_read"], all_input(row)),
        "input_tokens": all_input(row),
        "budget": budget,
        "used": share(budget.used.millionths, budget.limit.millionths) if budget else "",
        "tenant_left": whole.left if whole and not budget else None,
        "status": status,
        "status_kind": kind,
    }


def _status(key: ApiKey | None, budget: BudgetUsage | None) -> tuple[str, str]:
    if key is None or key.revoked_at is not None:
        return _("Revoked"), ""
    if not key.is_live:
        return _("Expired"), ""
    if budget is not None and budget.is_full:
        return _("Blocked"), "bad"
    if budget is not None and budget.used.millionths * 10 >= budget.limit.millionths * 9:
        return _("Near limit"), "warn"
    return _("Active"), "good"


def batches(ctx: PageContext) -> dict[str, Any]:
    """Return the latest batch jobs; without one, the batch usage in the date range.

    Usage stays when its job is deleted: `used` counts the accepted requests of deleted jobs.
    """
    rows = [(row, _count_ended(row), KINDS.get(row.status, "info")) for row in _find_batches(ctx)]
    if rows:
        return {"rows": rows}
    date_range = date_range_of(ctx)
    used = [row for row in by_tier(ctx, date_range.start, date_range.end) if row["tier"] == Tier.BATCH]
    cost = sum(row["cost_femto"] for row in used)
    return {"rows": (), "used": sum(count_accepted(row) for row in used), "cost": Money(cost)}


def _find_batches(ctx: PageContext) -> Iterable[Batch]:
    found: Iterable[Batch] = (
        Batch.objects.for_tenant(ctx.tenant).filter(is_internal=False).order_by("-id")[:MAX_BATCHES]
    )
    return found


def _count_ended(row: Batch) -> int:
    return row.succeeded + row.errored + row.cancelled + row.expired
