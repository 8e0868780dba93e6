"""The identity of a budget lease after a failover of PostgreSQL that lost transactions: IDs are assigned twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection

from billing.metering.reconciler import reconcile
from billing.models import BudgetLease, UsageEvent
from billing.reservations import reservations
from billing.reservations.reservations import LeaseKey, ReservationUse
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.budget_gateways import key_of
from tests.support.gateway.budgets import COST, DOLLAR, RESERVED, admit_requests, budget_period, settle_events
from tests.support.rows import only_project, unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
AsOwner = Callable[[], AbstractContextManager[None]]
lease_of = sync_to_async(lambda lease_id: unscoped(BudgetLease).get(pk=lease_id))


def lose_leases(as_owner: AsOwner) -> None:
    """Bring leases and budget periods to the state of a standby that lacks all leases."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("WITH lost AS (DELETE FROM billing_budgetlease RETURNING id) SELECT min(id) FROM lost")
        (first,) = cursor.fetchone()
        cursor.execute("UPDATE billing_budgetperiod SET reserved = 0, used = 0")
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("SELECT setval(pg_get_serial_sequence('billing_budgetlease', 'id'), %s, false)", [first])


def new_key(name: str) -> ApiKeySnapshot:
    """Return a key of a new tenant."""
    project = only_project(actions.do_create_tenant(name, name))
    made, _ = actions.do_create_api_key(project, "k")
    return key_of(project.tenant_id, project.pk, made.pk)


@pytest.mark.parametrize("is_same_tenant", [False, True])
async def test_usage_of_a_lost_lease_is_not_booked_on_the_lease_that_got_its_id(
    gateway: Any, key: ApiKeySnapshot, budget: Callable[..., int], as_owner: AsOwner, is_same_tenant: bool
) -> None:
    await sync_to_async(budget)()
    (lost,) = await admit_requests(await gateway(), 1)
    await sync_to_async(lose_leases)(as_owner)
    owner = key if is_same_tenant else await sync_to_async(new_key)("other")
    second = await sync_to_async(budget)(tenant_id=owner.tenant_id, name="second", amount=2 * DOLLAR)
    (admitted,) = await admit_requests(await gateway("gw-b", owner), 1)
    assert admitted.lease_id == lost.lease_id
    assert admitted.fencing_token != lost.fencing_token
    before = await lease_of(admitted.lease_id)

    result = await sync_to_async(settle_events)(lost.event(), admitted.event())
    assert result.settled == 2
    assert {row.cost_femto for row in await sync_to_async(unscoped(UsageEvent).all)()} == {COST * 10**6}
    period = await sync_to_async(budget_period)(second)
    assert period.used == COST * 10**6
    after = await lease_of(admitted.lease_id)
    assert (after.settled_money, after.settled_requests) == (COST * 10**6, 1)
    assert before.money - after.money == RESERVED
    assert (await sync_to_async(reconcile)()).differences == []


async def test_a_correction_of_lost_usage_changes_no_other_lease(
    gateway: Any, budget: Callable[..., int], as_owner: AsOwner
) -> None:
    await sync_to_async(budget)()
    (lost,) = await admit_requests(await gateway(), 1)
    await sync_to_async(lose_leases)(as_owner)
    other = await sync_to_async(new_key)("other")
    second = await sync_to_async(budget)(tenant_id=other.tenant_id, name="second")
    (admitted,) = await admit_requests(await gateway("gw-b", other), 1)
    await sync_to_async(settle_events)(admitted.event())
    await sync_to_async(settle_events)(lost.event())
    result = await sync_to_async(settle_events)(lost.event("failed", uncached=0))
    assert result.repeated == 1
    assert (await sync_to_async(budget_period)(second)).used == COST * 10**6
    assert (await lease_of(admitted.lease_id)).settled_money == COST * 10**6


async def test_the_rest_of_a_lost_lease_is_not_returned_to_the_lease_that_got_its_id(
    gateway: Any, budget: Callable[..., int], as_owner: AsOwner
) -> None:
    await sync_to_async(budget)(amount=100 * DOLLAR)
    first = await gateway()
    await admit_requests(first, 1)
    await sync_to_async(lose_leases)(as_owner)
    other = await sync_to_async(new_key)("other")
    second = await sync_to_async(budget)(tenant_id=other.tenant_id, name="second", amount=100 * DOLLAR)
    (admitted,) = await admit_requests(await gateway("gw-b", other), 1)
    before = await lease_of(admitted.lease_id)
    first.budget_admission.forget()
    await first.wait_until_returned()
    after = await lease_of(admitted.lease_id)
    assert (after.money, after.open, after.fully_reserved) == (before.money, True, False)
    assert (await sync_to_async(budget_period)(second)).reserved == after.money


async def test_late_usage_is_booked_on_its_reclaimed_lease(gateway: Any, budget: Callable[..., int]) -> None:
    made = await sync_to_async(budget)()
    (admitted,) = await admit_requests(await gateway(), 1)

    def adjust(lease: LeaseKey) -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            assert reservations.adjust(cursor, lease, ReservationUse(7, 1, 1), must_fit=True)

    key = reservations.lease_of(admitted.billing_context)
    assert key is not None
    reclaimed = key._replace(fencing_token=key.fencing_token - 1)  # the request's token, before the reclaim
    await sync_to_async(adjust)(reclaimed)
    assert (await sync_to_async(budget_period)(made)).used == 7
    for lost in (key._replace(fencing_token=key.fencing_token - 2), key._replace(tenant_id=key.tenant_id + 1)):
        await sync_to_async(adjust)(lost)
    assert (await sync_to_async(budget_period)(made)).used == 7


def test_nothing_is_leased_from_a_period_of_another_tenant(key: ApiKeySnapshot, budget: Callable[..., int]) -> None:
    """A gateway that has not read its budget periods again after a failover."""
    made, other = budget(), new_key("other")
    need = [RESERVED, 14_096, 1]
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(
            "SELECT budget_period_id FROM billing_open_budget_periods(%s, %s, %s, now())",
            [key.tenant_id, key.project_id, key.key_id],
        )
        periods = [period for (period,) in cursor.fetchall()]
    for wanted in (periods, [max(periods) + 1]):
        with pytest.raises(IntegrityError, match="a budget period is missing, or of another tenant"):
            _lease(other.tenant_id, wanted, need)
    assert budget_period(made).reserved == 0


def _lease(tenant_id: int, periods: list[int], need: list[int]) -> None:
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(
            "SELECT * FROM billing_lease_budget(%s, 'gw', %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],"
            " interval '15 s', interval '60 s', NULL, NULL, NULL)",
            [tenant_id, periods, need, need, need],
        )
