"""Budgets under several gateways: never overrun, never refusing what fits. Numbers are the specification's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from billing import holds
from billing.ingest import Message, Outcome, settle
from billing.models import Adjustment, Budget, Slice, UsageEvent, Window
from inference_worker.protocol import encode
from millrace.config import platform_settings
from tenants import actions, roles
from tenants.roles import SystemUse
from tenants.scoping import system
from tenants.snapshot import KeySnapshot
from tests.billing.books import sheet
from tests.gateway.purse import Purse, admit_elsewhere, key_of, purse
from tests.seeing import Everybody, only_project

pytestmark = pytest.mark.django_db(transaction=True)
HOLD = 91_440_000  # nano-USD: 10,000 tokens of prompt and 4,096 of answer by list A
COST = 13_200_000  # 1,000 in, 9,000 read, 500 out
DOLLAR = 10**9


@pytest.fixture(autouse=True)
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


@pytest.fixture
def key() -> KeySnapshot:
    """A key of a tenant, and a price list."""
    sheet()
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    made, _ = actions.do_create_api_key(project, "k")
    return key_of(project.tenant_id, project.pk, made.pk)


@pytest.fixture
def url() -> str:
    return make_conninfo(
        roles.as_role(platform_settings().database_url, roles.SYSTEM), dbname=connection.settings_dict["NAME"]
    )


@pytest.fixture
def budget(key: KeySnapshot) -> Callable[..., int]:
    """Set a budget; its id. A dollar a month for the tenant, if nothing else is said."""

    def budget(**fields: Any) -> int:
        with system(SystemUse.COMMAND):
            given = {"tenant_id": key.tenant_id, "name": "b", "unit": "money", "period": "month", "amount": DOLLAR}
            return Budget.objects.create(**(given | fields)).pk

    return budget


@pytest_asyncio.fixture
async def gateway(url: str, key: KeySnapshot) -> AsyncIterator[Callable[..., Any]]:
    """Start a gateway's treasury."""
    async with AsyncExitStack() as running:

        async def start(name: str = "gw-a", of: KeySnapshot = key) -> Purse:
            return await running.enter_async_context(purse(url, of, name))

        yield start
    await sync_to_async(lambda: connection.close())()


def tell(*events: Any) -> Outcome:
    """Settle events, or messages."""
    payloads = [each if isinstance(each, bytes) else encode(each) for each in events]
    return settle([Message(f"{place}-0", payload) for place, payload in enumerate(payloads, start=1)])


def window(budget_id: int) -> Window:
    (found,) = [each for each in Everybody(Window).all() if each.budget_id == budget_id]
    return found


def check_invariants() -> None:
    """1 to 4 and 6 of the specification, over everything that stands in the database."""
    slices_, events, adjustments = (Everybody(model).all() for model in (Slice, UsageEvent, Adjustment))
    budgets = {each.pk: each for each in Everybody(Budget).all()}
    for each in Everybody(Window).all():
        mine = [slice_ for slice_ in slices_ if each.pk in slice_.windows]
        ids = {slice_.pk for slice_ in mine}
        assert each.held == sum(getattr(slice_, each.unit) for slice_ in mine)
        settled = sum(getattr(slice_, f"settled_{each.unit}") for slice_ in mine)
        assert each.used == (settled if each.unit == "money" else settled * 10**6)
        if each.unit == "money":
            assert each.used == sum(row.cost_femto for row in [*events, *adjustments] if row.slice_id in ids)
        limit = budgets[each.budget_id]
        if limit.mode == "hard":
            assert each.used + each.held * 10**6 <= (limit.amount + each.carried) * 10**6
    assert all(event.cost_femto <= event.hold * 10**6 for event in events if event.hold is not None)


see = sync_to_async(check_invariants)


async def test_worked_example_6_what_is_not_used_goes_back(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    mine = await gateway()
    admitted = await mine.admit()
    assert admitted.terms.hold == HOLD
    held = (await sync_to_async(window)(made)).held
    assert held >= HOLD
    await see()
    await sync_to_async(tell)(admitted.event())
    after = await sync_to_async(window)(made)
    assert (after.used, held - after.held) == (COST * 10**6, HOLD)
    await see()


def test_worked_example_7_exactly_ten_of_a_hundred_pass(key: KeySnapshot, budget: Any, url: str) -> None:
    made = budget()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        starts = time.time() + 6
        runs = [
            pool.submit(admit_elsewhere, url, key, f"gw-{n}", count, starts) for n, count in enumerate((34, 33, 33))
        ]
        found = [each for run in runs for each in run.result()]
    events = [each for each in found if isinstance(each, bytes)]
    assert len(events) == 10
    assert {each for each in found if isinstance(each, str)} == {"budget_exceeded"}
    check_invariants()
    tell(*events)
    for slice_ in Everybody(Slice).all():  # what the dead gateways had not admitted
        assert slice_.requests <= 1
    holds.reap(datetime.now(UTC) + timedelta(hours=1))
    after = window(made)
    assert (after.used, after.held) == (132_000_000 * 10**6, 0)
    check_invariants()
