"""Rate limits with Valkey: exact, all or none, refunded, leased and counted."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission import admission, limits, rates
from millrace.gateway.admission.admission import AdmittedRequest, RateLimitAdmission
from millrace.gateway.admission.limits import counters_key
from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot
from tenants.limits.token_buckets import DAY, MINUTE, STATE, WINDOW_INDEXES, bucket, buckets_key
from tests.support.gateway.keys import MODEL, key_set, make_demand, make_key
from tests.support.waiting import eventually_async


def tenant_set(**limits: Any) -> LimitSetSnapshot:
    return LimitSetSnapshot(2, "tenant", **limits)


@pytest.fixture
def admit(broker: redis.Redis):
    """Admit a request; `admit.close` ends it."""
    gate = RateLimitAdmission(broker)
    count = 0

    async def admit(key: ApiKeySnapshot, **demand: Any) -> AdmittedRequest:
        nonlocal count
        count += 1
        return await gate.admit(make_demand(key, f"req_{count}", **demand))

    admit.close = gate.close  # type: ignore[attr-defined]
    return admit


async def level(broker: redis.Redis, set_id: int, name: str) -> int:
    return bucket(await broker.get(buckets_key(7, set_id)), name)[0]


async def shift(broker: redis.Redis, set_id: int, name: str, seconds: int) -> None:
    """Change the time of a daily bucket's last update."""
    numbers = list(STATE.unpack(await broker.get(buckets_key(7, set_id))))
    numbers[2 * WINDOW_INDEXES[name] + 1] += seconds
    await broker.set(buckets_key(7, set_id), STATE.pack(*numbers))


async def rejection(admit: Any, key: ApiKeySnapshot, **demand: Any) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        await admit(key, **demand)
    return exc_info.value


def header(admitted: AdmittedRequest | ApiError, name: str) -> str | None:
    return dict(rates.headers(admitted.limit_statuses or [])).get(name.encode(), b"").decode() or None


async def test_requests_that_fit_are_admitted_and_the_next_gets_a_retry_time(admit: Any) -> None:
    key = make_key(key_set(requests_per_minute=3))
    leases = [await admit(key) for _ in range(3)]
    assert [header(lease, "x-ratelimit-remaining-requests") for lease in leases] == [
        "2",
        "1",
        "0",
    ]
    error = await rejection(admit, key)
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "3 requests per minute for this API key" in error.message
    assert (b"retry-after", b"20") in error.headers()
    assert header(error, "x-ratelimit-limit-requests") == "3"
    assert header(error, "x-ratelimit-remaining-requests") == "0"
    assert header(error, "x-ratelimit-reset-requests") == "1m0s"
    assert header(error, "x-ratelimit-limit-tokens") is None


