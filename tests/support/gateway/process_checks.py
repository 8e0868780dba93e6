"""Actions and checks for tests of several gateway processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from asgiref.sync import sync_to_async

from billing.budgets.budgets import do_make_budget
from billing.models import Budget, BudgetPeriod, UsageEvent
from tenants.models import Tenant
from tests.support.gateway.budgets import database_url
from tests.support.gateway.processes import GatewayCluster
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped

see = sync_to_async(lambda: assert_ledger_invariants(database_url()))


@sync_to_async
def set_budget(tenant: Tenant, amount: int, name: str = "b") -> Budget:
    return do_make_budget(tenant, name=name, unit="money", period="month", amount=amount)


@sync_to_async
def used() -> int:
    return int(sum(row.used for row in unscoped(BudgetPeriod).all()))


async def reservation_of_one(inside: GatewayCluster) -> int:
    """Return the reservation of a request of 100 tokens, measured without any budget."""
    inside.worker.may_answer.set()
    gateway = next(iter(inside.gateways.values()))
    answer = await gateway.send_with_retries()
    assert answer is not None
    assert answer.status_code == 200, answer.text
    return int(inside.worker.answered[-1].billing_context.reserved_nano or 0)


def codes(answers: list[Any]) -> Counter[Any]:
    return Counter((answer.status_code, answer.json().get("error", {}).get("code")) for answer in answers)


async def done(asked: list[asyncio.Task[Any]], number: int) -> bool:
    return sum(each.done() for each in asked) >= number


@sync_to_async
def settled_events() -> list[UsageEvent]:
    return list(unscoped(UsageEvent).all())


async def passes(answer: Any) -> bool:
    assert answer is not None
    return bool(answer.status_code == 200)
