"""View models of the rate limits, with recent rejections."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.core.page_context import PageContext
from frontend.tenant.budgets.page import MAX_BUDGETS, MODES
from frontend.tenant.budgets.scopes import owner_of
from frontend.tenant.keys.key_limits import NAMES
from millrace.apps.request_log.dry_runs import Counted, refused_counts
from tenants.models import LIMITS, LimitSet
from tenants.permissions import Permission


@dataclass(frozen=True)
class LimitLine:
    name: str
    value: int
    refused: int
    dry: int


@dataclass(frozen=True)
class BudgetLimitRow:
    label: str
    model: str
    lines: tuple[LimitLine, ...]
    mode: str
    mode_kind: str
    set_by_operator: bool
    edit_url: str
    remove_url: str


@dataclass(frozen=True)
class BudgetLimits:
    rows: tuple[BudgetLimitRow, ...]
    new_url: str


def limits(ctx: PageContext) -> BudgetLimits:
    """Return all rate limits with the number of requests that each rejected in the last 7 days."""
    counts = {(count.id, count.name): count for count in refused_counts(ctx.tenant.pk) if count.kind == "limit"}
    rows = LimitSet.objects.for_tenant(ctx.tenant).select_related("project", "key")
    writes = ctx.may(Permission.LIMITS_WRITE)
    ordered = sorted(
        rows[:MAX_BUDGETS], key=lambda row: (("account", "project", "key").index(owner_of(row).kind), -row.pk)
    )
    return BudgetLimits(
        tuple(_limits(ctx, row, counts, writes=writes and not row.set_by_operator) for row in ordered),
        ctx.url("budgets-limits-new") if writes else "",
    )


def _limits(ctx: PageContext, row: LimitSet, counts: dict[tuple[int, str], Counted], *, writes: bool) -> BudgetLimitRow:
    lines = []
    for name in LIMITS:
        if (value := getattr(row, name)) is not None:
            count = counts.get((row.pk, name))
            lines.append(LimitLine(NAMES[name], value, count.refused if count else 0, count.dry if count else 0))
    return BudgetLimitRow(
        owner_of(row).label,
        row.model,
        tuple(lines),
        MODES["dry_run" if row.dry_run else "hard"],
        "" if row.dry_run else "info",
        row.set_by_operator,
        ctx.url("budgets-limits-edit", row.pk) if writes else "",
        ctx.url("budgets-limits-remove", row.pk) if writes else "",
    )
