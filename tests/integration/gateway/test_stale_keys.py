"""PostgreSQL does not answer: cached keys stay valid for MILLRACE_STALE_KEY_SECONDS, and known revocations win."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
import pytest_asyncio
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from psycopg_pool import AsyncConnectionPool

from billing.reservations.budget_leases import LEASE_SECONDS
from millrace.gateway.auth import revocation
from millrace.gateway.auth.stale_window import StaleWindow
from millrace.gateway.core.errors import ApiError
from tenants import actions
from tenants.models import ApiKey
from tests.support.gateway.budget_gateways import Admitted, BudgetGateway
from tests.support.gateway.budgets import DOLLAR, RESERVED, database_url
from tests.support.gateway.database_proxy import DatabaseProxy
from tests.support.gateway.watched_keys import Watched
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table", "close_connection")]
OVERLOADED = "server_is_overloaded"
WINDOW = 600.0  # longer than any test
NewKey = Callable[[], tuple[ApiKey, str]]


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[DatabaseProxy]:
    proxy = DatabaseProxy(database_url())
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest_asyncio.fixture
async def start(broker: redis.Redis, proxy: DatabaseProxy) -> AsyncIterator[Callable[[float], Any]]:
    """Return a function that starts a key store behind the proxy, with a stale window."""
    pools, started = [], []

    async def start(seconds: float) -> Watched:
        pool = AsyncConnectionPool(proxy.url, min_size=1, max_size=3, open=False, kwargs={"autocommit": True})
        await pool.open(wait=False)
        pools.append(pool)
        watched = Watched(broker, pool, seconds)
        started.append(watched)
        await watched.watcher.start()
        return watched

    yield start
    proxy.restore()
    for watched in started:
        await watched.watcher.stop()
    for pool in pools:
        await pool.close()


async def make_keys(new_key: NewKey, number: int) -> list[tuple[ApiKey, str]]:
    return [await sync_to_async(new_key)() for _ in range(number)]


async def wait_until_stale(watched: Watched) -> None:
    """Wait until the last successful poll is too old for the caches."""
    await eventually_async(lambda: time.monotonic() - watched.keys._polled_at > revocation.POLL_SECONDS * 4)


@pytest.mark.parametrize("seconds", [0.0, WINDOW])
async def test_cached_keys_are_valid_for_the_time_of_the_setting(
    start: Any, proxy: DatabaseProxy, new_key: NewKey, seconds: float
) -> None:
    (_, cached), (_, uncached) = await make_keys(new_key, 2)
    watched = await start(seconds)
    await eventually_async(lambda: watched.keys._polled_at > 0)
    assert await watched.error_code(cached) is None
    proxy.refuse()
    await wait_until_stale(watched)
    assert await watched.error_code(cached) == (None if seconds else OVERLOADED)
    assert await watched.error_code(uncached) == OVERLOADED
    watched.stale_window._seconds = 0.0  # the time is over
    assert await watched.error_code(cached) == OVERLOADED
    proxy.restore()

    async def is_valid() -> bool:
        return await watched.error_code(cached) is None

    await eventually_async(is_valid)


async def test_a_database_that_hangs_delays_one_request_per_second_only(
    start: Any, proxy: DatabaseProxy, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, secret),) = await make_keys(new_key, 1)
    watched = await start(WINDOW)
    await eventually_async(lambda: watched.keys._polled_at > 0)
    assert await watched.error_code(secret) is None
    queries = 0
    look_up = watched.keys._look_up

    async def count(*args: Any, **options: Any) -> Any:
        nonlocal queries
        queries += 1
        return await look_up(*args, **options)

    monkeypatch.setattr(watched.keys, "_look_up", count)
    monkeypatch.setattr("millrace.gateway.auth.stale_window.ATTEMPT_SECONDS", 3600.0)
    proxy.hang()
    await wait_until_stale(watched)
    for _ in range(20):
        assert await watched.error_code(secret) is None
    assert queries == 1


async def test_a_revocation_reported_over_valkey_wins(start: Any, proxy: DatabaseProxy, new_key: NewKey) -> None:
    """A gateway is cut off from PostgreSQL, and the platform revokes a key through another one."""
    (revoked, secret), (_, other) = await make_keys(new_key, 2)
    watched = await start(WINDOW)
    await eventually_async(lambda: watched.keys._polled_at > 0)
    assert await watched.error_code(secret) is await watched.error_code(other) is None
    proxy.refuse()
    await wait_until_stale(watched)
    assert await watched.error_code(secret) is await watched.error_code(other) is None
    await sync_to_async(actions.do_revoke_api_key)(revoked)

    async def is_rejected() -> bool:
        return await watched.error_code(secret) == OVERLOADED

    await eventually_async(is_rejected)  # the tenant has changed, and what changed cannot be read
    assert await watched.error_code(other) is None
    proxy.restore()

    async def is_revoked() -> bool:
        return await watched.error_code(secret) == "invalid_api_key"

    await eventually_async(is_revoked)
    assert await watched.error_code(other) is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda key: actions.do_revoke_api_key(key), "invalid_api_key"),
        (lambda key: actions.do_suspend_tenant(key.tenant), "tenant_suspended"),
    ],
)
async def test_keys_that_were_known_to_be_invalid_stay_invalid(
    start: Any, proxy: DatabaseProxy, new_key: NewKey, change: Callable[[ApiKey], Any], code: str
) -> None:
    ((key, secret),) = await make_keys(new_key, 1)
    watched = await start(WINDOW)
    await eventually_async(lambda: watched.keys._polled_at > 0)
    assert await watched.error_code(secret) is None
    await sync_to_async(change)(key)

    async def is_rejected() -> bool:
        return await watched.error_code(secret) == code

    await eventually_async(is_rejected)
    proxy.refuse()
    await wait_until_stale(watched)
    assert await watched.error_code(secret) == code


async def test_a_change_that_was_read_but_not_looked_up_rejects_the_key(
    start: Any, proxy: DatabaseProxy, new_key: NewKey
) -> None:
    """The change feed has removed the cached key, and PostgreSQL fails before the next request."""
    ((key, secret),) = await make_keys(new_key, 1)
    watched = await start(WINDOW)
    await eventually_async(lambda: watched.keys._polled_at > 0)
    assert await watched.error_code(secret) is None
    await sync_to_async(actions.do_revoke_api_key)(key)
    await eventually_async(lambda: not watched.keys._cache)
    proxy.refuse()
    await wait_until_stale(watched)
    assert await watched.error_code(secret) == OVERLOADED


# Budgets.


def fail_database(gateway: BudgetGateway) -> None:
    """Let all queries of the gateway fail, and the last successful poll be too old, but in the stale window."""

    async def fail(query: Any, parameters: Any) -> Any:
        raise psycopg.OperationalError("connection refused")

    admission = gateway.budget_admission
    admission._store._ask = fail  # type: ignore[method-assign]
    polled_at = time.monotonic() - 5
    admission.note_poll(polled_at)
    admission._stale_window = StaleWindow(WINDOW)
    admission._stale_window.note_poll(polled_at)


def code_of(answer: Any) -> str | None:
    return None if isinstance(answer, Admitted) else answer.code


async def test_a_key_without_a_hard_budget_is_admitted(gateway: Any, budget: Any) -> None:
    local_gateway = await gateway()
    assert isinstance(await local_gateway.admit(), Admitted)
    fail_database(local_gateway)
    assert [code_of(await local_gateway.admit()) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("mode", ["soft", "dry_run"])
async def test_a_soft_budget_admits_without_a_lease(gateway: Any, budget: Any, mode: str) -> None:
    await sync_to_async(budget)(amount=100 * DOLLAR, mode=mode)
    local_gateway = await gateway()
    assert isinstance(await local_gateway.admit(), Admitted)
    fail_database(local_gateway)
    local_gateway.budget_admission._seal(list(local_gateway.budget_admission._chains.values()))
    admitted = await local_gateway.admit()
    assert isinstance(admitted, Admitted)
    assert (admitted.lease_id, list(admitted.budget_period_ids)) == (None, [])
    assert await local_gateway.budget_admission.return_unused(admitted)


async def test_a_hard_budget_admits_no_more_than_its_lease(gateway: Any, budget: Any) -> None:
    await sync_to_async(budget)(amount=100 * RESERVED)
    local_gateway = await gateway()
    first = await local_gateway.admit()
    assert isinstance(first, Admitted)
    (chain,) = local_gateway.budget_admission._chains.values()
    left = chain.lease.left.money // RESERVED
    assert left > 0
    fail_database(local_gateway)
    answers = [code_of(await local_gateway.admit()) for _ in range(left + 2)]
    assert answers == [None] * left + [OVERLOADED] * 2


async def test_a_hard_budget_admits_nothing_after_its_lease_has_expired(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    assert isinstance(await local_gateway.admit(), Admitted)
    fail_database(local_gateway)
    assert isinstance(await local_gateway.admit(), Admitted)
    (chain,) = local_gateway.budget_admission._chains.values()
    chain.lease.until -= LEASE_SECONDS
    assert code_of(await local_gateway.admit()) == OVERLOADED


async def test_a_key_whose_budgets_are_unknown_is_rejected(gateway: Any, budget: Any) -> None:
    local_gateway = await gateway()
    fail_database(local_gateway)
    assert code_of(await local_gateway.admit()) == OVERLOADED


async def test_without_the_setting_no_key_is_admitted(gateway: Any, budget: Any) -> None:
    local_gateway = await gateway()
    assert isinstance(await local_gateway.admit(), Admitted)
    fail_database(local_gateway)
    local_gateway.budget_admission._stale_window = StaleWindow()
    answer = await local_gateway.admit()
    assert isinstance(answer, ApiError)
    assert answer.code == OVERLOADED
