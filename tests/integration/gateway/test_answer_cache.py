"""The answer cache: hits, equal requests that run once, their usage, and what happens when a leader fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.contract.messages import End, Failed, Finished, Tokens
from inference_worker.contract.request import ServiceClass, TokenCounts, TokenLogprobs
from millrace.apps.answer_caches.answer_keys import answer_key, index_key
from millrace.gateway.answer_cache import answer_store
from millrace.gateway.answer_cache.answer_cache import DIRECTIVES, UNPRICED, read_directives
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.answer_lookup import AnswerLookup
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.openai import chat, completions
from millrace.gateway.protocols.responses import body
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tests.support.gateway.answer_caches import USAGE, AnswerCacheClient, make_key
from tests.support.gateway.replica import Replica
from tests.support.gateway.service_gates import Gate, serving
from tests.support.waiting import eventually_async

HIT = TokenCounts(answer_hit_input=3, answer_hit_output=2)


@pytest_asyncio.fixture
async def client(broker: redis.Redis) -> AsyncIterator[AnswerCacheClient]:
    gate = Gate(broker)
    monitor = DispatchMonitor(gate.dispatcher)
    await gate.dispatcher.start()
    await monitor.start()
    replica = Replica(broker, "ra", model="a")

    async def is_serving() -> bool:
        return await serving(gate, "a")

    await eventually_async(is_serving)
    yield AnswerCacheClient(gate, replica)
    replica.stall()
    await gate.service.drain()
    await monitor.stop()
    await gate.dispatcher.stop()


async def test_an_equal_request_is_a_hit_that_is_billed_once_by_its_components(client: AnswerCacheClient) -> None:
    first = await client.begin()
    assert await client.answer_of_run(first) == "Hello there"
    assert client.note(first) == {"miss": "not_cached"}
    second = await client.begin()
    assert (client.layer(second), second.execution.usage) == ("exact", None)
    # The usage is recorded before the first byte can be sent.
    (recorded,) = await client.hits()
    assert (recorded.billing_context.request_id, recorded.billing_context.execution) == (second.request_id, 0)
    assert (recorded.outcome, recorded.finish_reason, recorded.usage) == ("completed", "stop", HIT)
    assert await client.answer(second) == "Hello there"
    assert second.execution.usage == HIT
    assert (client.origin(first), client.origin(second)) == (("computed", ""), ("exact", first.request_id))
    answers = client.gate.service._metrics._metrics.answers
    assert [answers.labels("a", layer)._value.get() for layer in ("computed", "exact")] == [1, 1]
    assert len(await client.hits()) == 1
    note = (await client.gate.decision_record(second))["answer_cache"]
    assert note == {"layer": "exact", "request_id": first.request_id, "age_seconds": note["age_seconds"]}
    assert not await client.gate.broker.exists(f"millrace:claim:{second.request_id}:0")
    # Tokens of a hit are returned to the rate limits, as cached tokens are.
    assert (await client.gate.left(make_key()))[1] == str(1000 - 5)


async def test_a_hit_reports_the_prompt_as_cached(client: AnswerCacheClient) -> None:
    await client.answer_of_run(await client.begin())
    hit = await client.begin()
    events = [event async for event in client.gate.service.events(hit)]
    assert isinstance(events[0], Tokens)
    assert isinstance(events[-1], End)
    assert events[0].prompt == TokenCounts(cache_read=3)
    assert events[-1].usage == TokenCounts(cache_read=3, output=2)
    await client.release(hit)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (make_key(), {"prompt": (1, 2, 4)}),
        (make_key(), {"stop": ("x",)}),
        (make_key(), {"n": 2}),
        (make_key(2), {}),  # another tenant
        (make_key(answer_cache_seconds=0), {}),
        (make_key(), {"temperature": 0.5}),
    ],
    ids=["prompt", "stop", "n", "tenant", "off", "sampled"],
)
async def test_other_requests_are_not_hits(
    client: AnswerCacheClient, key: ApiKeySnapshot, other: dict[str, Any]
) -> None:
    await client.answer_of_run(await client.begin())
    call = await client.begin(key, **other)
    assert client.layer(call) == ""
    await client.answer_of_run(call)
    assert await client.hits() == []


async def test_sampled_answers_are_cached_if_the_tenant_chose_so(client: AnswerCacheClient) -> None:
    key = make_key(answer_cache_sampled=True)
    await client.answer_of_run(await client.begin(key, temperature=0.7))
    hit = await client.begin(key, temperature=0.7)
    assert client.layer(hit) == "exact"
    await client.answer(hit)


async def test_the_answer_of_a_batch_is_stored_if_only_other_classes_have_prices_of_hits(
    client: AnswerCacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "millrace.gateway.answer_cache.answer_cache._miss_reason"
    monkeypatch.setattr(reason, lambda execution, *_: UNPRICED if execution.batch else "")
    for _ in range(2):
        batch = await client.begin(service_class=ServiceClass.BATCH)
        assert client.note(batch) == {"miss": "unpriced"}
        await client.answer_of_run(batch)
    hit = await client.begin()
    assert client.origin(hit)[1] == batch.request_id
    assert await client.answer(hit) == "Hello there"


async def test_a_seed_does_not_matter_without_sampling(client: AnswerCacheClient) -> None:
    await client.answer_of_run(await client.begin(seed=1))
    hit = await client.begin(seed=2)
    assert client.layer(hit) == "exact"
    await client.answer(hit)


async def test_the_client_controls_the_cache(client: AnswerCacheClient) -> None:
    with pytest.raises(ApiError) as exc_info:
        await client.begin(make_key(), "only-if-cached")
    assert (exc_info.value.code, exc_info.value.status) == ("not_cached", 412)
    await client.answer_of_run(await client.begin(make_key(), "no-store"))
    await client.answer_of_run(await client.begin(), "First")  # the first answer was not stored
    assert await client.answer(await client.begin(make_key(), "only-if-cached")) == "First there"
    assert await client.answer(await client.begin(make_key(), "no-store")) == "First there"
    fresh = await client.begin(make_key(scopes=("inference", "cache")), "no-cache")
    assert client.note(fresh) == {"miss": "no-cache"}
    assert await client.answer_of_run(fresh, "Second") == "Second there"
    assert await client.answer(await client.begin()) == "Second there"


@pytest.mark.parametrize("has_scope", [False, True])
async def test_only_a_key_with_the_scope_replaces_the_answer_of_others(
    client: AnswerCacheClient, has_scope: bool
) -> None:
    """All combinations of directives, with and without sampling."""
    key = make_key(answer_cache_sampled=True, scopes=("inference", "cache") if has_scope else ("inference",))
    for number, (*chosen, temperature) in enumerate(product((False, True), (False, True), (False, True), (0.0, 0.7))):
        directives = [name for name, is_given in zip(DIRECTIVES, chosen, strict=True) if is_given]
        options: dict[str, Any] = {"prompt": (number,), "temperature": temperature}
        others = make_key(answer_cache_sampled=True)
        await client.answer_of_run(await client.begin(others, **options), "First")
        may_replace = has_scope and "no-cache" in directives and "no-store" not in directives
        if {"no-cache", "only-if-cached"} <= set(directives):
            with pytest.raises(ApiError, match="not cached"):
                await client.begin(key, *directives, **options)
            may_replace = False
        else:
            call = await client.begin(key, *directives, **options)
            is_hit = client.layer(call) == "exact"
            assert is_hit is ("no-cache" not in directives)
            if is_hit:
                assert await client.answer(call) == "First there"
            else:
                assert await client.answer_of_run(call, "Second") == "Second there"
                is_kept_out = not may_replace and "no-store" not in directives
                assert client.note(call).get("not_replaced", False) is is_kept_out
        expected = "Second there" if may_replace else "First there"
        assert await client.answer(await client.begin(others, **options)) == expected, directives


async def test_a_key_without_the_scope_stores_no_computed_answer(client: AnswerCacheClient) -> None:
    """So it cannot compute samples until it likes one."""
    await client.answer_of_run(await client.begin(make_key(), "no-cache"))
    again = await client.begin()
    assert client.layer(again) == ""
    await client.answer_of_run(again)


def test_directives_are_read_from_the_header() -> None:
    assert read_directives(None) == frozenset()
    assert read_directives(b"No-Store, no-cache") == {"no-store", "no-cache"}
    with pytest.raises(ApiError, match="max-age"):
        read_directives(b"max-age=0")


async def test_a_cached_answer_is_served_while_no_replica_is_ready(client: AnswerCacheClient) -> None:
    await client.answer_of_run(await client.begin())
    client.replica.stall()
    client.gate.dispatcher.replicas.update({})
    assert await client.answer(await client.begin()) == "Hello there"
    with pytest.raises(ApiError) as exc_info:
        await client.begin(prompt=(9, 9))
    assert exc_info.value.code == "model_loading"


async def test_equal_concurrent_requests_run_once(client: AnswerCacheClient) -> None:
    leader = await client.begin()
    followers = [await client.begin() for _ in range(3)]
    assert [client.layer(each) for each in (leader, *followers)] == ["", *["single_flight"] * 3]
    reading = [asyncio.create_task(client.answer(each)) for each in (leader, *followers)]
    await client.run(leader)
    assert await asyncio.gather(*reading) == ["Hello there"] * 4
    hits = await client.hits()
    assert {hit.billing_context.request_id for hit in hits} == {each.request_id for each in followers}
    assert [(hit.outcome, hit.usage) for hit in hits] == [("completed", HIT)] * 3
    assert [each.execution.usage for each in followers] == [HIT] * 3
    assert {client.origin(each) for each in followers} == {("single_flight", leader.request_id)}
    later = await client.begin()
    assert client.layer(later) == "exact"
    await client.answer(later)


async def test_a_follower_replaces_a_leader_that_fails(client: AnswerCacheClient) -> None:
    """The client receives no part of the answer twice."""
    leader = await client.begin()
    followers = [await client.begin() for _ in range(2)]
    await client.claim(leader)
    streams = [client.gate.service.events(each) for each in followers]
    await client.replica.send(Tokens(leader.request_id, 1, 0, [5], "Hel"))
    assert [(await anext(stream)).text for stream in streams] == ["Hel", "Hel"]  # type: ignore[union-attr]
    await client.replica.send(Failed(leader.request_id, 1, 1, "internal_error", "the engine failed"))
    with pytest.raises(ApiError):
        [event async for event in client.gate.service.events(leader)]
    await client.release(leader)

    async def is_replaced() -> bool:
        return any(client.layer(each) == "" and each.execution.written for each in followers)

    await eventually_async(is_replaced)
    (runs,) = [each for each in followers if client.layer(each) == ""]
    await client.claim(runs)
    await client.replica.send(
        Tokens(runs.request_id, 1, 0, [5, 6], "Hello th"),
        Tokens(runs.request_id, 1, 1, [7], "ere"),
        End(runs.request_id, 1, 2, "stop", None, TokenCounts(uncached=3, output=3)),
    )
    for stream in streams:
        rest = [event async for event in stream]
        assert "".join(event.text for event in rest if isinstance(event, Tokens)) == "lo there"
        assert [event.token_ids for event in rest if isinstance(event, Tokens)] == [[6], [7]]
    for each in followers:
        await client.release(each)
    assert [hit.billing_context.request_id for hit in await client.hits()] == [
        each.request_id for each in followers if each is not runs
    ]
    (follower,) = [each for each in followers if each is not runs]
    assert (client.origin(runs), client.origin(follower)) == (("computed", ""), ("single_flight", runs.request_id))
    hit = await client.begin()
    assert client.layer(hit) == "exact"
    assert await client.answer(hit) == "Hello there"


async def test_an_answer_that_differs_after_its_leader_failed_is_an_error(client: AnswerCacheClient) -> None:
    leader, follower = await client.begin(), await client.begin()
    await client.claim(leader)
    stream = client.gate.service.events(follower)
    await client.replica.send(Tokens(leader.request_id, 1, 0, [5], "Hel"))
    await anext(stream)
    await client.replica.send(Failed(leader.request_id, 1, 1, "internal_error", "the engine failed"))
    await client.claim(follower)
    await client.replica.send(Tokens(follower.request_id, 1, 0, [8], "Good"))
    with pytest.raises(ApiError) as exc_info:
        await anext(stream)
    assert exc_info.value.code == "stream_lost"
    assert [(hit.billing_context.request_id, hit.outcome) for hit in await client.hits()] == [
        (follower.request_id, "failed")  # an answer that could not be completed is not billed
    ]
    for each in (leader, follower):
        client.gate.service.release(each)


async def test_a_follower_whose_client_leaves_pays_for_what_it_received(client: AnswerCacheClient) -> None:
    leader, reader, waiting = [await client.begin() for _ in range(3)]
    await client.claim(leader)
    await client.replica.send(Tokens(leader.request_id, 1, 0, [5], "Hel"))
    assert (await anext(client.gate.service.events(reader))).token_ids == [5]  # type: ignore[union-attr]
    await client.release(reader)
    await client.release(waiting)
    usages = {hit.billing_context.request_id: (hit.outcome, hit.usage) for hit in await client.hits()}
    assert usages == {
        reader.request_id: ("cancelled", TokenCounts(answer_hit_input=3, answer_hit_output=1)),
        waiting.request_id: ("cancelled", TokenCounts()),
    }
    await client.replica.send(
        Tokens(leader.request_id, 1, 1, [6], "lo"), End(leader.request_id, 1, 2, "stop", None, USAGE)
    )
    assert await client.answer(leader) == "Hello"


async def test_a_leader_that_was_never_sent_is_replaced(client: AnswerCacheClient, broker: redis.Redis) -> None:
    """Its gateway was killed: neither its claim nor its stream exists."""
    other = AnswerStore(broker, "secret", 60)
    call = await client.begin(prompt=(7, 7))
    await client.answer_of_run(call)
    assert call.execution.answer is not None
    answer_id = call.execution.answer.answer_id
    await broker.delete(answer_key(1, answer_id))
    assert await other.find(1, answer_id, "req_dead 0 gw-dead") == (None, "req_dead 0 gw-dead")
    follower = await client.begin(prompt=(7, 7))
    assert client.layer(follower) == "single_flight"
    assert await client.answer_of_run(follower) == "Hello there"
    assert client.note(follower) == {"miss": "leader_failed"}


async def test_a_cancelled_answer_is_not_stored(client: AnswerCacheClient) -> None:
    call = await client.begin()
    await client.claim(call)
    await client.replica.send(
        Tokens(call.request_id, 1, 0, [5], "Hel"), End(call.request_id, 1, 1, "cancelled", None, USAGE)
    )
    with pytest.raises(ApiError, match="cancelled"):
        [event async for event in client.gate.service.events(call)]
    await client.release(call)
    again = await client.begin()
    assert client.layer(again) == ""
    assert await client.answer_of_run(again) == "Hello there"


@pytest.mark.parametrize("dialect", [chat.DIALECT, completions.DIALECT, messages.DIALECT, body.DIALECT])
@pytest.mark.parametrize("follows", [False, True])
async def test_an_answer_that_may_not_be_kept_is_not_stored(
    client: AnswerCacheClient, dialect: str, follows: bool
) -> None:
    """A request that follows the computing one receives the same answer. The next one is computed."""
    unkept = [(" ", "stop", "", "stop"), ("No", "content_filter", "I", "stop"), ("I", "stop", "No", "content_filter")]
    for number, (first, first_reason, second, second_reason) in enumerate(unkept):
        calls = [await client.begin(dialect=dialect, prompt=(number,), n=2)]
        if follows:
            calls.append(await client.begin(dialect=dialect, prompt=(number,), n=2))
            assert client.layer(calls[1]) == "single_flight"
        reading = [asyncio.create_task(client.answer(call)) for call in calls]
        await client.claim(calls[0])
        name = calls[0].request_id
        await client.replica.send(
            Tokens(name, 1, 0, [5], first, prompt=TokenCounts(uncached=3)),
            Finished(name, 1, 1, 0, first_reason, None),  # type: ignore[arg-type]
            Tokens(name, 1, 2, [6], second, index=1),
            End(name, 1, 3, second_reason, None, USAGE),  # type: ignore[arg-type]
        )
        assert await asyncio.gather(*reading) == [first + second] * len(calls)
        with pytest.raises(ApiError, match="not cached"):
            await client.begin(make_key(), "only-if-cached", dialect=dialect, prompt=(number,), n=2)


async def test_the_flight_of_a_rejected_request_ends(client: AnswerCacheClient) -> None:
    """The next equal request must not wait for a request that was rejected."""
    client.replica.stall()
    client.gate.dispatcher.replicas.update({})
    with pytest.raises(ApiError) as exc_info:
        await client.begin()
    assert exc_info.value.code == "model_loading"
    client.replica.resume()
    await eventually_async(lambda: serving(client.gate, "a"))
    again = await client.begin()
    assert client.layer(again) == ""
    await client.answer_of_run(again)


async def test_a_follower_of_a_leader_that_leaves_the_queue_runs_at_once(
    client: AnswerCacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.gate.dispatcher.placement, "choose", lambda _: None)  # no replica has capacity
    leader, follower = await client.begin(), await client.begin()
    assert client.layer(follower) == "single_flight"
    await client.release(leader)
    monkeypatch.undo()
    async with asyncio.timeout(30):  # less than the time that a leader may wait in its gateway's queue
        assert await client.answer_of_run(follower) == "Hello there"


async def test_a_sequence_that_a_client_has_received_is_not_repeated() -> None:
    """The client follows a leader that fails, and then receives the same answer from another execution."""
    lookup = AnswerLookup(None, "id", 0, "single_flight", following=asyncio.create_task(asyncio.sleep(0)))
    logprobs = [TokenLogprobs(each, -0.5, 1) for each in (5, 6)]
    first = Tokens("r", 1, 0, [5], "a", prompt=USAGE, prompt_logprobs=logprobs, reasoning="x", reasoning_tokens=1)
    late = Tokens("r", 1, 1, [], "", logprobs=logprobs[:1])  # log-probabilities may be later than their tokens
    finished = Finished("r", 1, 2, 0, "stop", None)
    for event in (first, late, finished):
        assert lookup.accept(event) == event
    lookup.restart()
    more = msgspec.structs.replace(first, token_ids=[5, 6], text="ab", reasoning_tokens=3)
    assert lookup.accept(more) == Tokens("r", 1, 0, [6], "b", reasoning_tokens=2)
    more = msgspec.structs.replace(late, logprobs=logprobs)
    assert lookup.accept(more) == msgspec.structs.replace(late, logprobs=logprobs[1:])
    assert lookup.accept(finished) is None
    assert lookup.accept(msgspec.structs.replace(finished, index=1)) is not None


async def test_a_follower_that_no_client_can_resume_ends_at_once(client: AnswerCacheClient) -> None:
    leader, follower = await client.begin(), await client.begin()
    await client.claim(leader)
    client.gate.service.release(follower, is_returning=True)
    async with asyncio.timeout(20):  # less than the time that a client has to return
        await asyncio.gather(*client.gate.service._background)
    assert [hit.usage for hit in await client.hits()] == [TokenCounts()]
    await client.replica.send(End(leader.request_id, 1, 0, "stop", None, USAGE))
    await client.answer(leader)


async def test_a_follower_fails_at_its_deadline(client: AnswerCacheClient) -> None:
    leader, follower = await client.begin(), await client.begin()
    job = follower.execution.job
    follower.execution.job = msgspec.structs.replace(job, deadline=job.deadline - 1000)
    with pytest.raises(ApiError) as exc_info:
        await client.answer(follower)
    assert exc_info.value.code == "timeout"
    assert {hit.usage for hit in await client.hits()} == {TokenCounts()}
    client.gate.service.release(follower)
    assert await client.answer_of_run(leader) == "Hello there"


async def test_the_slots_of_a_follower_are_returned_although_valkey_rejects_its_usage(
    client: AnswerCacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = await client.begin(), await client.begin()
    await client.claim(leader)
    await client.replica.send(Tokens(leader.request_id, 1, 0, [5], "Hel"))
    await anext(client.gate.service.events(follower))

    async def unreachable(*_: Any) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(client.gate.dispatcher, "record_hit", unreachable)
    await client.release(follower)
    assert list(client.gate.admission._taken.values()) == [leader.execution.admitted.taken]
    await client.replica.send(End(leader.request_id, 1, 1, "stop", None, USAGE))
    await client.answer(leader)


async def test_a_hit_has_no_drafts(client: AnswerCacheClient) -> None:
    """The drafts belong to the execution that computed the answer."""
    call = await client.begin()
    await client.claim(call)
    await client.replica.send(
        Tokens(call.request_id, 1, 0, [5], "Hel"), End(call.request_id, 1, 1, "stop", None, USAGE, 3, 4)
    )
    await client.answer(call)
    hit = await client.begin()
    *_, end = [event async for event in client.gate.service.events(hit)]
    assert isinstance(end, End)
    assert (end.accepted_drafts, end.rejected_drafts) == (0, 0)
    await client.release(hit)


async def test_nothing_is_billed_if_a_hit_cannot_be_recorded(
    client: AnswerCacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.answer_of_run(await client.begin())

    async def unreachable(*_: Any) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(client.gate.dispatcher, "record_hit", unreachable)
    with pytest.raises(ApiError) as exc_info:
        await client.begin()
    assert exc_info.value.status == 503
    assert {hit.outcome for hit in await client.hits()} <= {"failed", "cancelled"}
    assert {hit.usage for hit in await client.hits()} == {TokenCounts()}


async def test_stored_answers_are_encrypted_and_bounded(
    client: AnswerCacheClient, broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_store, "MAX_TENANT_ANSWERS", 2)
    calls = [await client.begin(prompt=(number,)) for number in (1, 2, 3)]
    for call in calls:
        await client.answer_of_run(call, "A secret")
    keys = [key async for key in broker.scan_iter("millrace:answer:*")]
    assert len(keys) == await broker.zcard(index_key(1)) == 2
    for key in keys:
        payload = await broker.get(key)
        assert payload is not None
        assert b"secret" not in payload
        assert 0 < await broker.ttl(key) <= 60
    assert client.layer(await client.begin(prompt=(1,))) == ""  # it made room for the newest
    stored = calls[2].execution.answer
    assert stored is not None
    assert (await AnswerStore(broker, "secret", 60).find(1, stored.answer_id, ""))[0] is not None
    assert await AnswerStore(broker, "another", 60).find(1, stored.answer_id, "") == (None, "")
    # An answer of one tenant cannot be decrypted as another tenant's.
    await broker.copy(answer_key(1, stored.answer_id), answer_key(2, stored.answer_id))
    assert await AnswerStore(broker, "secret", 60).find(2, stored.answer_id, "") == (None, "")


async def test_a_long_answer_is_not_stored(client: AnswerCacheClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_store, "MAX_ANSWER_BYTES", 20)
    await client.answer_of_run(await client.begin())
    call = await client.begin()
    assert client.layer(call) == ""
    await client.answer_of_run(call)


async def test_all_that_requests_leave_in_valkey_expires(client: AnswerCacheClient, broker: redis.Redis) -> None:
    """So the data of a deleted tenant is removed without a job."""
    limits = LimitSnapshot(
        (LimitSetSnapshot(1, "tenant", requests_per_minute=100, tokens_per_day=1000, concurrency=9),)
    )
    leader, follower = [await client.begin(make_key(limits=limits)) for _ in range(2)]
    reading = [asyncio.create_task(client.answer(call)) for call in (leader, follower)]
    await client.run(leader)
    await asyncio.gather(*reading)
    await client.answer(await client.begin(make_key(limits=limits)))
    tight = make_key(limits=LimitSnapshot((LimitSetSnapshot(2, "tenant", requests_per_day=1),)))
    await client.answer_of_run(await client.begin(tight, prompt=(7,)))
    with pytest.raises(ApiError) as exc_info:
        await client.begin(tight, prompt=(8,))
    assert exc_info.value.code == "rate_limit_exceeded"
    keys = {key.decode(): await broker.ttl(key) async for key in broker.scan_iter("millrace:*")}
    kinds = {key.split(":")[1] for key in keys}
    assert {"answer", "answers", "claim", "request_events", "decisions", "limit_state", "limit_counters"} <= kinds
    lasting = {key.split(":")[1] for key, seconds in keys.items() if seconds < 0}
    # Those of the platform, and the logs, which the worker lets expire: the test's replica does not.
    assert lasting <= {"replicas", "gateways", "executions", "inference", "usage_events", "request_events"}


async def test_two_tenants_never_share_an_answer(client: AnswerCacheClient) -> None:
    """Each answer contains the tenant that computed it."""
    random_ = random.Random(7)
    for _ in range(60):
        tenant, prompt = random_.randint(1, 2), (random_.randint(1, 4),)
        call = await client.begin(make_key(tenant), prompt=prompt)
        if client.layer(call):
            assert await client.answer(call) == f"tenant {tenant} there"
        else:
            await client.answer_of_run(call, f"tenant {tenant}")
