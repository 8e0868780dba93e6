"""Wrong API keys are limited per address; valid keys behind the same address always pass."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import cache
from rest_framework.test import APIClient

from millrace.gateway.auth import authentication
from millrace.gateway.core.errors import ApiError
from tenants import actions
from tenants import authentication as management
from tenants.keys import wrong_keys
from tenants.keys.wrong_keys import WrongKeyThrottle
from tenants.limits import process_buckets
from tests.support.gateway.watched_keys import Watched
from tests.support.rows import only_project
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("close_connection")]
NAT = "203.0.113.7"


async def outcome(watched: Watched, secret: str, address: str = NAT) -> int:
    try:
        await watched.keys.authenticate({b"x-api-key": secret.encode()}, "inference", address)
    except ApiError as rejected:
        if rejected.status == 429:
            assert 1 <= int(dict(rejected.headers())[b"retry-after"]) <= 6
        return rejected.status
    return 200


async def changes_applied(watched: Watched) -> None:
    """Wait for a poll that starts now or later. Until then, a new key's change may still clear it from the cache."""
    now = time.monotonic()
    await eventually_async(lambda: watched.keys._polled_at >= now)


@pytest.fixture
def throttle(watched: Watched) -> WrongKeyThrottle:
    watched.keys._wrong_keys = WrongKeyThrottle(per_minute=10)
    return watched.keys._wrong_keys


@pytest.fixture
def queries(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of hashes of each key lookup in the database."""
    made: list[int] = []
    real = watched.keys._read_rows

    async def counted(hashes: Any) -> dict[bytes, bytes]:
        made.append(len(hashes))
        return await real(hashes)

    monkeypatch.setattr(watched.keys, "_read_rows", counted)
    monkeypatch.setattr(watched.keys._paced, "_read_rows", counted)
    return made


async def test_300_wrong_keys_are_throttled_and_valid_ones_behind_the_same_address_pass(
    watched: Watched, new_key: Any, throttle: WrongKeyThrottle, queries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "FRESH_SECONDS", 60.0)  # a busy machine may poll later than after 0.75 s
    _, cached = await sync_to_async(new_key)()
    _, uncached = await sync_to_async(new_key)()
    await changes_applied(watched)
    assert await outcome(watched, cached) == 200
    queries.clear()
    wrong = [outcome(watched, f"sk-mr-wrong-{n}") for n in range(300)]
    valid = [outcome(watched, each) for each in (cached, uncached) for _ in range(20)]
    found = await asyncio.gather(*wrong, *valid)
    assert Counter(found[:300]) == {401: 10, 429: 290}
    assert set(found[300:]) == {200}
    # Ten lookups within the limit; the rest, and those of the valid key, in batches. A change may repeat a batch.
    assert len([size for size in queries if size > 2]) <= 3
    assert len(queries) <= 14
    assert (throttle.rejected, throttle.throttled) == (10, 290)
    assert await outcome(watched, "sk-mr-wrong", address="203.0.113.8") == 401


async def test_a_valid_key_is_not_counted(watched: Watched, new_key: Any, throttle: WrongKeyThrottle) -> None:
    _, secret = await sync_to_async(new_key)()
    for _ in range(50):
        watched.keys._cache.clear()
        assert await outcome(watched, secret) == 200
    assert [await outcome(watched, f"sk-mr-{n}") for n in range(11)] == [401] * 10 + [429]


async def test_the_same_wrong_key_counts_each_time(watched: Watched, throttle: WrongKeyThrottle) -> None:
    assert [await outcome(watched, "sk-mr-wrong") for _ in range(12)] == [401] * 10 + [429] * 2


async def test_wrong_keys_do_not_evict_valid_ones(
    watched: Watched, new_key: Any, throttle: WrongKeyThrottle, queries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "CACHED_KEYS", 20)
    monkeypatch.setattr(authentication, "CACHED_UNKNOWN_KEYS", 20)
    monkeypatch.setattr(authentication, "FRESH_SECONDS", 60.0)  # a busy machine may poll later than after 0.75 s
    _, secret = await sync_to_async(new_key)()
    await changes_applied(watched)
    assert await outcome(watched, secret) == 200
    await asyncio.gather(*(outcome(watched, f"sk-mr-{n}") for n in range(100)))
    queries.clear()
    assert await outcome(watched, secret) == 200
    assert queries == []
    assert len(watched.keys._unknown) <= 20


async def test_wrong_playground_tokens_are_throttled(watched: Watched, throttle: WrongKeyThrottle) -> None:
    found = [watched.keys.reject_playground_token(NAT, "wrong").status for _ in range(12)]
    assert found == [401] * 10 + [429] * 2


def test_the_throttle_refills_and_an_ipv6_network_is_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(wrong_keys.time, "monotonic", lambda: now)
    throttle = WrongKeyThrottle(per_minute=2)
    assert [throttle.take(f"2001:db8::{n}") for n in range(3)] == [True, True, False]
    assert throttle.retry_after("2001:db8::9") == 30
    assert throttle.take("2001:db8:0:1::1")
    now += 31
    assert throttle.take("2001:db8::1")
    assert not throttle.take("2001:db8::1")
    now += 1e6
    assert [throttle.take("2001:db8::1") for _ in range(3)] == [True, True, False]
    for n in range(process_buckets.MAX_NAMES + 10):
        throttle.take(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
    assert len(throttle._buckets._buckets) == process_buckets.MAX_NAMES


def test_the_management_api_throttles_wrong_keys_only(client: APIClient, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.clear()
    throttle = WrongKeyThrottle(per_minute=10)
    monkeypatch.setattr(management, "process_throttle", lambda: throttle)
    tenant = actions.do_create_tenant("acme", "Acme")
    _, secret = actions.do_create_api_key(only_project(tenant), "k", scopes=("manage",))
    found = [client.get("/api/usage", headers={"x-api-key": f"sk-mr-{n}"}) for n in range(15)]
    assert [each.status_code for each in found] == [401] * 10 + [429] * 5
    assert 1 <= int(found[-1]["retry-after"]) <= 6
    assert found[-1]["content-type"] == "application/problem+json"
    assert [client.get("/api/usage", headers={"x-api-key": secret}).status_code for _ in range(15)] == [200] * 15
    assert client.get("/api/usage", headers={"x-api-key": "sk-mr-x"}, REMOTE_ADDR="203.0.113.9").status_code == 401
