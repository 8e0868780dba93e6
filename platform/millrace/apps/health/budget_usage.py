"""Usage of budgets, and which tenants are near or at a limit. Health and Tenants show the same ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from billing.budgets.alerts import HARD_IS_FULL_AT
from billing.models.budgets import LIMIT_SQL
from tenants.models import Tenant

NEAR_PERCENT = 80  # the console's meters change their color there
# Budgets with their current period. Rows without a period have no usage. A limit of 0 or less leaves no budget.
_BUDGETS = f"""
SELECT b.tenant_id, b.id, b.name, b.mode, b.unit, b.period, b.increase_expires_at, u.used, r.room,
    b.mode <> 'dry_run' AND u.used::numeric * 100 >= r.room::numeric * %(near)s AS is_near,
    b.mode = 'hard' AND u.used::numeric * 100 >= r.room::numeric * %(full)s AS is_at_limit,
    u.used::numeric / nullif(r.room, 0) AS part
FROM billing_budget b LEFT JOIN billing_budgetperiod w ON w.budget_id = b.id AND w.period_start <= %(now)s
    AND (w.period_end IS NULL OR w.period_end > %(now)s)
CROSS JOIN LATERAL (SELECT coalesce(w.used / 1000000 + w.reserved, 0)::bigint AS used) u
CROSS JOIN LATERAL (SELECT {LIMIT_SQL} AS room) r
WHERE b.active
"""  # noqa: S608  (a constant)
# The highest usage of each tenant first. Dry runs reject nothing and come last.
_HIGHEST = f"""
SELECT * FROM (
    SELECT found.*, row_number() OVER (
        PARTITION BY tenant_id ORDER BY mode = 'dry_run', part DESC NULLS FIRST, id) AS place
    FROM ({_BUDGETS}) found WHERE %(tenant)s::bigint IS NULL OR tenant_id = %(tenant)s
) ranked WHERE place <= %(most)s ORDER BY tenant_id, place
"""  # noqa: S608  (a constant)
_NEAR = f"""
SELECT DISTINCT ON (tenant_id) found.*, count(*) OVER (PARTITION BY tenant_id)
FROM ({_BUDGETS}) found JOIN tenants_tenant t ON t.id = tenant_id AND t.status = %(active)s AND t.purge_after IS NULL
WHERE is_near ORDER BY tenant_id, NOT is_at_limit, part DESC NULLS FIRST, found.id
"""  # noqa: S608  (a constant)


@dataclass(frozen=True)
class BudgetPeriodUsage:
    """A budget with the used amount and the limit of its current period, in its unit. `used` includes reservations."""

    id: int
    name: str
    mode: str
    unit: str
    period: str
    increase_expires_at: datetime | None
    used: int
    limit: int
    is_near: bool  # used to NEAR_PERCENT or more; never a dry run
    is_at_limit: bool  # requests are rejected: a hard budget that is used up

    @property
    def percent(self) -> int | None:
        """The used part of the limit, truncated; None if there is no budget left to use."""
        return self.used * 100 // self.limit if self.limit > 0 else None


@dataclass(frozen=True)
class TenantNearLimit:
    """An active tenant near or at a limit: the budget that is at its limit or else has the highest usage."""

    budget: BudgetPeriodUsage
    budgets: int  # how many of its budgets are near or at their limits


def highest_budgets(now: datetime, tenant_id: int | None = None, most: int = 1) -> dict[int, list[BudgetPeriodUsage]]:
    """Return the budgets of each tenant, highest usage first. Call inside `all_tenants_scope(…)`."""
    found: dict[int, list[BudgetPeriodUsage]] = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_HIGHEST, {**_limits(now), "tenant": tenant_id, "most": most})
        for tenant, *values, _part, _place in cursor.fetchall():
            found[tenant].append(BudgetPeriodUsage(*values))
    return found


def tenants_near_limits(now: datetime) -> dict[int, TenantNearLimit]:
    """Return the active tenants that are near or at a limit. Call inside `all_tenants_scope(…)`.

    A tenant is at a limit if a hard budget is used up, because its requests are rejected. A hard budget rejects what
    does not fit, so it counts as used up from HARD_IS_FULL_AT percent. A soft budget rejects nothing.
    """
    with connection.cursor() as cursor:
        cursor.execute(_NEAR, {**_limits(now), "active": Tenant.Status.ACTIVE})
        return {
            tenant: TenantNearLimit(BudgetPeriodUsage(*values), number)
            for tenant, *values, _part, number in cursor.fetchall()
        }


def _limits(now: datetime) -> dict[str, datetime | int | str | None]:
    return {"now": now, "near": NEAR_PERCENT, "full": HARD_IS_FULL_AT}
