"""Invariants of budgets under random errors: operations in any order, killed gateways and settlers, lost responses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from asgiref.sync import sync_to_async
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.models import Budget, BudgetPeriod
from billing.reservations import reservations
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.budget_gateways import Admitted, BudgetGateway, budget_gateway
from tests.support.gateway.budgets import (
    RESERVED,
    check_invariants,
    reclaim_all,
    run,
    settle_events,
    settle_in_a_thread,
)
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
LIMIT = 30 * RESERVED
see = sync_to_async(check_invariants)


class Killed(BaseException):
    """A simulated end of the settler's process."""


class World:
    """Gateways that start and die, requests that end in any order, and a settler."""

    def __init__(self, url: str, key: ApiKeySnapshot, chance: random.Random, running: AsyncExitStack) -> None:
        self.url, self.key, self.chance, self.running = url, key, chance, running
        self.gateways: list[BudgetGateway] = []
        self.flying: list[Admitted] = []
        self.settled: list[Any] = []

    async def start(self) -> None:
        name = f"gw-{self.chance.getrandbits(64):x}"
        self.gateways.append(await self.running.enter_async_context(budget_gateway(self.url, self.key, name)))

    async def admit(self) -> None:
        many = [self.chance.choice(self.gateways).admit(max_tokens=self._length()) for _ in range(4)]
        self.flying += [each for each in await asyncio.gather(*many) if isinstance(each, Admitted)]

    def _length(self) -> int | None:
        return self.chance.choice([None, 1, 500, 4096, 20_000])

    async def settle(self) -> None:
        """End some requests and settle them once or twice, together with earlier messages."""
        self.chance.shuffle(self.flying)
        ended = [self.flying.pop() for _ in range(min(len(self.flying), self.chance.randint(1, 6)))]
        events = [self._end(each) for each in ended]
        for each, event in zip(ended, events, strict=True):
            if self.chance.random() < 0.7:
                await self._release(each, event)
        again = self.chance.sample(self.settled, min(2, len(self.settled)))
        self.settled += events
        messages = [*events, *again, *self.chance.sample(events, len(events) // 2)]
        self.chance.shuffle(messages)
        await sync_to_async(settle_events)(*messages)

    def _end(self, admitted: Admitted) -> Any:
        output = min(admitted.max_tokens, 500)
        if self.chance.random() < 0.2:
            self.settled.append(
                admitted.event(uncached=10_000, output=output)
            )  # a completed event that loses against a failed one
            return admitted.event("failed", uncached=0)
        return admitted.event(uncached=10_000, output=output)

    async def _release(self, admitted: Admitted, event: Any) -> None:
        """Release the unused part at its gateway, or at one that has lost a response."""
        gateway = self.chance.choice(self.gateways)
        if event.outcome == "failed":  # it completed, and then its caller got an error
            event = admitted.event(uncached=10_000, output=min(admitted.max_tokens, 500))
        if self.chance.random() < 0.5:
            gateway.budget_admission.early.contend(admitted.budget_period_ids)
        await gateway.budget_admission.early.end(admitted, event.usage)

    async def end(self) -> None:
        """End and release some requests without settlement, some of them twice; then settle them in any order."""
        self.chance.shuffle(self.flying)
        ended = [self.flying.pop() for _ in range(min(len(self.flying), self.chance.randint(1, 6)))]
        events = [self._end(each) for each in ended]
        pairs = list(zip(ended, events, strict=True))
        for each, event in [*pairs, *self.chance.sample(pairs, len(pairs) // 2)]:
            await self._release(each, event)
        await see()
        self.settled += events
        if self.chance.random() < 0.5:  # concurrent settlement and release of the same request
            budget_periods = {budget_period for each in ended for budget_period in each.budget_period_ids}
            releases = [gateway.budget_admission.early.release(budget_periods) for gateway in self.gateways]
            await asyncio.gather(sync_to_async(settle_in_a_thread, thread_sensitive=False)(*events), *releases)

    async def settle_again(self) -> None:
        await sync_to_async(settle_events)(*self.chance.sample(self.settled, len(self.settled)))

    async def lose(self) -> None:
        """Replace a gateway that dies with its leases."""
        self.gateways.pop(self.chance.randrange(len(self.gateways)))
        await self.start()

    async def forget_requests(self) -> None:
        """Admit requests that are never dispatched."""
        self.flying = self.flying[: len(self.flying) // 2]

    async def break_database(self) -> None:
        """Lose one statement, or its response."""
        gateway = self.chance.choice(self.gateways)
        store = gateway.budget_admission._store
        ask, before = store._ask, self.chance.random() < 0.5

        async def broken(query: Any, parameters: Any) -> Any:
            store._ask = ask  # type: ignore[method-assign]
            if not before:
                await ask(query, parameters)
            raise psycopg.OperationalError("the connection is lost")

        store._ask = broken  # type: ignore[method-assign]

    async def kill_settler(self) -> None:
        """Kill the settler after its changes of budget periods, before the commit."""
        if not self.flying:
            return
        event = self._end(self.flying.pop())
        self.settled.append(event)

        def settle(*arguments: Any) -> set[int]:
            real(*arguments)
            raise Killed

        real = reservations.settle
        with patch.object(reservations, "settle", settle), contextlib.suppress(Killed):
            await sync_to_async(settle_events)(event)
        await see()
        await sync_to_async(settle_events)(event)

    async def reclaim(self) -> None:
        """Reclaim all leases, also active ones, since fencing tokens protect them."""
        await sync_to_async(reclaim_all)()


OFTEN = ("admit", "admit", "admit", "settle", "settle", "end", "end", "settle_again")
STEPS = (*OFTEN, "lose", "forget_requests", "break_database", "kill_settler", "reclaim")


async def live(url: str, key: ApiKeySnapshot, made: int, steps: Sequence[str], seed: int) -> None:
    async with AsyncExitStack() as running:
        world = World(url, key, random.Random(seed), running)
        for _ in range(3):
            await world.start()
        for step in steps:
            await getattr(world, step)()
            await see()
        while world.flying:
            await world.settle()
        await sync_to_async(settle_events)(*world.settled, *reversed(world.settled))
        await world.reclaim()
        await see()
        after = [each for each in await sync_to_async(unscoped(BudgetPeriod).all)() if each.budget_id == made]
        assert all(each.reserved == 0 for each in after)
        # Every request that fits is admitted: the rest is available immediately.
        await world.start()
        gateway = world.gateways[-1]
        rest = int(LIMIT - sum(each.used for each in after) // 10**6)
        if rest > 18_000:
            found = await gateway.admit(prompt=1, max_tokens=(rest - 3000) // 15_000)
            assert isinstance(found, Admitted), found
        await see()


@pytest.mark.parametrize("seed", range(2))
def test_a_long_random_sequence_of_operations(url: str, key: ApiKeySnapshot, budget: Any, seed: int) -> None:
    chance = random.Random(seed)
    made = budget(amount=LIMIT)
    budget(name="quota", unit="tokens", period="day", amount=10**9)
    run(live(url, key, made, [chance.choice(STEPS) for _ in range(50)], seed))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=25), seed=st.integers(0, 2**32))
def test_random_sequences_of_operations(
    url: str, key: ApiKeySnapshot, budget: Any, steps: list[str], seed: int
) -> None:
    with all_tenants_scope(BypassReason.COMMAND):  # every sequence has a separate budget
        Budget.objects.all_tenants().update(active=False)
    run(live(url, key, budget(amount=LIMIT), steps, seed))