async def test_a_bucket_drains_at_its_limits_rate(admit: Any, broker: redis.Redis) -> None:
    key = make_key(key_set(requests_per_day=10))
    for _ in range(10):
        await admit(key)
    await rejection(admit, key)
    await shift(broker, 1, "requests_per_day", -3 * 8640)  # as if three tenths of a day had passed
    for _ in range(3):
        await admit(key)
    error = await rejection(admit, key)
    assert error.retry_after
    assert 8000 < error.retry_after <= 8640
    assert (b"x-should-retry", b"false") in error.headers()
    await shift(broker, 1, "requests_per_day", 86_400)  # a clock that is set back resets no limit
    await rejection(admit, key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("input_tokens_per_minute", "25 input tokens per minute"),
        ("tokens_per_day", "25 tokens per day"),
        ("output_tokens_per_day", "25 output tokens per day"),
        ("requests_per_day", "25 requests per day"),
    ],
)
async def test_each_limit_counts_separately(admit: Any, name: str, words: str) -> None:
    key = make_key(key_set(**{name: 25}))
    cost = {"input_tokens_per_minute": 10, "tokens_per_day": 15, "output_tokens_per_day": 5, "requests_per_day": 1}
    for _ in range(25 // cost[name]):
        await admit(key, max_tokens=5)
    assert words in (await rejection(admit, key, max_tokens=5)).message


async def test_buckets_are_stored_for_their_longest_period(admit: Any, broker: redis.Redis) -> None:
    await admit(make_key(key_set(requests_per_minute=10)))
    assert 0 < await broker.pttl(buckets_key(7, 1)) <= 2 * MINUTE[0]
    await admit(make_key(key_set(requests_per_minute=10, requests_per_day=10)))  # a limit was added
    await admit(make_key(key_set(requests_per_minute=10)))  # it was removed
    assert 2 * MINUTE[0] < await broker.pttl(buckets_key(7, 1)) <= 2 * DAY[0] * DAY[1]
    again = await admit(make_key(key_set(requests_per_day=10)))  # and added again, with its level
    assert header(again, "x-ratelimit-remaining-requests") == "8"
    await admit.close(again, None)
    assert 2 * MINUTE[0] < await broker.pttl(buckets_key(7, 1)) <= 2 * DAY[0] * DAY[1]


async def test_all_limits_are_charged_or_none(admit: Any, broker: redis.Redis) -> None:
    key = make_key(key_set(requests_per_day=100, concurrency=9), tenant_set(tokens_per_day=50))
    admitted = await admit(key)
    assert header(admitted, "x-ratelimit-remaining-requests") == "99"
    assert header(admitted, "x-ratelimit-remaining-tokens") == "20"
    error = await rejection(admit, key)
    assert "50 tokens per day for this account" in error.message
    assert header(error, "x-ratelimit-remaining-requests") == "99"
    assert await broker.zcard("millrace:limit_state:{7}:1:c") == 1


async def test_the_unused_part_is_refunded(admit: Any) -> None:
    key = make_key(key_set(requests_per_day=10, input_tokens_per_day=1000, output_tokens_per_day=1000))
    first = await admit(key, prompt=400, max_tokens=600)
    await admit.close(first, TokenCounts(uncached=100, cache_read=300, output=50))
    second = await admit(key, prompt=1, max_tokens=1)
    assert header(second, "x-ratelimit-remaining-requests") == "8"
    assert header(second, "x-ratelimit-remaining-tokens") == "899"  # input: 400 - 300 cached + 1
    await admit.close(second, None)  # it never ran
    await admit.close(second, None)
    third = await admit(key, prompt=1, max_tokens=949)
    assert header(third, "x-ratelimit-remaining-requests") == "8"
    assert header(third, "x-ratelimit-remaining-tokens") == "1"  # output: 50 + 949


async def test_cache_reads_count_by_their_weight(broker: redis.Redis) -> None:
    key = make_key(key_set(input_tokens_per_day=1000))
    gate = RateLimitAdmission(broker, cached_token_limit_percent=25)
    admitted = await gate.admit(make_demand(key, "a", prompt=400))
    await gate.close(admitted, TokenCounts(uncached=200, cache_read=200))
    admitted = await gate.admit(make_demand(key, "b", prompt=0 + 1))
    assert header(admitted, "x-ratelimit-remaining-tokens") == str(1000 - 250 - 1)


async def test_concurrency_slots_are_released_and_expire(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASE_MS", 2000)
    monkeypatch.setattr(admission, "RENEW_SECONDS", 0.1)
    key = make_key(key_set(concurrency=2))
    living, dead = RateLimitAdmission(broker), RateLimitAdmission(broker)
    await living.start()
    kept = await living.admit(make_demand(key, "kept"))
    await dead.admit(make_demand(key, "lost"))  # its gateway never renews it
    with pytest.raises(ApiError) as exc_info:
        await living.admit(make_demand(key, "third"))
    assert "2 concurrent requests (concurrency)" in exc_info.value.message
    assert exc_info.value.retry_after
    await asyncio.sleep(2.2)
    third = await living.admit(make_demand(key, "third"))
    with pytest.raises(ApiError):
        await living.admit(make_demand(key, "fourth"))
    await living.close(third, None)
    await living.close(kept, None)
    assert await broker.zcard("millrace:limit_state:{7}:1:c") == 0
    await living.stop()


async def test_concurrency_slots_that_the_broker_lost_are_taken_again(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RENEW_SECONDS", 0.05)
    key = make_key(key_set(concurrency=1))
    gate = RateLimitAdmission(broker)
    await gate.start()
    await gate.admit(make_demand(key, "a"))
    await broker.flushdb()
    await eventually_async(lambda: broker.zcard("millrace:limit_state:{7}:1:c"))
    with pytest.raises(ApiError):
        await gate.admit(make_demand(key, "b"))
    await gate.stop()


async def test_long_jobs_have_a_separate_limit(admit: Any) -> None:
    key = make_key(key_set(long_prompt_threshold=100, long_prompt_concurrency=1))
    long = await admit(key, prompt=100)
    assert "1 concurrent long prompts" in (await rejection(admit, key, prompt=200)).message
    await admit(key, prompt=99)
    await admit.close(long, None)
    await admit(key, prompt=100)


async def test_models_have_separate_limits(admit: Any) -> None:
    key = make_key(
        LimitSetSnapshot(1, "key", requests_per_day=10),
        LimitSetSnapshot(2, "key", model="m", requests_per_day=1),
        LimitSetSnapshot(3, "key", model="other", requests_per_day=0),
        LimitSetSnapshot(4, "key", model="alias", requests_per_day=2),
    )
    await admit(key)
    assert "the model 'm'" in (await rejection(admit, key)).message
    assert "the model 'm'" in (await rejection(admit, key, name="alias")).message


async def test_a_dry_run_rejects_nothing_and_counts(admit: Any, broker: redis.Redis) -> None:
    dry = LimitSetSnapshot(5, "project", dry_run=True, requests_per_day=2, max_prompt_tokens=50, tokens_per_day=10_000)
    key = make_key(key_set(requests_per_day=5), dry)
    for _ in range(4):
        await admit(key)
    await admit(key, prompt=60)
    await rejection(admit, key)
    counted = await broker.hgetall(counters_key(7, datetime.now(UTC)))
    assert counted == {
        b"dry:5:requests_per_day": b"3",
        b"dry:5:max_prompt_tokens": b"1",
        b"refused:1:requests_per_day": b"1",
    }
    # All or none: the three rejected ones took no tokens from the dry-run set either.
    assert await level(broker, 5, "tokens_per_day") == 2 * 30 * 86_400


async def test_a_request_that_can_never_fit_gets_400(admit: Any) -> None:
    error = await rejection(admit, make_key(key_set(tokens_per_minute=25)))
    assert (error.status, error.param) == (400, "max_tokens")
    error = await rejection(admit, make_key(key_set(max_prompt_tokens=9)))
    assert (error.status, error.param) == (400, "messages")
    error = await rejection(admit, make_key(key_set(max_output_tokens=19)))
    assert (error.status, error.param) == (400, "max_tokens")
    error = await rejection(admit, make_key(key_set(requests_per_day=0)))
    assert (error.status, error.retry_after) == (429, None)
    assert (b"x-should-retry", b"false") in error.headers()


async def test_a_default_max_tokens_is_reduced_to_the_limits(admit: Any) -> None:
    key = make_key(key_set(tokens_per_minute=100), tenant_set(output_tokens_per_day=300, max_output_tokens=200))
    assert (await admit(key, max_tokens=None)).max_tokens == 90
    assert (await admit(make_key(), max_tokens=None)).max_tokens == MODEL.default_max_output


async def test_a_lowered_limit_applies_immediately(admit: Any) -> None:
    for _ in range(50):
        await admit(make_key(key_set(requests_per_day=100)))
    error = await rejection(admit, make_key(key_set(requests_per_day=2)))
    assert error.retry_after
    assert error.retry_after <= 86_400


async def test_reading_the_state_of_limits_takes_nothing(broker: redis.Redis) -> None:
    gate, key = RateLimitAdmission(broker), make_key(key_set(requests_per_day=2, concurrency=1))
    await gate.admit(make_demand(key))
    for _ in range(3):
        assert dict(rates.headers(await gate.current_limit_statuses(key)))[b"x-ratelimit-remaining-requests"] == b"1"
    assert await gate.current_limit_statuses(make_key()) == []


async def test_without_the_broker_requests_are_rejected() -> None:
    unreachable: redis.Redis = redis.Redis.from_url("redis://127.0.0.1:1/0")
    gate = RateLimitAdmission(unreachable)
    with pytest.raises(ApiError) as exc_info:
        await gate.admit(make_demand(make_key(key_set(concurrency=1))))
    assert (exc_info.value.status, exc_info.value.retry_after) == (503, 1)
    await unreachable.aclose()


def test_durations() -> None:
    texts = {0: "0ms", 120: "120ms", 1000: "1s", 1001: "2s", 360_000: "6m0s", 86_399_999: "24h0m0s"}
    assert {given: rates.duration(given) for given in texts} == texts


def test_every_limit_of_a_set_is_enforced() -> None:
    """A limit that is added to the snapshot only would not be enforced."""
    plain = {"id", "scope", "model", "dry_run"}
    named = {field.name for field in msgspec.structs.fields(LimitSetSnapshot)} - plain
    full = replace_all(LimitSetSnapshot(1, "key", dry_run=True), named - {"long_prompt_threshold"}, 5)
    full = msgspec.structs.replace(full, long_prompt_threshold=1)
    checked = {check.name for check in limits.make_checks(1, [full], limits.LimitCost(1, 1, 1))}
    assert checked == named - {"long_prompt_threshold"}


def replace_all(set_: LimitSetSnapshot, names: set[str], value: int) -> LimitSetSnapshot:
    return msgspec.structs.replace(set_, **dict.fromkeys(names, value))


# Two processes and one limit. Each process is a gateway's admission with separate connections.

ROUNDS, LIMIT, TRIED, AT_ONCE = 100, 7, 12, 2


def _one_gateway(url: str, name: str, barrier: Any) -> list[int]:
    """Send `TRIED` requests per round, a few concurrently, so that the two alternate; return the number admitted."""

    async def rounds() -> list[int]:
        client: redis.Redis = redis.Redis.from_url(url)
        gate = RateLimitAdmission(client)
        passed = []
        for number in range(ROUNDS):
            set_ = LimitSetSnapshot(
                number, "tenant", requests_per_day=LIMIT, tokens_per_day=LIMIT * 30, concurrency=LIMIT
            )
            key = make_key(set_, LimitSetSnapshot(1000 + number, "key", requests_per_day=1000))
            barrier.wait(30)
            results: list[object] = []
            for start in range(0, TRIED, AT_ONCE):
                names = [f"{name}-{number}-{n}" for n in range(start, start + AT_ONCE)]
                tried = (gate.admit(make_demand(key, name)) for name in names)
                results += await asyncio.gather(*tried, return_exceptions=True)
            assert all(isinstance(r, AdmittedRequest) or (isinstance(r, ApiError) and r.status == 429) for r in results)
            passed.append(sum(isinstance(result, AdmittedRequest) for result in results))
        await client.aclose()
        return passed

    return asyncio.run(rounds())


async def test_two_gateways_with_one_limit_admit_exactly_the_limit(broker: redis.Redis) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, mp_context=context) as pool:
        barrier = manager.Barrier(2)
        url = os.environ["MILLRACE_VALKEY_URL"]
        futures = [pool.submit(_one_gateway, url, name, barrier) for name in ("gw-a", "gw-b")]
        first, second = [await asyncio.wrap_future(future) for future in futures]
    assert [a + b for a, b in zip(first, second, strict=True)] == [LIMIT] * ROUNDS
    assert sum(first) and sum(second)
    # All or none: rejected requests took nothing from the limit that had room.
    for number in (0, ROUNDS - 1):
        assert await level(broker, 1000 + number, "requests_per_day") <= LIMIT * 86_400
        assert await level(broker, 1000 + number, "requests_per_day") > (LIMIT - 1) * 86_400
