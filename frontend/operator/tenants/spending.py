"""Spend, cost and budget usage of tenants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import F, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce

from billing.models import TOKEN_CLASSES, RollupState, UsageChange, UsageRollup
from frontend.core import gauges
from frontend.core.numbers import Money, compact, exact, share
from millrace.apps.operations.costs import costs
from millrace.apps.operations.models import MachineCost

COSTED_OVER = timedelta(days=1)  # the period of the cost per 1M tokens
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = ("tenant_id", "model", "cost", "requests", "tokens")
# Budgets with their current period, highest usage of each tenant first. Dry runs reject nothing and come last.
_BUDGETS = """
SELECT * FROM (
    SELECT b.tenant_id, b.id, b.name, b.mode, b.unit, b.period, b.increase_expires_at, u.used, r.room,
        row_number() OVER (PARTITION BY b.tenant_id
            ORDER BY b.mode = 'dry_run', u.used::numeric / nullif(r.room, 0) DESC NULLS FIRST, b.id) AS place
    FROM billing_budget b LEFT JOIN billing_budgetperiod w ON w.budget_id = b.id AND w.period_start <= %(now)s
        AND (w.period_end IS NULL OR w.period_end > %(now)s)
    CROSS JOIN LATERAL (SELECT coalesce(w.used / 1000000 + w.reserved, 0)::bigint AS used) u
    CROSS JOIN LATERAL (SELECT b.amount + coalesce(w.rolled_over, 0)
        + CASE WHEN b.increase_expires_at > %(now)s THEN b.temporary_increase ELSE 0 END AS room) r
    WHERE b.active AND (%(tenant)s::bigint IS NULL OR b.tenant_id = %(tenant)s)
) found WHERE place <= %(most)s ORDER BY tenant_id, place
"""


@dataclass
class Spent:
    """The usage of one tenant since a midnight in UTC."""

    femto: int = 0
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by model

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens.values())


@dataclass(frozen=True)
class Room:
    """A budget with its used amount, in its unit."""

    id: int
    name: str
    mode: str
    unit: str
    period: str
    increase_expires_at: datetime | None
    used: int
    room: int

    @property
    def is_near(self) -> bool:
        return self.mode != "dry_run" and (self.room <= 0 or gauges.level(self.used, self.room) != "")

    @property
    def share(self) -> str:
        return share(self.used, self.room) if self.room > 0 else "no budget left"

    @property
    def per_mille(self) -> int:
        return self.used * 1000 // self.room if self.room > 0 else 10**6

    @property
    def of(self) -> str:
        return f"{amount(self.room, self.unit)} {PERIODS[self.period]}"

    @property
    def used_text(self) -> str:
        return amount(self.used, self.unit)


PERIODS = {"day": "per day", "month": "per month", "lifetime": "in total"}


def amount(value: int, unit: str) -> str:
    """Return an amount of a budget's unit."""
    if unit == "money":
        return Money.nano(value).text
    return f"{exact(value) if value < 10_000 else compact(value)} {unit}"


def spent(since: datetime) -> dict[int, Spent]:
    """Return the usage of each tenant since a midnight, in one statement. Call inside `system(…)`."""
    late = Q(settled_at__gte=Coalesce(Subquery(RollupState.objects.values("settled_before")[:1]), _EARLIEST))
    rolled = UsageRollup.objects.all_tenants().filter(bucket=UsageRollup.Bucket.DAY, start__gte=since)
    fresh = UsageChange.objects.all_tenants().filter(late, admitted_at__gte=since)
    found: dict[int, Spent] = defaultdict(Spent)
    for tenant, model, cost, requests, tokens in _summed(rolled).union(_summed(fresh), all=True):
        total = found[tenant]
        total.femto += int(cost)
        total.requests += int(requests)
        total.tokens[model] += int(tokens)
    return found


def _summed(rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    tokens = sum((F(name) for name in TOKEN_CLASSES[1:]), F(TOKEN_CLASSES[0]))
    executions = F("completed") + F("cancelled") + F("failed")
    grouped = rows.order_by().values("tenant_id", "model")
    totals = grouped.annotate(cost=Sum("cost_femto"), requests=Sum(executions), tokens=Sum(tokens))
    found: QuerySet[Any, Any] = totals.values_list(*_COLUMNS)
    return found


def token_costs(now: datetime) -> Mapping[str, int]:
    """Return the recent cost of 1M tokens of each model in femto-USD, where known. Call inside `system(…)`."""
    if not MachineCost.objects.exists():
        return {}
    found = costs(now - COSTED_OVER, now)
    return {budget.model: budget.cost_per_million for budget in found if budget.cost_per_million is not None}


def margin(used: Spent, rates: Mapping[str, int]) -> Money | None:
    """Return the spend minus the machine costs; None if the cost of a model is unknown."""
    if not rates or any(tokens and model not in rates for model, tokens in used.tokens.items()):
        return None
    machines = sum(tokens * rates[model] // 10**6 for model, tokens in used.tokens.items() if tokens)
    return Money(used.femto - machines)


def margins(found: Iterable[Money | None]) -> Money | None:
    """Return the sum of the known margins."""
    known = [budget for budget in found if budget is not None]
    return Money(sum(budget.femto for budget in known)) if known else None


def budgets(now: datetime, tenant_id: int | None = None, most: int = 1) -> dict[int, list[Room]]:
    """Return the budgets of each tenant, highest usage first. Call inside `system(…)`."""
    found: dict[int, list[Room]] = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_BUDGETS, {"now": now, "tenant": tenant_id, "most": most})
        for tenant, *values, _ in cursor.fetchall():
            found[tenant].append(Room(*values))
    return found
