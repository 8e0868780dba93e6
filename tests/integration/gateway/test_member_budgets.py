"""A member's budget at admission: it applies to all keys that the member created together, and to no other keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from billing.budgets import alerts
from billing.budgets.budgets import do_make_budget
from billing.metering.ingest import UsageMessage, settle
from billing.models import BudgetAlert, BudgetPeriod
from inference_worker.contract.messages import encode
from millrace.environment.configuration import platform_settings
from tenants import actions
from tenants.isolation import db_roles
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.models import Tenant, User
from tests.support.billing.books import rate_card
from tests.support.gateway.budget_gateways import Admitted, BudgetGateway, budget_gateway, key_of
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db(transaction=True)
RESERVED, COST = (
    91_440_000,
    13_200_000,
)  # nano-USD: 10,000 prompt tokens and 4,096 output tokens by list A, and their cost


class MemberKeys(NamedTuple):
    """A tenant with two members; `ana` created a key in each of two projects."""

    tenant: Tenant
    ana: User
    keys: dict[str, ApiKeySnapshot]


@pytest.fixture
def members(transactional_db: None, as_owner: Any) -> Any:
    rate_card()
    ana, bo = (User.objects.create_user(f"{name}@acme.example") for name in ("ana", "bo"))
    tenant = actions.do_create_tenant("acme", "Acme", owner=ana)
    actions.do_add_member(tenant, bo, "developer")
    first = only_project(tenant)
    second = actions.do_create_project(tenant, "lab", "Lab")
    keys = {}
    for name, project, by in (
        ("ana", first, ana),
        ("ana-lab", second, ana),
        ("bo", first, bo),
        ("unknown", first, None),
    ):
        made, _ = actions.do_create_api_key(project, name, created_by=by)
        keys[name] = key_of(tenant.pk, project.pk, made.pk)
    yield MemberKeys(tenant, ana, keys)
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


@pytest_asyncio.fixture
async def gateway(members: MemberKeys) -> AsyncIterator[Callable[[str], Any]]:
    """Return a function that starts a separate gateway for requests of the key."""
    role = db_roles.as_role(platform_settings().database_url, db_roles.SYSTEM)
    url = make_conninfo(role, dbname=connection.settings_dict["NAME"])
    async with AsyncExitStack() as running:

        async def start(name: str) -> BudgetGateway:
            return await running.enter_async_context(budget_gateway(url, members.keys[name], f"gw-{name}"))

        yield start
    await sync_to_async(lambda: connection.close())()


def only_budget_period() -> BudgetPeriod:
    (found,) = unscoped(BudgetPeriod).all()
    return found


async def test_all_keys_of_the_member_share_the_budget_and_others_do_not(
    members: MemberKeys, gateway: Callable[[str], Any]
) -> None:
    make = sync_to_async(do_make_budget)
    fields = {"name": "Ana's", "unit": "money", "period": "month", "amount": 2 * RESERVED, "thresholds": [10]}
    budget = await make(members.tenant, member=members.ana, **fields)
    one, lab = await gateway("ana"), await gateway("ana-lab")
    first, second, third = await one.admit(), await lab.admit(), await one.admit()
    assert isinstance(first, Admitted)
    assert isinstance(second, Admitted)
    assert third.code == "budget_exceeded"
    assert "Ana's" in str(third.message)
    for name in ("bo", "unknown"):
        others = await gateway(name)
        assert isinstance(await others.admit(), Admitted)
    budget_period = await sync_to_async(only_budget_period)()
    assert (budget_period.budget_id, budget_period.reserved) == (budget.pk, 2 * RESERVED)
    events = [UsageMessage(f"{place}-0", encode(each.event())) for place, each in enumerate((first, second), start=1)]
    await sync_to_async(settle)(events)
    budget_period = await sync_to_async(only_budget_period)()
    assert (budget_period.used, budget_period.reserved) == (2 * COST * 10**6, 0)
    assert isinstance(await lab.admit(), Admitted)  # the unused part was released
    assert await sync_to_async(alerts.check_thresholds)(datetime.now(UTC)) == 1
    (alert,) = await sync_to_async(unscoped(BudgetAlert).all)()
    assert (alert.budget_id, alert.threshold, alert.used) == (budget.pk, "10", 2 * COST)


async def test_a_quota_of_requests(members: MemberKeys, gateway: Callable[[str], Any]) -> None:
    fields = {"name": "Three a day", "unit": "requests", "period": "day", "amount": 3}
    await sync_to_async(do_make_budget)(members.tenant, member=members.ana, **fields)
    one, lab = await gateway("ana"), await gateway("ana-lab")
    found = [await each.admit() for each in (one, lab, lab, one, lab)]
    assert [isinstance(each, Admitted) for each in found] == [True, True, True, False, False]
    assert found[-1].code == "quota_exceeded"
