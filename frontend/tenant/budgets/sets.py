"""The sets of rate limits, with what each refused lately."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.core.page_context import PageContext
from frontend.tenant.budgets.page import MODES, MOST
from frontend.tenant.budgets.scopes import whose
from frontend.tenant.keys.bounds import NAMES
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


def limits(visit: PageContext) -> BudgetLimits:
    """Every set of rate limits, with what each refused in the last seven days."""
    counts = {(one.id, one.name): one for one in refused_counts(visit.tenant.pk) if one.kind == "limit"}
    rows = LimitSet.objects.for_tenant(visit.tenant).select_related("project", "key")
    writes = visit.may(Permission.LIMITS_WRITE)
    ordered = sorted(rows[:MOST], key=lambda row: (("account", "project", "key").index(whose(row).kind), -row.pk))
    return BudgetLimits(
        tuple(_limits(visit, row, counts, writes=writes and not row.set_by_operator) for row in ordered),
        visit.url("budgets-limits-new") if writes else "",
    )


def _limits(
    visit: PageContext, row: LimitSet, counts: dict[tuple[int, str], Counted], *, writes: bool
) -> BudgetLimitRow:
    lines = []
    for name in LIMITS:
        if (value := getattr(row, name)) is not None:
            count = counts.get((row.pk, name))
            lines.append(LimitLine(NAMES[name], value, count.refused if count else 0, count.dry if count else 0))
    return BudgetLimitRow(
        whose(row).label,
        row.model,
        tuple(lines),
        MODES["dry_run" if row.dry_run else "hard"],
        "" if row.dry_run else "info",
        row.set_by_operator,
        visit.url("budgets-limits-edit", row.pk) if writes else "",
        visit.url("budgets-limits-remove", row.pk) if writes else "",
    )
