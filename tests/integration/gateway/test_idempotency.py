"""Records of idempotency keys in Valkey: ownership of a call, and the stored response."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis

from millrace.gateway.admission import idempotency
from millrace.gateway.admission.idempotency import IdempotencyStore, IdempotentCall, Replay, StoredResponse
from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot

KEY = ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(), 1)
BODY = b"/v1/completions\0{}"


@pytest_asyncio.fixture
async def store(broker: redis.Redis) -> AsyncIterator[IdempotencyStore]:
    store = IdempotencyStore(broker)
    await store.start()
    yield store
    await store.stop()


async def answer(once: IdempotentCall, body: bytes = b"yes", request_id: str = "req_1") -> None:
    once.record_start(200, [(b"content-type", b"text/plain")])
    once.record_body(body)
    await once.store_response(request_id)
    await once.end()


async def rejection(
    store: IdempotencyStore, name: bytes = b"n", sent: bytes = BODY, key: ApiKeySnapshot = KEY
) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        await store.begin(key, name, sent, "req_other")
    assert (exc_info.value.status, exc_info.value.code) == (409, "idempotency_conflict")
    return exc_info.value


async def replayed(store: IdempotencyStore, name: bytes = b"n") -> StoredResponse:
    with pytest.raises(Replay) as exc_info:
        await store.begin(KEY, name, BODY, "req_other")
    return exc_info.value.response


async def test_one_of_many_concurrent_calls_runs(store: IdempotencyStore, broker: redis.Redis) -> None:
    other = IdempotencyStore(broker)  # of another gateway
    calls = [(store, other)[n % 2].begin(KEY, b"n", BODY, f"req_{n}") for n in range(50)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    (once,) = [each for each in found if isinstance(each, IdempotentCall)]
    assert all(isinstance(each, ApiError) and each.retry_after == 1 for each in found if each is not once)
    await answer(once)
    assert await replayed(other) == StoredResponse("req_1", 200, [(b"content-type", b"text/plain")], b"yes")
    assert (await rejection(store, sent=BODY + b" ")).retry_after is None


async def test_idempotency_keys_belong_to_an_api_key(store: IdempotencyStore) -> None:
    await answer(await store.begin(KEY, b"n", BODY, "req_1"))
    for other in ({"key_id": 2}, {"key_id": 2, "tenant_id": 2}):
        assert (
            await store.begin(msgspec.structs.replace(KEY, **other), b"n", b"other", "req_2")
        ).unfinished_request_id is None


async def test_a_failed_call_can_be_repeated(store: IdempotencyStore) -> None:
    once = await store.begin(KEY, b"n", BODY, "req_1")
    once.failed = once.keeps_running = True
    await answer(once)
    again = await store.begin(KEY, b"n", b"even another body", "req_2")
    assert again.unfinished_request_id is None
    await again.end()  # its client disconnected before the request ran
    assert (await store.begin(KEY, b"n", BODY, "req_3")).unfinished_request_id is None


async def test_a_running_request_is_resumed(store: IdempotencyStore) -> None:
    once = await store.begin(KEY, b"n", BODY, "req_1")
    once.keeps_running = True
    await once.end()
    await rejection(store, sent=b"another body")
    second = await store.begin(KEY, b"n", BODY, "req_2")
    assert second.unfinished_request_id == "req_1"
    await rejection(store)
    second.keeps_running = True
    await second.end()  # this client disconnects too
    third = await store.begin(KEY, b"n", BODY, "req_3")
    assert third.unfinished_request_id == "req_1"
    await third.restart("req_3")  # it produced nothing
    third.keeps_running = True
    await third.end()
    assert (await store.begin(KEY, b"n", BODY, "req_4")).unfinished_request_id == "req_3"


async def test_calls_of_a_dead_gateway_are_taken_over(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "LEASE_MS", 2000)
    dead, living = IdempotencyStore(broker), IdempotencyStore(broker)
    await dead.start()
    once = await dead.begin(KEY, b"n", BODY, "req_1")
    await asyncio.sleep(2.5)
    await rejection(living)  # its lease is renewed
    await dead.stop()
    await asyncio.sleep(2.1)
    taken = await living.begin(KEY, b"n", BODY, "req_2")
    assert taken.unfinished_request_id == "req_1"
    with pytest.raises(ApiError):
        await once.restart("req_9")
    await answer(once, b"late")  # it is alive after all
    await rejection(living)
    await answer(taken, b"first")
    assert (await replayed(living)).body == b"first"


async def test_a_too_long_response_is_not_stored_and_not_repeated(store: IdempotencyStore) -> None:
    once = await store.begin(KEY, b"n", BODY, "req_1")
    once.record_body(b"x" * idempotency.MAX_RESPONSE_BYTES)
    await answer(once)
    assert (await rejection(store)).retry_after is None


async def stored(broker: redis.Redis) -> int:
    return len(await broker.keys("millrace:idempotency:*:answer"))


async def test_the_oldest_responses_are_deleted_first(
    store: IdempotencyStore, broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_TENANT_BYTES", 350_000)
    for n in range(6):
        await answer(await store.begin(KEY, b"%d" % n, BODY, f"req_{n}"), os.urandom(100_000))
    assert await stored(broker) == 3
    for n in range(3):
        await rejection(store, b"%d" % n)  # and is not repeated
    for n in range(3, 6):
        await replayed(store, b"%d" % n)
    held = sum([await broker.strlen(name) for name in await broker.keys("millrace:idempotency:*:answer")])
    assert held == int(await broker.get("millrace:idempotency:{1}:sum") or 0) <= 350_000
    assert 0 < await broker.ttl("millrace:idempotency:{1}:sum") <= idempotency.RETENTION_SECONDS
    assert all(
        [
            0 < await broker.ttl(name) <= idempotency.RETENTION_SECONDS
            for name in await broker.keys("millrace:idempotency:*")
        ]
    )


@pytest.mark.parametrize("name", [b"", b"x" * 256])
async def test_the_length_of_an_idempotency_key_is_limited(store: IdempotencyStore, name: bytes) -> None:
    with pytest.raises(ApiError) as exc_info:
        await store.begin(KEY, name, BODY, "req_1")
    assert (exc_info.value.status, exc_info.value.param) == (400, "Idempotency-Key")
