"""Early release: a request's unused reservation is available before its settlement, and is released once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.currencies.amounts import whole_units
from billing.metering.reconciler import reconcile
from billing.models import Budget, EarlyRelease, UsageEvent, UsageQuarantine
from billing.reservations import reservations
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission import early_release
from millrace.gateway.core.errors import ApiError
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.budget_gateways import Admitted, BudgetGateway, budget_gateway
from tests.support.gateway.budgets import (
    COST,
    DOLLAR,
    RESERVED,
    admit_requests,
    budget_period,
    reclaim_all,
    run,
    see,
    settle_events,
    settle_in_a_thread,
)
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]


def early_rows() -> list[EarlyRelease]:
    with all_tenants_scope(BypassReason.COMMAND):
        return list(EarlyRelease.objects.all())


def released_by() -> list[str | None]:
    return [event.released_by for event in unscoped(UsageEvent).order_by("admitted_at")]


async def test_sequential_requests_fit_without_settlement(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=RESERVED + 19 * COST)
    local_gateway = await gateway()
    events = []
    for _ in range(20):
        (admitted,) = await admit_requests(local_gateway, 1)
        events.append(await local_gateway.end(admitted))
        await see()
    refused = await local_gateway.admit()
    assert refused.code == "budget_exceeded"
    assert (await sync_to_async(budget_period)(made)).reserved == 20 * COST
    await sync_to_async(settle_events)(*events, *events)
    after = await sync_to_async(budget_period)(made)
    assert (after.used, after.reserved) == (20 * COST * 10**6, 0)
    assert await sync_to_async(released_by)() == ["gateway"] * 20
    assert await sync_to_async(early_rows)() == []
    assert (await sync_to_async(reconcile)()).is_clean
    await see()


async def test_a_token_quota_is_released_too(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(unit="tokens", amount=14_096 + 10_500)
    local_gateway = await gateway()
    for _ in range(2):
        (admitted,) = await admit_requests(local_gateway, 1)
        await local_gateway.end(admitted)
    assert (await sync_to_async(budget_period)(made)).reserved == 2 * 10_500
    await see()


async def test_while_there_is_room_the_settlement_releases(gateway: Any, budget: Any) -> None:
    """There is no additional database call and no row."""
    made = await sync_to_async(budget)(amount=1000 * DOLLAR)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    held = (await sync_to_async(budget_period)(made)).reserved
    event = await local_gateway.end(admitted)
    assert (await sync_to_async(budget_period)(made)).reserved == held
    await sync_to_async(settle_events)(event)
    assert await sync_to_async(released_by)() == ["settler"]
    await see()


@pytest.mark.parametrize("order", [("completed", "failed"), ("failed", "completed"), ("cancelled", "completed")])
async def test_after_an_early_release_the_higher_ranked_outcome_still_counts(
    gateway: Any, budget: Any, order: Sequence[str]
) -> None:
    made = await sync_to_async(budget)(amount=2 * RESERVED)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    await local_gateway.end(admitted)
    for outcome in order:
        await sync_to_async(settle_events)(admitted.event(outcome))
        await see()
    after = await sync_to_async(budget_period)(made)
    assert (after.used, after.reserved) == (0 if "failed" in order else COST * 10**6, 0)


async def test_the_second_release_of_an_execution_does_nothing(gateway: Any, budget: Any) -> None:
    """The response to the first was lost. The same applies after the settlement and after the lease was reclaimed."""
    made = await sync_to_async(budget)(amount=3 * RESERVED)
    local_gateway = await gateway()
    settled, reclaimed = await admit_requests(local_gateway, 2)
    event = await local_gateway.end(settled)
    await local_gateway.end(settled)
    assert (await sync_to_async(budget_period)(made)).reserved == COST + RESERVED
    await sync_to_async(settle_events)(event)
    await local_gateway.end(settled)
    assert (await sync_to_async(budget_period)(made)).reserved == RESERVED
    await local_gateway.end(reclaimed)
    assert len(await sync_to_async(early_rows)()) == 1
    await sync_to_async(reclaim_all)()
    assert await sync_to_async(early_rows)() == []
    await local_gateway.end(reclaimed)
    assert (await sync_to_async(budget_period)(made)).reserved == 0
    await see()
    await sync_to_async(settle_events)(reclaimed.event())
    assert (await sync_to_async(budget_period)(made)).used == 2 * COST * 10**6
    await see()


async def test_a_settlement_that_conflicts_with_a_release_is_repeated(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is inserted, and the release commits before the settlement locks the lease."""
    made = await sync_to_async(budget)(amount=2 * RESERVED)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    inserted, released = threading.Event(), threading.Event()
    real, calls = reservations.settle, []

    def settle(*arguments: Any) -> set[int]:
        calls.append(1)
        inserted.set()
        assert released.wait(60)
        return real(*arguments)

    monkeypatch.setattr(reservations, "settle", settle)
    telling = asyncio.create_task(sync_to_async(settle_in_a_thread, thread_sensitive=False)(admitted.event()))
    assert await asyncio.to_thread(inserted.wait, 60)
    await local_gateway.end(admitted)
    assert (await sync_to_async(budget_period)(made)).reserved == COST
    released.set()
    await telling
    assert len(calls) == 2
    after = await sync_to_async(budget_period)(made)
    assert (after.used, after.reserved) == (COST * 10**6, 0)
    assert await sync_to_async(released_by)() == ["gateway"]
    await see()


