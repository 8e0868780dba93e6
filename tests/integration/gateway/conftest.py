"""The gateway's event loop, Valkey for asynchronous tests, and a key store that follows changes of keys."""

from __future__ import annotations

import asyncio
import time
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import redis.asyncio as redis
import uvloop
from asgiref.sync import sync_to_async
from psycopg_pool import AsyncConnectionPool

from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from millrace.gateway.dispatch.dispatcher import Dispatcher
    from tenants.models import ApiKey
    from tests.support.gateway.replica import Replica
    from tests.support.gateway.service_gates import Gate
    from tests.support.gateway.watched_keys import Watched


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Run asynchronous tests on uvloop, as the gateway does. It closes pipes and sockets differently from asyncio."""
    return {"uvloop": _new_loop}


def _new_loop() -> AbstractEventLoop:
    """Return a loop whose tasks end with a test's timeout, which uvloop reports to its exception handler only."""
    loop = uvloop.new_event_loop()

    def handle(loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(context.get("exception"), pytest.fail.Exception):
            for task in asyncio.all_tasks(loop):
                task.cancel()

    loop.set_exception_handler(handle)
    return loop


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check replicas ten times a second instead of twice: a test waits until a replica has changed its heartbeat."""
    from millrace.gateway.dispatch import monitor

    monkeypatch.setattr(monitor, "HEARTBEAT_SECONDS", 0.1)


@pytest.fixture
def broker(async_broker: redis.Redis) -> redis.Redis:
    return async_broker


@pytest_asyncio.fixture
async def close_connection() -> AsyncIterator[None]:
    """Close the database connection of the thread of `sync_to_async`."""
    from django.db import connection

    yield
    await sync_to_async(lambda: connection.close())()


@pytest_asyncio.fixture
async def database_pool() -> AsyncIterator[AsyncConnectionPool]:
    """A pool of connections to the tests' database, for the role that sees every tenant."""
    from tests.support.gateway.budgets import database_url

    pool = AsyncConnectionPool(database_url(), min_size=1, max_size=3, open=False, kwargs={"autocommit": True})
    async with pool:
        yield pool


@pytest_asyncio.fixture
async def watched(broker: redis.Redis, database_pool: AsyncConnectionPool) -> AsyncIterator[Watched]:
    from tests.support.gateway.watched_keys import Watched

    watched = Watched(broker, database_pool)
    await watched.watcher.start()
    yield watched
    await watched.watcher.stop()


@pytest.fixture
def new_key() -> Callable[..., tuple[ApiKey, str]]:
    """Return a function that creates a key of a new tenant for inference, and returns it and its secret."""
    from tenants import actions
    from tests.support.rows import only_project

    def new_key(**fields: Any) -> tuple[ApiKey, str]:
        tenant = actions.do_create_tenant(f"t{time.time_ns()}", "T")
        return actions.do_create_api_key(only_project(tenant), "k", scopes=("inference",), **fields)

    return new_key


@pytest_asyncio.fixture
async def gate(broker: redis.Redis) -> AsyncIterator[Gate]:
    from millrace.gateway.dispatch.monitor import DispatchMonitor
    from tests.support.gateway.service_gates import Gate

    gate = Gate(broker)
    watching = DispatchMonitor(gate.dispatcher)
    await gate.dispatcher.start()
    await watching.start()
    yield gate
    await gate.service.drain()
    await watching.stop()
    await gate.dispatcher.stop()


async def _replica(gate: Gate, name: str, model: str) -> Replica:
    from tests.support.gateway.replica import Replica

    replica = Replica(gate.broker, name, model=model)
    await eventually_async(lambda: gate.dispatcher.replicas.serving(model))
    return replica


@pytest_asyncio.fixture
async def a(gate: Gate) -> AsyncIterator[Replica]:
    """A replica of the model "a"."""
    replica = await _replica(gate, "ra", "a")
    yield replica
    replica.stall()


@pytest_asyncio.fixture
async def b(gate: Gate) -> AsyncIterator[Replica]:
    """A replica of the model "b"."""
    replica = await _replica(gate, "rb", "b")
    yield replica
    replica.stall()


@pytest_asyncio.fixture
async def dispatcher(broker: redis.Redis) -> AsyncIterator[Dispatcher]:
    from millrace.gateway.dispatch.dispatcher import Dispatcher
    from millrace.gateway.dispatch.monitor import DispatchMonitor
    from tests.support.gateway.replica import GATEWAY

    dispatcher = Dispatcher(broker, broker, GATEWAY, queue_seconds=5, retention_seconds=60, max_queued=3)
    watching = DispatchMonitor(dispatcher)
    await dispatcher.start()
    await watching.start()
    yield dispatcher
    await watching.stop()
    await dispatcher.stop()


@pytest_asyncio.fixture
async def replica(broker: redis.Redis, dispatcher: Dispatcher) -> AsyncIterator[Replica]:
    """A replica that serves the dispatcher's model."""
    from tests.support.gateway.dispatching import serving
    from tests.support.gateway.replica import Replica

    replica = Replica(broker, "r1")
    await eventually_async(lambda: serving(dispatcher))
    yield replica
    replica.stall()
