"""The operator's costs and revenue per million tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import Case, Sum, Value, When

from billing.currencies.amounts import DEFAULT_CURRENCY, FEMTO_A_NANO, TOKENS_A_PRICE
from billing.models import UsageRollup, token_sum, totals_of
from billing.pricing.currencies import dollar_rates, other_currencies
from inference_worker.contract.texts import Text
from millrace.apps.health.history import span
from millrace.apps.health.models import MAX_NANO_PER_HOUR, MachineCost
from tenants import audit
from tenants.actions import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

_LOCK = 0x6D636F73  # the number of an advisory lock; unique in the database


@dataclass(frozen=True)
class ModelCost:
    """Costs and revenue of a model in a period, in femto-USD. Tokens include cached prompt tokens."""

    model: str
    nano_per_hour: int | None  # None: not set
    machine_minutes: int  # minutes of all replicas
    served: int  # tokens that its engines served
    billed: int  # tokens that were billed
    revenue: int  # converted to USD at the newest exchange rates

    @property
    def cost(self) -> int | None:
        """Cost of its machines; None if no hourly cost is set."""
        return None if self.nano_per_hour is None else self.nano_per_hour * FEMTO_A_NANO * self.machine_minutes // 60

    @property
    def cost_per_million(self) -> int | None:
        return None if self.cost is None or not self.served else self.cost * TOKENS_A_PRICE // self.served

    @property
    def price_per_million(self) -> int | None:
        """Mean billed price."""
        return None if not self.billed else self.revenue * TOKENS_A_PRICE // self.billed


def do_set_machine_cost(model: str, nano_per_hour: int) -> MachineCost:
    """Set the hourly cost of a machine that serves the model.

    Raises:
        ActionRefused: the amount is negative or above the maximum.
    """
    if not 0 <= nano_per_hour < MAX_NANO_PER_HOUR:
        raise ActionRefused(Text("Enter an amount from 0 to 1,000,000 dollars per hour."))
    with all_tenants_scope(BypassReason.OPERATOR):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        existing = MachineCost.objects.filter(model=model).first()
        before = None if existing is None else audit.serialize_for_audit(existing)
        cost = existing or MachineCost(model=model)
        cost.nano_per_hour = nano_per_hour
        cost.save()
        audit.record("machine_cost.updated", cost, tenant_id=None, before=before, after=audit.serialize_for_audit(cost))
    return cost


def costs(start: datetime, end: datetime) -> tuple[ModelCost, ...]:
    """Return the costs of each model that ran, in whole hours from `start`; inside `all_tenants_scope(…)`."""
    start = start.replace(minute=0, second=0, microsecond=0)
    rates = dict(MachineCost.objects.values_list("model", "nano_per_hour"))
    minutes: dict[str, int] = {}
    served: dict[str, int] = {}
    for point in span(start, end, end - start):
        minutes[point.model] = minutes.get(point.model, 0) + point.minutes
        served[point.model] = served.get(point.model, 0) + point.tokens
    billed = _sum_billed(start, end)
    return tuple(
        ModelCost(model, rates.get(model), minutes[model], served[model], *billed.get(model, (0, 0)))
        for model in sorted(minutes)
    )


def _sum_billed(start: datetime, end: datetime) -> dict[str, tuple[int, int]]:
    """Return tokens and revenue in femto-USD by model. Usage in a currency without an exchange rate is left out."""
    others, rates = other_currencies(), dollar_rates(end.date())
    currency = Case(*(When(tenant_id=tenant_id, then=Value(code)) for tenant_id, code in others.items()),
                    default=Value(DEFAULT_CURRENCY))  # fmt: skip
    rows = UsageRollup.objects.all_tenants().filter(
        bucket=totals_of(UsageRollup.Bucket.HOUR), start__gte=start, start__lt=end
    )
    sums = rows.order_by().values("model", currency=currency).annotate(tokens=Sum(token_sum()), femto=Sum("cost_femto"))
    found: dict[str, tuple[int, int]] = {}
    for row in sums:
        if (rate := rates.get(row["currency"])) is not None:
            tokens, revenue = found.get(row["model"], (0, 0))
            found[row["model"]] = tokens + int(row["tokens"]), revenue + rate.convert(int(row["femto"]))
    return found
