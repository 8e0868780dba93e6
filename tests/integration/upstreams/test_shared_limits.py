"""The limits of an upstream's credential, shared by several relays."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from inference_worker.contract import valkey
from inference_worker.contract.request import RequestError
from inference_worker.contract.upstream_limits import leases_key, limits_key, read_state
from inference_worker.worker.engine_client import is_last
from inference_worker.worker.relay import shared_limits
from inference_worker.worker.relay.shared_limits import Entry, SharedLimits, Wait
from tests.support.upstreams.protocol_server import Answer, ProtocolServer
from tests.support.upstreams.relay_harness import OPENAI, Harness
from tests.support.waiting import eventually, eventually_async


def limits(left: int, seconds: str, limit: int = 100) -> dict[str, str]:
    """Return the headers of a rate limit of requests."""
    values = {"limit": limit, "remaining": left, "reset": seconds}
    return {f"x-ratelimit-{name}-requests": str(value) for name, value in values.items()}


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


@pytest.fixture
def valkey_url(broker: redis.Redis) -> str:
    return os.environ["MILLRACE_VALKEY_URL"]


@pytest.fixture
def relays(server: ProtocolServer, valkey_url: str) -> Iterator[Callable[..., Harness]]:
    started: list[Harness] = []

    def start(**fields: Any) -> Harness:
        started.append(Harness(server, OPENAI, valkey_url=valkey_url, **fields))
        return started[-1]

    yield start
    for each in started:
        each.relay.close()
        assert not each.broken.is_set()


def requests_left(broker: redis.Redis) -> float | None:
    """Return the requests left in the only state, or None if it is not stored yet."""
    for key in broker.scan_iter("millrace:upstream_limits:*"):
        return read_state(broker.hgetall(key), 0.0).requests_left  # type: ignore[arg-type]
    return None


def test_a_rate_limit_of_one_relay_stops_the_others_for_this_credential(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    first, second = relays(), relays()
    server.answers += [Answer(status=429, headers={"retry-after": "30"})]
    assert isinstance(first.run(waits=False)[-1], RequestError)
    eventually(lambda: first.relay._limits.states)  # type: ignore[union-attr]
    (error,) = second.run(waits=False)
    assert isinstance(error, RequestError)
    assert (error.code, len(server.received)) == ("server_is_overloaded", 1)
    assert 25 < (error.retry_after or 0) <= 30
    assert not isinstance(second.run(name="own", credential=8)[-1], RequestError), "another credential has capacity"
    assert second.relay.metrics().counters["millrace_upstream_waits"] == {"retry_after": 1}


@pytest.mark.parametrize("credential", [7, 8])
@pytest.mark.parametrize(
    "answer",
    [Answer(status=429, headers={"retry-after": "999999999"}), Answer(headers=limits(0, "23h", limit=1))],
    ids=["retry-after", "reset"],
)
def test_an_upstream_pauses_a_credential_that_tenants_share_for_at_most_a_minute(
    server: ProtocolServer, relays: Callable[..., Harness], answer: Answer, credential: int
) -> None:
    first, second = relays(), relays()
    server.answers += [answer]
    first.run(waits=False, credential=credential)
    eventually(lambda: first.relay._limits.states)  # type: ignore[union-attr]
    (error,) = second.run(name="another tenant", waits=False, tenant=2, credential=credential)
    assert isinstance(error, RequestError)
    assert error.retry_after is not None
    if credential == 7:
        assert 50 < error.retry_after <= 60
    else:  # a tenant's own
        assert error.retry_after > 3500


def test_reported_limits_are_divided_between_relays_and_refill(
    server: ProtocolServer, relays: Callable[..., Harness], broker: redis.Redis
) -> None:
    first, second = relays(), relays()
    server.default = Answer(headers=limits(2, "98s"))  # refills one request each second
    first.run(name="learns")
    eventually(lambda: first.relay._limits.states)  # type: ignore[union-attr]
    server.default = Answer()
    ends = [relay.run(name=str(number), waits=False)[-1] for number, relay in enumerate((first, second, first, second))]
    assert [isinstance(end, RequestError) for end in ends] == [False, False, True, True]
    (error,) = second.run(name="now", waits=False)
    assert isinstance(error, RequestError)
    assert 0 < (error.retry_after or 0) <= 1
    began = time.monotonic()
    assert not isinstance(first.run(name="waits")[-1], RequestError)
    assert time.monotonic() - began < 5
    (key,) = broker.scan_iter("millrace:upstream_limits:*")
    assert key.decode() == limits_key(server.url, "model-x", 7)
    assert 60 < broker.ttl(key) <= 98 + 60  # type: ignore[operator]


def test_a_request_that_waits_for_capacity_uses_no_slot(server: ProtocolServer, relays: Callable[..., Harness]) -> None:
    relay = relays(concurrency=1)
    server.answers.append(Answer(status=429, headers={"retry-after": "30"}))
    relay.run(waits=False)
    eventually(lambda: relay.relay._limits.states)  # type: ignore[union-attr]
    waiting = relay.submit("waits")
    eventually(lambda: relay.relay.stats().held_back)
    assert relay.relay.stats().num_waiting == 1
    assert not isinstance(relay.run(name="own", credential=8)[-1], RequestError)
    relay.relay.cancel(waiting)
    assert is_last(relay.next())
    (error,) = relay.run(name="late", seconds=5)  # its deadline is before the limit's end
    assert isinstance(error, RequestError)
    assert error.code == "server_is_overloaded"
    assert relay.relay.stats().held_back == 0


def test_the_concurrency_limit_of_a_credential_holds_for_all_relays(
    server: ProtocolServer, relays: Callable[..., Harness], broker: redis.Redis
) -> None:
    hold = threading.Event()
    server.default = Answer(holds=hold)
    started = [relays(max_concurrency=3), relays(max_concurrency=3)]
    for number in range(5):
        for relay in started:
            relay.submit(str(number))
    eventually(lambda: server.open_streams == 3)
    time.sleep(2 * shared_limits.POLL_SECONDS)  # so that a relay that ignores the limit sends a fourth one
    assert (server.open_streams, broker.zcard(leases_key(7))) == (3, 3)
    started[0].submit("refused", waits=False)
    while not isinstance(outcome := started[0].next(), RequestError):  # the running ones send words meanwhile
        pass
    assert outcome.code == "server_is_overloaded"
    hold.set()
    for relay in started:
        ends = [relay.outcomes()[-1] for _ in range(5)]
        assert not any(isinstance(end, RequestError) for end in ends)
    assert server.max_open_streams == 3
    eventually(lambda: broker.zcard(leases_key(7)) == 0)


def test_the_lease_of_a_killed_worker_expires_and_that_of_a_long_request_does_not(
    broker: redis.Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limits, "LEASE_MS", 2000)
    monkeypatch.setattr(shared_limits, "RENEW_SECONDS", 0.1)

    async def run() -> None:
        killed, other = (
            SharedLimits(valkey.connect_async(valkey_url, valkey.WORKER), "https://a.example/v1", "m") for _ in "12"
        )
        killed.start()
        other.start()
        assert isinstance(await killed.enter(7, 1, 10, 0.0), Entry)
        await asyncio.sleep(2.5)
        found = await other.enter(7, 1, 10, 0.0)
        assert isinstance(found, Wait), "the lease was renewed"
        assert found.reason == "concurrency"
        for task in killed._tasks:  # from now on nothing renews the lease
            task.cancel()
        entry = await other.enter(7, 1, 10, time.time() + 60)
        assert isinstance(entry, Entry)
        other.leave(entry)
        other.leave(entry)  # without effect
        assert isinstance(await other.enter(7, 1, 10, 0.0), Entry)
        await asyncio.gather(other.close(), killed.close())

    asyncio.run(run())


def test_later_requests_are_deducted_from_an_early_response(broker: redis.Redis, valkey_url: str) -> None:
    async def run() -> None:
        shared = SharedLimits(valkey.connect_async(valkey_url, valkey.WORKER), "https://a.example/v1", "m")
        shared.start()
        first = await shared.enter(7, None, 10, 0.0)
        assert isinstance(first, Entry)
        reported = shared_limits.ReportedLimit
        shared.learn(first, [reported("requests", 1000, 500, 3600.0), reported("tokens", 10**6, 10**5, 3600.0)], None)
        entries = [await shared.enter(7, None, 10, 0.0) for _ in range(5)]
        assert all(isinstance(entry, Entry) for entry in entries)
        second = entries[1]
        assert isinstance(second, Entry)
        shared.learn(second, [reported("requests", 1000, 499, 3600.0), reported("tokens", 10**6, 99_900, 3600.0)], None)
        await shared.enter(7, None, 10, 0.0)  # after the calls before it
        (key,) = broker.scan_iter("millrace:upstream_limits:*")
        state = read_state(broker.hgetall(key), 0.0)  # type: ignore[arg-type]
        # Three requests were sent after the second one, and one after the response.
        assert (state.requests_left, state.tokens_left) == (499 - 3 - 1, 99_900 - 30 - 10)
        await shared.close()

    asyncio.run(run())


def test_a_request_with_much_capacity_does_not_wait_for_its_check(broker: redis.Redis, valkey_url: str) -> None:
    async def run() -> None:
        shared, other = (
            SharedLimits(valkey.connect_async(valkey_url, valkey.WORKER), "https://a.example/v1", "m") for _ in range(2)
        )
        shared.start()
        other.start()
        first = await shared.enter(7, None, 10, 0.0)
        assert isinstance(first, Entry)
        assert first.sent is not None
        second = await asyncio.wait_for(shared.enter(7, None, 10, 0.0), 0.001)
        assert isinstance(second, Entry)
        assert second.sent is None  # its check runs
        reported = shared_limits.ReportedLimit("requests", 1000, 990, 3600.0)
        for _ in range(3):
            shared.learn(second, [reported], None)  # the last one replaces those that were not sent
        await eventually_async(lambda: requests_left(broker) == 990)
        third = await shared.enter(7, None, 10, 0.0)
        assert isinstance(third, Entry)
        await eventually_async(lambda: third.sent is not None)
        assert third.sent == 1
        assert requests_left(broker) == 989
        entered = await other.enter(7, None, 10, 0.0)
        assert isinstance(entered, Entry)
        other.learn(entered, [], 30.0)
        await other.enter(7, None, 10, 0.0)  # after the call before it
        unchecked = await shared.enter(7, None, 10, 0.0)
        assert isinstance(unchecked, Entry)  # its check finds the pause
        await eventually_async(lambda: 7 not in shared._ample)
        assert isinstance(await shared.enter(7, None, 10, 0.0), Wait)
        shared.learn(unchecked, [shared_limits.ReportedLimit("requests", 1000, 980, 3600.0)], None)
        # The check did not say how many requests were sent before it, so none is deducted.
        await eventually_async(lambda: requests_left(broker) == 980)
        await asyncio.gather(shared.close(), other.close())

    asyncio.run(run())


def test_without_valkey_only_a_concurrency_limit_stops_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        shared = SharedLimits(valkey.connect_async("redis://127.0.0.1:1/0", valkey.PAGES), "https://a.example/v1", "m")
        shared.start()
        assert isinstance(await shared.enter(7, None, 10, 0.0), Entry)
        found = await shared.enter(7, 2, 10, 0.0)
        assert isinstance(found, Wait)
        assert found.reason == "unavailable"
        await shared.close()

    asyncio.run(run())


def test_a_lost_connection_is_opened_again(broker: redis.Redis, valkey_url: str) -> None:
    async def run() -> None:
        shared = SharedLimits(valkey.connect_async(valkey_url, valkey.WORKER), "https://a.example/v1", "m")
        shared.start()
        for credential in (7, 8, 9):
            assert isinstance(await shared.enter(credential, 1, 10, 0.0), Entry)
            broker.client_kill_filter(_type="normal", skipme=True)
        await shared.close()
        assert not broker.exists(*map(leases_key, (7, 8, 9)))

    asyncio.run(run())
