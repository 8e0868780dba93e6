"""How tenants stand: what they spent, what that cost the operator, and how full their budgets are."""

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

COSTED_OVER = timedelta(days=1)  # the time over which the cost of a million tokens is computed
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = ("tenant_id", "model", "cost", "requests", "tokens")
# Budgets with their window under way, the fullest of each tenant first. What is on trial comes last: it bounds nobody.
_BUDGETS = """
SELECT * FROM (
    SELECT b.tenant_id, b.id, b.name, b.mode, b.unit, b.period, b.raise_until, u.used, r.room,
        row_number() OVER (PARTITION BY b.tenant_id
            ORDER BY b.mode = 'dry_run', u.used::numeric / nullif(r.room, 0) DESC NULLS FIRST, b.id) AS place
    FROM billing_budget b LEFT JOIN billing_window w ON w.budget_id = b.id AND w.period_start <= %(now)s
        AND (w.period_end IS NULL OR w.period_end > %(now)s)
    CROSS JOIN LATERAL (SELECT coalesce(w.used / 1000000 + w.held, 0)::bigint AS used) u
    CROSS JOIN LATERAL (SELECT b.amount + coalesce(w.carried, 0)
        + CASE WHEN b.raise_until > %(now)s THEN b.raise_amount ELSE 0 END AS room) r
    WHERE b.active AND (%(tenant)s::bigint IS NULL OR b.tenant_id = %(tenant)s)
) found WHERE place <= %(most)s ORDER BY tenant_id, place
"""


@dataclass
class Spent:
    """Of one tenant since some midnight, UTC."""

    femto: int = 0
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by model

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens.values())


@dataclass(frozen=True)
class Room:
    """A budget and what is used of it, in its unit."""

    id: int
    name: str
    mode: str
    unit: str
    period: str
    raise_until: datetime | None
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
    """So much of a budget's unit."""
    if unit == "money":
        return Money.nano(value).text
    return f"{exact(value) if value < 10_000 else compact(value)} {unit}"


def spent(since: datetime) -> dict[int, Spent]:
    """Return what each tenant used from a midnight on, in one statement; inside `system(…)`."""
    late = Q(settled_at__gte=Coalesce(Subquery(RollupState.objects.values("settled_before")[:1]), _EARLIEST))
    rolled = UsageRollup.objects.all_tenants().filter(bucket=UsageRollup.Bucket.DAY, start__gte=since)
    fresh = UsageChange.objects.all_tenants().filter(late, admitted_at__gte=since)
    found: dict[int, Spent] = defaultdict(Spent)
    for tenant, model, cost, requests, tokens in _summed(rolled).union(_summed(fresh), all=True):
        one = found[tenant]
        one.femto += int(cost)
        one.requests += int(requests)
        one.tokens[model] += int(tokens)
    return found


def _summed(rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    tokens = sum((F(name) for name in TOKEN_CLASSES[1:]), F(TOKEN_CLASSES[0]))
    executions = F("completed") + F("cancelled") + F("failed")
    grouped = rows.order_by().values("tenant_id", "model")
    totals = grouped.annotate(cost=Sum("cost_femto"), requests=Sum(executions), tokens=Sum(tokens))
    found: QuerySet[Any, Any] = totals.values_list(*_COLUMNS)
    return found


def token_costs(now: datetime) -> Mapping[str, int]:
    """Return what a million tokens of each model cost of late, in femto-USD, where that is known; inside
    `system(…)`."""
    if not MachineCost.objects.exists():
        return {}
    found = costs(now - COSTED_OVER, now)
    return {one.model: one.cost_per_million for one in found if one.cost_per_million is not None}


def margin(used: Spent, rates: Mapping[str, int]) -> Money | None:
    """Return what is left of the spend after the machines; None: what some model costs is not known."""
    if not rates or any(tokens and model not in rates for model, tokens in used.tokens.items()):
        return None
    machines = sum(tokens * rates[model] // 10**6 for model, tokens in used.tokens.items() if tokens)
    return Money(used.femto - machines)


def margins(found: Iterable[Money | None]) -> Money | None:
    """Return the sum of those that are known."""
    known = [one for one in found if one is not None]
    return Money(sum(one.femto for one in known)) if known else None


def budgets(now: datetime, tenant_id: int | None = None, most: int = 1) -> dict[int, list[Room]]:
    """Each tenant's budgets, the fullest first; inside `system(…)`."""
    found: dict[int, list[Room]] = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_BUDGETS, {"now": now, "tenant": tenant_id, "most": most})
        for tenant, *values, _ in cursor.fetchall():
            found[tenant].append(Room(*values))
    return found