async def test_usage_above_the_kept_reservation_is_not_settled(gateway: Any, budget: Any) -> None:
    """If a gateway and a worker disagree, that is an internal error. The budget is not exceeded."""
    made = await sync_to_async(budget)(amount=RESERVED)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    await local_gateway.end(admitted)
    (second,) = [await local_gateway.admit(max_tokens=(RESERVED - COST - 30_000_000) // 15_000)]
    assert isinstance(second, Admitted)
    outcome = await sync_to_async(settle_events)(admitted.event(uncached=10_000, output=501))
    assert (outcome.settled, outcome.quarantined) == (0, 1)
    (row,) = await sync_to_async(unscoped(UsageQuarantine).all)()
    assert row.detail == "billing_early_release_retained"
    assert (await sync_to_async(budget_period)(made)).used == 0
    await see()
    await sync_to_async(reclaim_all)()
    assert (await sync_to_async(budget_period)(made)).reserved == 0


async def test_without_the_database_the_settlement_releases(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await sync_to_async(budget)(amount=2 * RESERVED)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)

    async def away(*_: Any) -> None:
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patched:
        patched.setattr(local_gateway.budget_admission._store, "release_unused", away)
        event = await local_gateway.end(admitted)
    assert (await sync_to_async(budget_period)(made)).reserved == RESERVED
    await sync_to_async(settle_events)(event)
    assert (await sync_to_async(budget_period)(made)).reserved == 0
    await see()


async def test_the_last_byte_does_not_wait_for_a_slow_release(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release continues. The next request waits for it before a rejection."""
    await sync_to_async(budget)(amount=RESERVED + COST)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    store, may_release = local_gateway.budget_admission._store, asyncio.Event()
    real = store.release_unused

    async def slow(parts: Any) -> None:
        await may_release.wait()
        await real(parts)

    monkeypatch.setattr(store, "release_unused", slow)
    monkeypatch.setattr(early_release, "RELEASE_SECONDS", 0.01)
    await local_gateway.end(admitted)
    next_ = asyncio.create_task(local_gateway.admit())
    await asyncio.sleep(0.3)
    assert not next_.done()
    may_release.set()
    assert isinstance(await next_, Admitted)
    await see()


async def test_a_rejection_has_a_retry_time_if_waiting_helps(gateway: Any, budget: Any) -> None:
    await sync_to_async(budget)(amount=RESERVED + COST, period="day", name="daily")
    local_gateway = await gateway()
    (running,) = await admit_requests(local_gateway, 1)
    refused = await local_gateway.admit()
    assert refused.retry_after == 1
    assert "Active requests reserve $0.09144" in refused.message
    assert "resets at" in refused.message
    await local_gateway.end(running)
    (second,) = await admit_requests(local_gateway, 1)
    await local_gateway.end(second)
    refused = await local_gateway.admit()
    assert "Running requests" not in refused.message
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert 0 < refused.retry_after <= 86_400 - (datetime.now(UTC) - midnight).total_seconds() + 1
    assert any(name == b"retry-after" for name, _ in refused.headers())


async def test_a_rejection_without_a_reset_has_no_retry_time(gateway: Any, budget: Any) -> None:
    await sync_to_async(budget)(amount=1, unit="requests", period="lifetime")
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    refused = await local_gateway.admit()
    assert (refused.code, refused.retry_after) == ("quota_exceeded", None)
    assert refused.message.endswith("It does not reset. Raise the quota.")


@dataclass
class Model:
    """The expected used and reserved amounts of a budget, and the requests in each state."""

    limit: int
    running: list[Admitted] = field(default_factory=list)
    ended: list[tuple[Admitted, Any, int]] = field(
        default_factory=list
    )  # with the amount reserved until its settlement
    events: list[Any] = field(default_factory=list)
    used_femto: int = 0

    @property
    def reserved(self) -> int:
        return sum(each.reserved_nano or 0 for each in self.running) + sum(kept for *_, kept in self.ended)

    def fits(self, amount: int) -> bool:
        return whole_units(self.used_femto) + self.reserved + amount <= self.limit


def _hold(max_tokens: int) -> int:
    return 30_000_000 + 15_000 * max_tokens


OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), st.sampled_from([1, 700, 4096])),
    st.tuples(
        st.sampled_from(["end", "end_and_crash"]), st.integers(0, 99), st.integers(0, 500), st.integers(0, 10_000)
    ),
    st.tuples(st.sampled_from(["settle", "fail"]), st.integers(0, 99)),
    st.tuples(st.just("repeat"), st.integers(0, 99)),
)


async def _operate(local_gateway: BudgetGateway, model: Model, name: str, *given: int) -> None:
    if name == "admit":
        (max_tokens,) = given
        fits = model.fits(_hold(max_tokens))
        found = await local_gateway.admit_with_retries(max_tokens=max_tokens)
        assert isinstance(found, Admitted) == fits, (found, model)
        if isinstance(found, Admitted):
            assert found.reserved_nano == _hold(max_tokens)
            model.running.append(found)
        else:
            assert isinstance(found, ApiError)
            assert found.code == "budget_exceeded"
    elif name in ("end", "end_and_crash") and model.running:
        place, output, read = given
        admitted = model.running.pop(place % len(model.running))
        usage = {"uncached": 10_000 - read, "cache_read": read, "output": min(output, admitted.max_tokens)}
        event = admitted.event(**usage)
        cost = usage["uncached"] * 3000 + read * 300 + usage["output"] * 15_000
        if name == "end":  # otherwise the gateway died before the release
            await local_gateway.budget_admission.early.end(admitted, TokenCounts(**usage))
        model.ended.append((admitted, event, cost if name == "end" else admitted.reserved_nano or 0))
    elif name in ("settle", "fail") and model.ended:
        admitted, event, _ = model.ended.pop(given[0] % len(model.ended))
        messages = [event, admitted.event("failed", uncached=0)][: 1 + (name == "fail")]
        await sync_to_async(settle_events)(*messages)
        model.events += messages
        cost = event.usage.uncached * 3000 + event.usage.cache_read * 300 + event.usage.output * 15_000
        model.used_femto += 0 if name == "fail" else cost * 10**6
    elif name == "repeat" and model.events:
        await sync_to_async(settle_events)(model.events[given[0] % len(model.events)])


async def _check(
    local_gateway: BudgetGateway, model: Model, budget_id: int, operations: Sequence[tuple[Any, ...]]
) -> None:
    for operation in operations:
        await _operate(local_gateway, model, *operation)
        await see()
        if model.running or model.ended or model.events:
            found = await sync_to_async(budget_period)(budget_id)
            assert (found.used, found.reserved) == (model.used_femto, model.reserved)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=4, max_size=24))
def test_exactly_the_requests_that_fit_are_admitted(
    url: str, key: ApiKeySnapshot, budget: Any, operations: list[tuple[Any, ...]]
) -> None:
    """At every step, a request is admitted exactly if used + reserved + its amount is within the limit. Running
    requests reserve their amount, and ended ones the amount they used, settled or not."""
    with all_tenants_scope(BypassReason.COMMAND):
        Budget.objects.all_tenants().update(active=False)
    made = budget(amount=3 * RESERVED)

    async def life() -> None:
        async with budget_gateway(url, key) as local_gateway:
            await _check(local_gateway, Model(3 * RESERVED), made, operations)

    run(life())
