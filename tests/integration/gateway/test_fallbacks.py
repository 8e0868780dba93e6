"""Fallbacks and escalations of a request with Valkey, and the test as the workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import redis.asyncio as redis

from inference_worker.contract.messages import USAGE_STREAM, End, Failed, Tokens, claim_key, decode_job, decode_usage
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.protocols.openai import completions
from tenants.keys.snapshot import LimitSetSnapshot
from tests.support.gateway.replica import Replica
from tests.support.gateway.service_gates import EITHER, LIMIT, Gate, end, events_of, make_key, serving
from tests.support.gateway.services import find_opened
from tests.support.waiting import eventually_async

ORDERED = [{"model": "a"}, {"model": "b"}]
EITHER_RULE: dict[str, Any] = {"rules": [{"targets": ORDERED, "strategy": "ordered"}]}
SLOW = {**EITHER_RULE, "fallback_on": ["timeout"], "first_token_ms": 300}
CHECKED = {"rules": [{"targets": ORDERED, "strategy": "ordered", "escalate": {"on": ["pattern"], "pattern": "yes"}}]}


async def test_a_failure_before_the_first_token_falls_back(gate: Gate, a: Replica, b: Replica) -> None:
    call = await gate.begin(make_key(LIMIT, mine=EITHER), "mine")
    assert await a.claim(call.request_id)
    reading = asyncio.create_task(events_of(gate, call))
    await a.send(Failed(call.request_id, 1, 0, "internal_error", "the engine failed"))

    async def second_execution() -> bool:
        return call.execution.execution == 1 and call.execution.written

    await eventually_async(second_execution)
    job = decode_job(await gate.broker.hget(claim_key(call.request_id, 1), "job"))  # type: ignore[misc]
    assert (job.billing_context.execution, job.billing_context.model) == (1, "b")
    assert await gate.broker.hget(claim_key(call.request_id, 0), "execution") == b"1"  # type: ignore[misc]
    assert await b.claim(call.request_id, 2, execution=1)
    # Its attempt numbers continue, so that the first execution's log is not confused with it.
    await b.send(end(call, TokenCounts(10, output=3), attempt=2))
    events = await reading
    assert [type(event) for event in events] == [End]
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(make_key(LIMIT)) == ("99", "987")
    decision_record = await gate.decision_record(call)
    assert decision_record["skipped"] == [{"model": "a", "reason": "internal_error"}]
    assert [execution["replica"] for execution in decision_record["executions"]] == ["ra", "rb"]


@pytest.mark.usefixtures("b")
async def test_a_request_that_killed_the_workers_of_one_model_does_not_fall_back(gate: Gate, a: Replica) -> None:
    call = await gate.begin(make_key(LIMIT, mine=EITHER), "mine")
    assert await a.claim(call.request_id)
    reading = asyncio.create_task(events_of(gate, call))
    await a.send(Failed(call.request_id, 1, 0, "not_served", "3 workers were lost"))
    with pytest.raises(ApiError) as exc_info:
        await reading
    assert exc_info.value.code == "not_served"
    assert call.execution.execution == 0
    gate.service.release(call)
    await gate.service.drain()


async def test_a_model_without_replicas_falls_back(gate: Gate, b: Replica) -> None:
    call = await gate.begin(make_key(mine=EITHER), "mine")
    assert call.model == "b"
    assert (await gate.decision_record(call))["skipped"] == [{"model": "a", "reason": "model_loading"}]


@pytest.mark.usefixtures("a", "b")
async def test_a_too_long_prompt_falls_back(gate: Gate) -> None:
    assert (await gate.begin(make_key(mine=EITHER), "mine", prompt=200)).model == "b"


@pytest.mark.usefixtures("b")
async def test_an_error_without_a_fallback_rule_is_returned(gate: Gate) -> None:
    body = {"rules": [{"targets": [{"model": "a"}, {"model": "b", "weight": 0}]}], "fallback_on": ["error"]}
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(make_key(mine=body), "mine")
    assert exc_info.value.code == "model_loading"
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(make_key(), "a")  # no policy, no fallback
    assert exc_info.value.code == "model_loading"


@pytest.mark.parametrize(("conditions", "waits"), [(["overload"], False), (["error"], True)])
async def test_an_upstream_waits_for_capacity_unless_another_target_follows(
    broker: redis.Redis, gate: Gate, conditions: list[str], waits: bool
) -> None:
    replica = Replica(broker, "ru", model="u")
    await eventually_async(partial(serving, gate, "u"))
    body = {"rules": [{"targets": [{"model": "u"}, {"model": "v", "weight": 0}]}], "fallback_on": conditions}
    request = InferenceRequest("p", "Hello", SamplingParams(), 20)
    active = await gate.service.begin(make_key(p=body), request, completions.DIALECT, "req_1")
    job = active.execution.job
    assert job.upstream is not None
    assert (job.upstream.waits_for_capacity, job.upstream.body) == (waits, b'{"prompt":"Hello"}')
    assert job.num_prompt_tokens > len("Hello")
    gate.service.release(active)
    replica.stall()


async def test_a_target_without_a_token_in_time_is_replaced_and_not_billed(gate: Gate, a: Replica, b: Replica) -> None:
    call = await gate.begin(make_key(mine=SLOW), "mine")
    assert await a.claim(call.request_id)
    reading = asyncio.create_task(events_of(gate, call))

    async def second_execution() -> bool:
        return call.execution.execution == 1 and call.execution.written

    await eventually_async(second_execution)
    assert await b.claim(call.request_id, 2, execution=1)
    await b.send(end(call, TokenCounts(10, output=3), attempt=2))
    assert [type(event) for event in await reading] == [End]
    gate.service.release(call)
    await gate.service.drain()
    assert (await gate.decision_record(call))["skipped"] == [{"model": "a", "reason": "first_token_timeout"}]
    outcomes = {usage.billing_context.execution: usage.outcome for usage in await usages(gate)}
    assert outcomes == {0: "failed"}  # the replicas of this test send no usage


async def usages(gate: Gate) -> list[Any]:
    return [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]


async def test_a_token_in_time_ends_the_wait(gate: Gate, a: Replica, b: Replica) -> None:
    call = await gate.begin(make_key(mine={**SLOW, "first_token_ms": 2000}), "mine")
    assert await a.claim(call.request_id)
    reading = asyncio.create_task(events_of(gate, call))
    await a.send(Tokens(call.request_id, 1, 0, [5], "Hi"))
    await asyncio.sleep(2.1)  # longer than the time for the first token
    await a.send(end(call, TokenCounts(10, output=1), seq=1))
    assert [type(event) for event in await reading] == [Tokens, End]
    assert len(call.executions) == 1
    gate.service.release(call)


@pytest.mark.usefixtures("a", "b")
async def test_a_rate_limit_of_one_model_falls_back_to_another(gate: Gate) -> None:
    limit = LimitSetSnapshot(7, "tenant", "a", requests_per_minute=0)
    body = {**EITHER_RULE, "fallback_on": ["rate_limit"]}
    call = await gate.begin(make_key(limit, mine=body), "mine")
    assert call.model == "b"
    gate.service.release(call)
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(make_key(limit, mine=EITHER), "mine")
    assert exc_info.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("retries", [{"max_per_request": 0}, {"max_percent": 0}])
@pytest.mark.usefixtures("b")
async def test_fallbacks_beyond_the_retry_budget_do_not_happen(gate: Gate, retries: dict[str, int]) -> None:
    with pytest.raises(ApiError):  # no replica of a is ready
        await gate.begin(make_key(mine={**EITHER_RULE, "retries": retries}), "mine")
    call = await gate.begin(make_key(mine=EITHER_RULE), "mine")
    assert call.model == "b"
    gate.service.release(call)


async def answers(gate: Gate, replica: Replica, call: ActiveRequest, text: str, execution: int) -> None:
    async def is_written() -> bool:
        return call.execution.execution == execution and call.execution.written

    await eventually_async(is_written)
    attempt = execution + 1
    assert await replica.claim(call.request_id, attempt, execution=execution)
    usage = TokenCounts(10, output=1)
    await replica.send(Tokens(call.request_id, attempt, 0, [5], text), end(call, usage, attempt=attempt, seq=1))


@pytest.mark.parametrize(("first", "executions"), [("yes", 1), ("no", 2)])
async def test_an_answer_that_fails_its_check_is_replaced(
    gate: Gate, a: Replica, b: Replica, first: str, executions: int
) -> None:
    call = await gate.begin(make_key(LIMIT, mine=CHECKED), "mine")
    reading = asyncio.create_task(events_of(gate, call))
    await answers(gate, a, call, first, 0)
    if executions > 1:
        await answers(gate, b, call, "yes", 1)
    events = await reading
    assert [event.text for event in events if isinstance(event, Tokens)] == ["yes"]
    assert [execution.usage is not None for execution in call.executions] == [True] * executions
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(make_key(LIMIT)) == (str(100 - executions), str(1000 - 11 * executions))
    escalations = (await gate.decision_record(call)).get("escalations")
    assert escalations == ([{"model": "a", "check": "pattern"}] if executions > 1 else None)
    assert find_opened(call, "escalation").reserved == []


async def test_the_first_answer_is_returned_if_the_next_target_fails(gate: Gate, a: Replica, b: Replica) -> None:
    call = await gate.begin(make_key(LIMIT, mine=CHECKED), "mine")
    reading = asyncio.create_task(events_of(gate, call))
    await answers(gate, a, call, "no", 0)

    async def second_execution() -> bool:
        return call.execution.execution == 1 and call.execution.written

    await eventually_async(second_execution)
    assert await b.claim(call.request_id, 2, execution=1)
    await b.send(Failed(call.request_id, 2, 0, "internal_error", "the engine failed"))
    events = await reading
    assert [event.text for event in events if isinstance(event, Tokens)] == ["no"]
    assert (call.model, call.execution.execution) == ("a", 0)
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(make_key(LIMIT)) == ("99", "989")
