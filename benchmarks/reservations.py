"""What budgets cost an admission, in CPU time of the gateway: `python -m benchmarks.reservations`.

One gateway's budget admission on its own PostgreSQL and Valkey. The same requests are admitted without any budget and
with three (a day's, a month's, a lifetime's); leases are leased as they are spent. Then, with four gateways that hold
leases, how long a request waits that needs all they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from benchmarks.options import parse
from benchmarks.services import start_services
from billing.currencies.amounts import NANO_A_DOLLAR

RECALLED = 100 * NANO_A_DOLLAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="admissions measured (default 20,000)")
    parser.add_argument("--rounds", type=int, default=10, help="of admissions, and of recalls (default 10)")
    options = parse(parser, {"requests": 200, "rounds": 2})
    with ExitStack() as running:
        start_services(running)
        url, key = _prepare(), _make_key("bench")
        without = asyncio.run(_admissions(url, key, options))
        _set_budgets(key.tenant_id, 90_000_000 * NANO_A_DOLLAR)
        budgeted = asyncio.run(_admissions(url, key, options))
        print(f"CPU an admission, us: {without:.1f} without budgets, {budgeted:.1f} with three")
        keys = [_make_key(f"bench-{number}") for number in range(options.rounds)]
        for tenant_key in keys:
            _set_budgets(tenant_key.tenant_id, RECALLED)
        waits = [wait * 1000 for wait in asyncio.run(_recalls(url, keys))]
        median, worst = statistics.median(waits), max(waits)
        print(f"recall from 4 gateways, ms: median {median:.1f}, worst of {options.rounds} {worst:.1f}")


def _prepare() -> str:
    from millrace.environment.configuration import platform_settings
    from tenants.isolation import db_roles
    from tests.support.billing.books import rate_card

    rate_card()
    return db_roles.as_role(platform_settings().database_url, db_roles.SYSTEM)


def _make_key(name: str) -> Any:
    from tenants import actions
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import Project
    from tests.support.gateway.budget_gateways import key_of

    tenant = actions.do_create_tenant(name, name)
    with tenant_scope(tenant):
        project = Project.objects.for_tenant(tenant).get()
    api_key, _ = actions.do_create_api_key(project, "k")
    return key_of(tenant.pk, project.pk, api_key.pk)


def _set_budgets(tenant_id: int, amount: int) -> None:
    from billing.models import Budget
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND):
        for period in ("day", "month", "lifetime"):
            Budget.objects.create(tenant_id=tenant_id, name=period, unit="money", period=period, amount=amount)


async def _admissions(url: str, key: Any, options: argparse.Namespace) -> float:
    from tests.support.gateway.budget_gateways import budget_gateway

    async with budget_gateway(url, key) as gateway:
        await gateway.admit()
        rounds, count = [], options.requests // options.rounds
        for _ in range(options.rounds):
            began = time.process_time()
            for _ in range(count):
                await gateway.admit()
            rounds.append((time.process_time() - began) / count * 1e6)
        await gateway.budget_admission.stop()
    return statistics.median(rounds)


async def _recalls(url: str, keys: Sequence[Any]) -> list[float]:
    """Return the seconds of admissions that need all unreserved budget of four other gateways, one tenant for each."""
    from tests.support.gateway.budget_gateways import Admitted, budget_gateway

    waits = []
    for key in keys:
        async with AsyncExitStack() as running:
            others = [await running.enter_async_context(budget_gateway(url, key, f"gw-{n}")) for n in range(4)]
            own_gateway = await running.enter_async_context(budget_gateway(url, key, "gw-own"))
            admitted = [await other.admit() for other in others]
            left = RECALLED - sum(each.reserved_nano for each in admitted)
            began = time.perf_counter()
            found = await own_gateway.admit(max_tokens=(left - 30_000_000) // 15_000)
            waits.append(time.perf_counter() - began)
            assert isinstance(found, Admitted)
    return waits


if __name__ == "__main__":
    main()
