"""Which digests of prefix caches the dispatch monitor reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, encode
from inference_worker.contract.prefix_digest import NO_DIGEST, digest_key, hash_block, make_digest
from millrace.gateway.dispatch import monitor
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.monitor import DispatchMonitor

TOKENS = list(range(64))


@pytest_asyncio.fixture
async def dispatcher(broker: redis.Redis) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(broker, broker, "gw-a", queue_seconds=1.0, retention_seconds=60)
    yield dispatcher
    dispatcher.commands.close()


@pytest.fixture
def reads(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the keys of each read of several values."""
    found: list[list[str]] = []
    mget = broker.mget

    async def record(keys: list[str]) -> Any:
        found.append(keys)
        return await mget(keys)

    monkeypatch.setattr(broker, "mget", record)
    return found


async def send(broker: redis.Redis, beat: int, **versions: int | None) -> None:
    """Send a heartbeat of each of these replicas, with the versions of their digests."""
    for name, version in versions.items():
        payload = encode(Heartbeat(beat, "m", True, False, 0, 0, 8, 10, 0, digest=version))
        await broker.hset(REPLICAS_KEY, name, payload)


async def store(broker: redis.Redis, name: str, version: int, *, is_cached: bool = True) -> None:
    hashes = [hash_block(None, TOKENS[:16], b"salt")] if is_cached else []
    digest = msgspec.structs.replace(make_digest(16, hashes), version=version)
    await broker.set(digest_key(name), encode(digest))


def predict(dispatcher: Dispatcher, *names: str) -> dict[str, int]:
    return dispatcher.placement.prefixes.cached_tokens(TOKENS, b"salt", names)


async def test_digests_are_read_only_if_their_version_has_changed(
    broker: redis.Redis, dispatcher: Dispatcher, reads: list[list[str]]
) -> None:
    watch = DispatchMonitor(dispatcher)
    await store(broker, "a", 1)
    await store(broker, "b", 1)
    await store(broker, "old", NO_DIGEST)
    for beat in (1, 2):
        await send(broker, beat, a=1, b=1, none=NO_DIGEST, old=None)
        await watch._exchange_heartbeats()
    await watch._read_digests()
    assert predict(dispatcher, "a", "b", "none", "old") == {"a": 16, "b": 16, "old": 16}
    reads.clear()
    await watch._read_digests()
    assert reads == [[digest_key("old")]], "a worker of an earlier release reports no version"
    await store(broker, "b", 2, is_cached=False)
    await send(broker, 3, a=1, b=2, none=NO_DIGEST, old=None)
    await watch._exchange_heartbeats()
    reads.clear()
    await watch._read_digests()
    assert sorted(key for keys in reads for key in keys) == [digest_key("b"), digest_key("old")]
    assert predict(dispatcher, "a", "b") == {"a": 16, "b": 0}


async def test_a_digest_that_was_not_written_yet_is_read_again(
    broker: redis.Redis, dispatcher: Dispatcher, reads: list[list[str]]
) -> None:
    watch = DispatchMonitor(dispatcher)
    await store(broker, "a", 1, is_cached=False)
    for beat in (1, 2):
        await send(broker, beat, a=2)
        await watch._exchange_heartbeats()
    await watch._read_digests()
    assert predict(dispatcher, "a") == {"a": 0}
    await store(broker, "a", 2)
    await watch._read_digests()
    assert predict(dispatcher, "a") == {"a": 16}
    reads.clear()
    await watch._read_digests()
    assert reads == []


async def test_a_replica_that_is_unloaded_or_lost_has_no_digest(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    watch = DispatchMonitor(dispatcher)
    for name in ("a", "b"):
        await store(broker, name, 1)
    for beat in (1, 2):
        await send(broker, beat, a=1, b=1)
        await watch._exchange_heartbeats()
    await watch._read_digests()
    await send(broker, 3, a=NO_DIGEST)
    await broker.hdel(REPLICAS_KEY, "b")
    await watch._exchange_heartbeats()
    await watch._read_digests()
    assert predict(dispatcher, "a", "b") == {}


async def test_many_digests_are_read_in_several_parts(
    broker: redis.Redis, dispatcher: Dispatcher, reads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "DIGESTS_PER_READ", 2)
    watch = DispatchMonitor(dispatcher)
    names = [f"r-{number}" for number in range(5)]
    for name in names:
        await store(broker, name, 1)
    for beat in (1, 2):
        await send(broker, beat, **dict.fromkeys(names, 1))
        await watch._exchange_heartbeats()
    reads.clear()
    await watch._read_digests()
    assert sorted(map(len, reads)) == [1, 2, 2]
    assert predict(dispatcher, *names) == dict.fromkeys(names, 16)
