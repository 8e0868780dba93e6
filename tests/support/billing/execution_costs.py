"""Costs of executions at upstreams."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.metering.ingest import UsageMessage, settle
from billing.models import CostCard
from billing.rates.pricing import Component, Rate, encode_rates
from inference_worker.contract.messages import ExecutionUsage, encode
from tests.support.billing.books import dollars
from tests.support.rows import unscoped

FULL = {"uncached": 1000, "cache_read": 0, "output": 200}
PAID = 1000 * dollars("1") + 200 * dollars("5")  # the operator's cost of FULL
PRICE = 1000 * dollars("3") + 200 * dollars("15")  # the tenant's


def cost_card(model: str = "smollm2-135m", **usd: str) -> int:
    given = usd or {"uncached": "1", "cache_read": "0.10", "output": "5"}
    rates = tuple(Rate(place, Component(name), dollars(price)) for place, (name, price) in enumerate(given.items()))
    card = {"model": model, "effective_from": datetime(2020, 1, 1, tzinfo=UTC), "rates": encode_rates(rates)}
    return int(unscoped(CostCard).create(**card).pk)


def settle_all(*events: ExecutionUsage) -> None:
    settle([UsageMessage(f"{number}-0", encode(one)) for number, one in enumerate(events)])
