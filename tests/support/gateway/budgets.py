"""Actions and checks for tests of budgets, and amounts by price list A."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.models import Budget, BudgetPeriod
from billing.reservations import reservations
from inference_worker.contract.messages import encode
from millrace.environment.configuration import platform_settings
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from tenants.isolation import db_roles
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tests.support.gateway.budget_gateways import Admitted, BudgetGateway
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped

RESERVED = 91_440_000  # nano-USD: 10,000 prompt tokens and 4,096 output tokens by list A
COST = 13_200_000  # 1,000 in, 9,000 read, 500 out
DOLLAR = 10**9


def database_url() -> str:
    return make_conninfo(
        db_roles.as_role(platform_settings().database_url, db_roles.SYSTEM), dbname=connection.settings_dict["NAME"]
    )


def settle_events(*events: Any) -> SettleResult:
    """Settle events or messages."""
    payloads = [event if isinstance(event, bytes) else encode(event) for event in events]
    return settle([UsageMessage(f"{place}-0", payload) for place, payload in enumerate(payloads, start=1)])


def budget_period(budget_id: int) -> BudgetPeriod:
    (found,) = [row for row in unscoped(BudgetPeriod).all() if row.budget_id == budget_id]
    return found


def check_invariants() -> None:
    assert_ledger_invariants(database_url())


def reclaim_all() -> int:
    """Let all leases expire, reclaim them, and return their number."""
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("UPDATE billing_budgetlease SET reclaim_at = now() - interval '1 hour' WHERE open")
    return reservations.reclaim(datetime.now(UTC))


see = sync_to_async(check_invariants)


async def admit_requests(local_gateway: BudgetGateway, number: int) -> list[Admitted]:
    found = [await local_gateway.admit() for _ in range(number)]
    assert all(isinstance(each, Admitted) for each in found), found
    return found


async def drop_revocations(stopped: BudgetGateway) -> None:
    """Stop the gateway from receiving recalls and returning leases."""
    await cancel_and_wait(stopped.budget_admission._tasks)


def settle_in_a_thread(*events: Any) -> None:
    """Settle events, and return the thread's connection to the pool before the thread ends."""
    try:
        settle_events(*events)
    finally:
        connection.close()


def run(life: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        try:
            await life
        finally:
            await sync_to_async(lambda: connection.close())()

    asyncio.run(whole())


def change(budget_id: int, **fields: Any) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        Budget.objects.all_tenants().filter(pk=budget_id).update(**fields)
