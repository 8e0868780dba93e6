"""/readyz reads the current state of the broker, not that of the last check of the dispatch monitor."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.contract import env
from inference_worker.contract.exits import REPORT_EXIT, report_exit_args
from inference_worker.contract.host import host_name
from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, ReplicaPhase, encode
from millrace.apps.deployments.gateway_heartbeat import decode_gateway_heartbeat, gateway_heartbeat_key
from millrace.environment.configuration import PlatformSettings
from millrace.gateway.app import Gateway
from millrace.gateway.auth.stale_window import StaleWindow
from millrace.gateway.dispatch import monitor
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.http.endpoints.health import Readyz
from tests.support.gateway.http_calls import call

CHECK = "model m"


@pytest_asyncio.fixture
async def gateway(broker: redis.Redis) -> AsyncIterator[Gateway]:
    settings = env.load(PlatformSettings, {**os.environ, "MILLRACE_MODELS": "m=embedded"})
    gateway = Gateway(settings, {})
    yield gateway
    await gateway.control_database.close()
    await gateway.broker.aclose()
    await gateway.blocking_broker.aclose()


async def look(watch: DispatchMonitor, broker: redis.Redis, beat: int) -> None:
    """Run one check of the dispatch monitor after a heartbeat of each of two replicas."""
    for name in ("r1", "r2"):
        payload = encode(Heartbeat(beat, "m", True, False, 0, 0, 8, 10, 0))
        await broker.hset(REPLICAS_KEY, name, payload)  # type: ignore[misc]
    await watch._exchange_heartbeats()


async def test_an_exit_counts_before_the_monitor_has_seen_it(broker: redis.Redis, gateway: Gateway) -> None:
    watch = DispatchMonitor(gateway.dispatcher)
    for beat in (1, 2):
        await look(watch, broker, beat)
    assert (await gateway.readiness()).checks[CHECK] == "ok"
    await broker.eval(REPORT_EXIT, *report_exit_args("r1"))  # type: ignore[misc]
    assert (await gateway.readiness()).checks[CHECK] == "ok"
    await broker.hdel(REPLICAS_KEY, "r2")  # type: ignore[misc]
    assert (await gateway.readiness()).checks[CHECK] == "no replica is ready"
    await look(watch, broker, 3)  # a heartbeat of the replica that has exited was on its way
    assert list(gateway.dispatcher.replicas.find_ready("m")) == ["r2"]


async def test_a_suspected_replica_is_not_ready(broker: redis.Redis, gateway: Gateway) -> None:
    watch = DispatchMonitor(gateway.dispatcher)
    for beat in (1, 2):
        await look(watch, broker, beat)
    replicas = gateway.dispatcher.replicas
    for replica in replicas._replicas.values():
        replica.changed_at -= 3
    await watch._exchange_heartbeats()
    checks = (await gateway.readiness()).checks
    assert (checks["valkey"], checks[CHECK]) == ("ok", "no replica is ready")
    await look(watch, broker, 3)
    assert (await gateway.readiness()).checks[CHECK] == "ok"


async def test_a_model_on_demand_is_ready_while_it_is_not_loaded(broker: redis.Redis, gateway: Gateway) -> None:
    watch, found = DispatchMonitor(gateway.dispatcher), []
    beats = [
        (ReplicaPhase.LOADING, 0),
        (ReplicaPhase.UNLOADED, 5000),
        (ReplicaPhase.LOADING, 5000),
        (ReplicaPhase.FAILED, 5000),
    ]
    for number, (phase, load_ms) in enumerate(beats):
        beat = Heartbeat(number, "m", False, False, 0, 0, 0, 0, 0, phase=phase, load_ms=load_ms)
        await broker.hset(REPLICAS_KEY, "r1", encode(beat))  # type: ignore[misc]
        await watch._exchange_heartbeats()
        found.append((await gateway.readiness()).checks[CHECK])
    assert found == ["no replica is ready", "ok", "ok", "no replica is ready"]


async def test_a_model_without_a_replica_makes_no_gateway_unready(
    broker: redis.Redis, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gateways see the same replicas, so one restarting worker would remove all of them from a balancer."""
    monkeypatch.setattr("millrace.gateway.http.consumer.running_gateway", lambda: gateway)
    await make_ready(gateway)
    response = await call(Readyz, "GET", "/readyz")
    assert (response.status, response.json()["status"]) == (200, "ready")
    assert response.json()["checks"][CHECK] == "no replica is ready"
    response = await call(Readyz, "GET", "/readyz", "models=all")
    assert (response.status, response.json()["status"]) == (503, "not ready")
    await look(gateway.monitor, broker, 1)
    await look(gateway.monitor, broker, 2)
    response = await call(Readyz, "GET", "/readyz", "models=all")
    assert (response.status, response.json()["checks"][CHECK]) == (200, "ok")
    assert (await call(Readyz, "GET", "/readyz", "models=some")).status == 400


async def test_a_gateway_is_unready_until_its_own_data_is_loaded(gateway: Gateway) -> None:
    await gateway.control_database.open()
    own = (await gateway.readiness()).own
    loaded = {"postgres": "ok", "valkey": "ok", "disk": "ok"}
    assert own == loaded | dict.fromkeys(("prices", "catalog", "replicas"), "not loaded yet")
    assert not (await gateway.readiness()).is_ready()
    await make_ready(gateway)
    assert (await gateway.readiness()).is_ready()


async def test_a_gateway_stays_ready_while_cached_keys_are_valid_without_postgresql(gateway: Gateway) -> None:
    await make_ready(gateway)
    await gateway.control_database.close()
    readiness = await gateway.readiness()
    assert (readiness.own["postgres"], readiness.is_ready()) == ("unreachable", False)
    gateway.stale_window.note_poll(time.monotonic())
    assert not (await gateway.readiness()).is_ready()  # the setting is 0
    gateway.stale_window = StaleWindow(60.0)
    assert not (await gateway.readiness()).is_ready()  # no poll has succeeded
    gateway.stale_window.note_poll(time.monotonic())
    readiness = await gateway.readiness()
    assert (readiness.own["postgres"], readiness.is_ready()) == ("stale", True)


async def make_ready(gateway: Gateway) -> None:
    """Load what the gateway needs itself, as its tasks do after its start."""
    await gateway.control_database.open()
    gateway.admission.budgets.has_prices = True
    await gateway.catalog.update()
    for _ in range(monitor.KNOWN_AFTER_ROUNDS):
        await gateway.monitor._exchange_heartbeats()


async def test_the_heartbeat_has_the_state_of_the_machine(broker: redis.Redis, gateway: Gateway) -> None:
    key = gateway_heartbeat_key(gateway.id)
    await gateway.monitor._exchange_heartbeats()
    assert decode_gateway_heartbeat(await broker.get(key)).host is None, "it was not read yet"
    await gateway.disk.start()
    await gateway.monitor._exchange_heartbeats()
    await gateway.disk.stop()
    host = decode_gateway_heartbeat(await broker.get(key)).host
    assert host is not None
    assert (host.name, host.min_free) == (host_name(), gateway.settings.min_free_disk)
