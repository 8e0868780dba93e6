"""The rate limits, with recent rejections."""

from __future__ import annotations

from typing import Any

from frontend.core.page_context import PageContext
from frontend.tenant.budgets.page import MAX_BUDGETS, MODES
from frontend.tenant.budgets.scopes import owner_of
from frontend.tenant.keys.key_limits import NAMES
from millrace.apps.policy_results.dry_runs import refused_counts
from tenants.models import LIMITS, LimitSet


def limits(ctx: PageContext) -> list[dict[str, Any]]:
    """Return all rate limits with the number of requests that each rejected in the last 7 days."""
    counts = {(count.id, count.name): count for count in refused_counts(ctx.tenant.pk) if count.kind == "limit"}
    rows = LimitSet.objects.for_tenant(ctx.tenant).select_related("project", "key")
    ordered = sorted(
        rows[:MAX_BUDGETS], key=lambda row: (("account", "project", "key").index(owner_of(row).kind), -row.pk)
    )
    return [
        {
            "set": row,
            "label": owner_of(row).label,
            "mode": MODES["dry_run" if row.dry_run else "hard"],
            "lines": [
                (NAMES[name], value, counts.get((row.pk, name)))
                for name in LIMITS
                if (value := getattr(row, name)) is not None
            ],
        }
        for row in ordered
    ]
