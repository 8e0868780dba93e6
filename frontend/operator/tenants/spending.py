"""Spend, cost and budget usage of tenants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import F, QuerySet, Sum
from django.utils.translation import gettext as _

from billing.currencies.amounts import TOKENS_A_PRICE
from billing.models import UsageChange, UsageRollup, coarse_or, not_rolled_up, token_sum, totals_of
from billing.pricing.currencies import CrossRate
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Margin, Money, compact, exact, share
from millrace.apps.health.budget_usage import BudgetPeriodUsage
from millrace.apps.health.costs import costs
from millrace.apps.health.models import MachineCost

COSTED_OVER = timedelta(days=1)  # the period of the cost per 1M tokens
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = ("tenant_id", "model", "cost", "requests", "tokens")


@dataclass
class Spent:
    """The usage of one tenant since the start of a month in UTC, in its currency."""

    femto: int = 0
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by model

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens.values())


@dataclass(frozen=True)
class BudgetText:
    """The usage of a budget as text."""

    usage: BudgetPeriodUsage
    currency: str = ""  # the tenant's currency; empty: that of the page

    @property
    def share(self) -> str:
        return share(self.usage.used, self.usage.limit) if self.usage.limit > 0 else _("no budget left")

    @property
    def of(self) -> str:
        return f"{amount(self.usage.limit, self.usage.unit, self.currency, exact)} {PERIODS[self.usage.period]}"

    @property
    def used(self) -> str:
        return amount(self.usage.used, self.usage.unit, self.currency)


PERIODS = {"day": _lazy("per day"), "month": _lazy("per month"), "lifetime": _lazy("in total")}


def amount(value: int, unit: str, currency: str = "", number: Callable[[int], str] = compact) -> str:
    """Return an amount of a budget's unit. `number` formats tokens and requests: `exact` for what a user typed."""
    if unit == "money":
        return Money.nano(value, currency).text
    return f"{number(value)} {unit}"


def sum_usage(since: datetime, tenant_id: int | None = None) -> dict[int, Spent]:
    """Return the usage of each tenant, or of one, since the start of a month in UTC. Call inside `system(…)`.

    It is one statement, so that a concurrent run of the rollups does not count a change twice.
    """
    months = coarse_or(UsageRollup.Bucket.MONTH_TOTAL, totals_of(UsageRollup.Bucket.DAY))
    rolled = UsageRollup.objects.all_tenants().filter(bucket=months, start__gte=since)
    fresh = UsageChange.objects.all_tenants().filter(not_rolled_up(), admitted_at__gte=since)
    if tenant_id is not None:
        rolled, fresh = rolled.filter(tenant_id=tenant_id), fresh.filter(tenant_id=tenant_id)
    found: dict[int, Spent] = defaultdict(Spent)
    for tenant, model, cost, requests, tokens in _sum_by_model(rolled).union(_sum_by_model(fresh), all=True):
        total = found[tenant]
        total.femto += int(cost)
        total.requests += int(requests)
        total.tokens[model] += int(tokens)
    return found


def _sum_by_model(rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    tokens = token_sum()
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


def margin(used: Spent, rates: Mapping[str, int], dollars: CrossRate | None) -> Margin | None:
    """Return the margin of the spend over the machine costs; None if the cost of a model is unknown.

    Args:
        dollars: per unit of the tenant's currency. None: unknown.
    """
    if dollars is None or not rates or any(tokens and model not in rates for model, tokens in used.tokens.items()):
        return None
    machines = sum(tokens * rates[model] // TOKENS_A_PRICE for model, tokens in used.tokens.items() if tokens)
    return Margin(dollars.convert(used.femto), machines)


def sum_margins(margins: Iterable[Margin | None]) -> Margin | None:
    """Return the sum of the known margins; None if there is none."""
    known = [margin for margin in margins if margin is not None]
    if not known:
        return None
    return Margin(sum(margin.price for margin in known), sum(margin.cost for margin in known))
