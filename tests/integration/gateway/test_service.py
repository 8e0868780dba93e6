"""Request lifecycle with Valkey, and the test as the workers: routing, usage and releases."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import (
    USAGE_STREAM,
    End,
    Tokens,
    claim_key,
    decode_job,
    decode_usage,
    gateway_stream,
    pins_key,
)
from inference_worker.contract.request import SamplingParams, ServiceClass, StructuredSpec, TokenCounts
from inference_worker.worker.shared_pins import PIN
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import CheckedSchemas, EncoderInputs, InferenceRequest
from millrace.gateway.dispatch import execution as execution_module
from millrace.gateway.dispatch import execution_ends
from millrace.gateway.dispatch.stream_follower import StreamFollower
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.http.endpoints.inference import ChatCompletions
from millrace.gateway.lifecycle import client_return, tokenizer
from millrace.gateway.protocols.answer_validity import CheckedEnd, checked_events
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.openai.writer import DONE
from millrace.gateway.protocols.prompts import SHORT_CHARACTERS
from millrace.gateway.routing.router import Router
from tests.support.engine.tiny_models import make_tokenizer
from tests.support.gateway.inference_requests import make_request
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.gateway.service_gates import EITHER, LIMIT, MODELS, Gate, end, events_of, make_key
from tests.support.gateway.services import recorded
from tests.support.waiting import eventually_async


async def test_the_request_log_names_the_sampling_defaults_that_a_request_took(gate: Gate, a: Replica) -> None:
    model = dataclasses.replace(MODELS["a"], sampling_defaults=(("temperature", 0.2), ("top_k", 5)))
    gate.service._routing.router = Router(MODELS | {"a": model})
    request = make_request("a", [1] * 10, SamplingParams(temperature=0.7), 20, unset_sampling=("top_k",))
    call = await gate.service.begin(make_key(LIMIT), request, completions.DIALECT, "req_defaults")
    params = call.execution.job.params
    assert (params.temperature, params.top_k) == (0.7, 5)
    assert recorded(call)["sampling_defaults"] == {"top_k": 5}


@pytest.mark.usefixtures("b")
async def test_inputs_are_truncated_to_the_length_of_the_deployment_that_answers(gate: Gate) -> None:
    """Two deployments of one model, of which the first has no replica, share the tokenizer."""
    core = make_tokenizer()
    tokenizer = Tokenizer(core, chat_template=None, special_tokens={}, eos_token_ids=(), model_max_length=12)
    first = ServedModel("a", tokenizer, 12, core.get_vocab_size(), 0, vector_sizes=(4,))
    gate.service._routing.router = Router({"a": first, "b": dataclasses.replace(first, name="b", context_length=8)})
    request = InferenceRequest(
        "mine", [], SamplingParams(max_tokens=0), 0, encoder=EncoderInputs(("x" * 10, "x" * 9, "x"))
    )
    call = await gate.service.begin(make_key(LIMIT, mine=EITHER), request, embeddings.DIALECT, "req_truncated")
    assert (call.model, call.execution.job.input_lengths) == ("b", (8, 8, 3))
    assert call.execution.response_spec.truncated == "2 of 3"
    assert recorded(call)["truncated_inputs"] == 2


async def test_a_tenants_model_name_is_routed_by_its_policy(gate: Gate, a: Replica) -> None:
    call = await gate.begin(make_key(LIMIT, mine=EITHER), "mine")
    assert call.model == "a"
    assert await a.claim(call.request_id)
    await a.send(Tokens(call.request_id, 1, 0, [5], "Hi"), end(call, TokenCounts(10, output=1), seq=1))
    assert [type(event) for event in await events_of(gate, call)] == [Tokens, End]
    gate.service.release(call)
    decision_record = await gate.decision_record(call)
    assert (
        decision_record["requested_model"],
        decision_record["policy"]["version"],
        decision_record["targets"],
    ) == ("mine", 3, ["a", "b"])
    assert [execution["replica"] for execution in decision_record["executions"]] == ["ra"]
    assert "skipped" not in decision_record


async def test_no_request_starts_while_the_disk_is_almost_full(gate: Gate, a: Replica) -> None:
    gate.disk._space.is_low = True
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(make_key(LIMIT), "a")
    assert (exc_info.value.status, exc_info.value.retry_after) == (503, 10)
    assert gate.dispatcher.executions == {}
    gate.disk._space.is_low = False
    call = await gate.begin(make_key(LIMIT), "a")
    assert await a.claim(call.request_id)
    await a.send(end(call, TokenCounts(10, output=1)))
    gate.service.release(call)


async def test_unknown_models_and_keys_without_permission_are_rejected(gate: Gate) -> None:
    for name, code in (("unknown", "model_not_found"), ("ghosts", "model_not_found")):
        with pytest.raises(ApiError) as exc_info:
            await gate.begin(make_key(ghosts={"models": ["gone"]}), name)
        assert exc_info.value.code == code
    only = msgspec.structs.replace(make_key(mine=EITHER), models=("mine",))
    assert list(Router(MODELS).visible(only)) == ["mine"]
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(only, "a")
    assert exc_info.value.code == "model_not_allowed"


async def test_a_request_rejected_after_admission_uses_no_limits(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    for _ in range(2):
        await gate.begin(key, "a")
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(key, "a")
    assert "concurrency" in exc_info.value.message
    assert await gate.left(key) == ("98", "940")


async def test_an_internal_error_after_admission_uses_no_limits(
    gate: Gate, a: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(execution_module, "encode_response_spec", fail)
    with pytest.raises(RuntimeError, match="broken"):
        await gate.begin(make_key(LIMIT), "a")
    assert await gate.left(make_key(LIMIT)) == ("100", "1000")
    ((_, fields),) = await gate.broker.xrange(USAGE_STREAM)
    usage_event = decode_usage(fields[b"e"])
    assert (usage_event.billing_context.request_id, usage_event.outcome, usage_event.finish_reason) == (
        "req_1",
        "cancelled",
        "never_ran",
    )


SEVERAL = InferenceRequest("a", [1] * 10, SamplingParams(n=2), 20, more_prompts=([2] * 5,), echo=True)


async def test_several_prompts_are_several_jobs_with_one_response(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    call = await gate.service.begin(key, SEVERAL, completions.DIALECT, "req_1")
    (part,) = call.further_prompts
    for each, prompt in ((call, [1] * 10), (part, [2] * 5)):
        await eventually_async(partial(gate.written, each))
        assert await a.claim(each.request_id)
        job = each.execution.job
        assert (job.prompt_token_ids, job.params.n, job.params.max_tokens) == (prompt, 2, 20)
    assert (
        call.execution.response_spec.prompts,
        call.execution.response_spec.answers,
        call.execution.response_spec.echo,
    ) == (
        2,
        4,
        [[1] * 10, [2] * 5],
    )
    assert await gate.left(key) == ("98", str(1000 - 10 - 5 - 4 * 20))
    await a.send(Tokens("req_1.1", 1, 0, [5], "two", 1), end(part, TokenCounts(5, output=3), seq=1))
    await a.send(Tokens("req_1", 1, 0, [5], "one", 1), end(call, TokenCounts(10, output=4), seq=1))
    events = [event async for event in gate.service.events(call)]
    assert [(event.index, event.text) for event in events if isinstance(event, Tokens)] == [
        (1, "one"),
        (3, "two"),
    ]
    assert isinstance(events[-1], End)
    assert events[-1].usage == TokenCounts(15, output=7)
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(key) == ("98", str(1000 - 22))


async def test_a_rejected_prompt_cancels_the_others(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    first = await gate.begin(key, "a")
    with pytest.raises(ApiError) as exc_info:
        await gate.service.begin(key, SEVERAL, completions.DIALECT, "req_several")
    assert "concurrency" in exc_info.value.message
    usage_events = [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]
    assert [(usage_event.billing_context.request_id, usage_event.outcome) for usage_event in usage_events] == [
        ("req_several", "failed")
    ]
    gate.service.release(first)
    await gate.service.drain()
    assert await gate.left(key) == ("100", "1000")
    assert gate.dispatcher.in_flight == 0


@pytest.mark.parametrize(("fields", "name"), [({}, "prompt"), ({"encoder": EncoderInputs(("x",))}, "input")])
def test_an_error_of_a_prompt_uses_the_callers_parameter_name(fields: dict[str, Any], name: str) -> None:
    assert InferenceRequest("a", [1], SamplingParams(), **fields).prompt_param == name
    assert InferenceRequest("a", [{"role": "user", "content": ""}], SamplingParams()).prompt_param == "messages"


async def test_an_error_names_the_prompt_that_is_too_long(gate: Gate, a: Replica) -> None:
    with pytest.raises(ApiError) as exc_info:
        await gate.begin(make_key(LIMIT), "a", prompt=100)
    assert (exc_info.value.code, exc_info.value.param) == ("context_length_exceeded", "prompt")


async def test_a_job_has_the_requests_billing_context(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    form = StructuredSpec("regex", "a+", "guided_regex")
    request = make_request(
        "a",
        [1, 2, 3, 4],
        SamplingParams(logprobs=3, skip_special_tokens=False),
        20,
        structured=form,
        service_class=ServiceClass.FLEX,
        priority=-4,
        metadata={"order": "7"},
        user="u",
    )
    call = await gate.service.begin(key, request, completions.DIALECT, "req_1")
    await eventually_async(partial(gate.written, call))
    assert await a.claim("req_1")
    job = decode_job(await gate.broker.hget(claim_key("req_1", 0), "job"))  # type: ignore[misc, arg-type]
    assert (job.service_class, job.priority, job.weight) == (ServiceClass.FLEX, -4, key.weight)
    assert (job.structured, job.params.logprobs, call.execution.response_spec.service_class) == (
        form,
        3,
        ServiceClass.FLEX,
    )
    assert call.execution.response_spec.shows_special_tokens
    assert call.execution.response_spec.last_prompt_ids == [4]
    decision_record = await gate.decision_record(call)
    assert (decision_record["metadata"], decision_record["user"]) == ({"order": "7"}, "u")


async def test_a_disconnected_client_pays_for_tokens_generated_until_then(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    call = await gate.begin(key, "a")
    assert await a.claim(call.request_id)
    await a.send(Tokens(call.request_id, 1, 0, [5, 6], "Hi"))
    async with asyncio.timeout(60):
        await anext(gate.service.events(call))
    gate.service.release(call)

    async def cancelling() -> bool:
        return await gate.broker.hget(claim_key(call.request_id, 0), "cancel") == b"1"  # type: ignore[misc]

    await eventually_async(cancelling)
    assert (
        await gate.broker.zcard("millrace:limit_state:{1}:1:c") == 1
    )  # it keeps its concurrency slot until the engine has stopped
    await a.send(end(call, TokenCounts(10, output=7), seq=1, reason="cancelled"))
    await gate.service.drain()
    assert await gate.left(key) == ("99", "983")
    assert await gate.broker.zcard("millrace:limit_state:{1}:1:c") == 0
    assert gate.dispatcher.in_flight == 0


async def test_an_execution_without_an_end_costs_the_tokens_seen(
    gate: Gate, a: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_ends, "END_SECONDS", 0.2)
    key = make_key(LIMIT)
    call = await gate.begin(key, "a")
    await a.claim(call.request_id)
    await a.send(Tokens(call.request_id, 1, 0, [5, 6], "Hi"))
    async with asyncio.timeout(60):
        await anext(gate.service.events(call))
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(key) == ("99", "988")


@pytest.mark.parametrize("state", ["running", "done", ""])
async def test_an_internal_error_is_never_billed(
    gate: Gate, a: Replica, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The response cannot be written while the execution runs, has completed, or has no claim any more."""
    consumer: Any = ChatCompletions()
    consumer.scope, consumer.headers, consumer.trace = {}, {}, None
    consumer.idempotent_call = consumer.key_error = None
    consumer.request_id, name = "req_1", claim_key("req_1", 0)
    monkeypatch.setattr(ChatCompletions, "gateway", SimpleNamespace(service=gate.service))

    async def fail(*_: object) -> None:
        if state:
            await gate.broker.hset(name, "state", state)  # type: ignore[misc]
        else:
            await gate.broker.delete(name)
        raise RuntimeError("broken")

    monkeypatch.setattr(consumer, "_write", fail)
    request = InferenceRequest("a", [1] * 10, SamplingParams(), 20)
    answering = asyncio.create_task(consumer._begin(make_key(LIMIT), request))
    await eventually_async(partial(a.claim, "req_1"))
    await a.send(Tokens("req_1", 1, 0, [5], "Hi"))
    with pytest.raises(RuntimeError, match="broken"):
        await answering
    usage_events = [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]
    assert [
        (usage_event.billing_context.request_id, usage_event.attempt, usage_event.outcome, usage_event.finish_reason)
        for usage_event in usage_events
    ] == [("req_1", 1, "failed", "internal_error")]
    await gate.service.drain()
    assert gate.dispatcher.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "valid"), [("[1, 2]", True), ("[1, 1]", False), ("[1", False)])
async def test_an_answer_under_a_loosened_schema_is_validated(
    gate: Gate, a: Replica, monkeypatch: pytest.MonkeyPatch, stream: bool, text: str, valid: bool
) -> None:
    """The header, the body or the last chunk, and a resumed stream report the same result."""
    consumer: Any = ChatCompletions()
    trace = SimpleNamespace(failure="", active_requests=[])
    consumer.scope, consumer.headers, consumer.trace = {}, {}, trace
    consumer.idempotent_call = consumer.key_error = None
    consumer.request_id, consumer.dialect = "req_1", chat.DIALECT
    monkeypatch.setattr(ChatCompletions, "gateway", SimpleNamespace(service=gate.service))
    sent: list[Any] = []

    async def respond(_: int, body: Any, headers: Any) -> None:
        sent.extend([body, dict(headers)])

    async def start(_: Any) -> None:
        pass

    async def send(chunks: list[bytes], _: int, *, last: bool) -> None:
        sent.extend(json.loads(chunk) for chunk in chunks if chunk != DONE)

    for name, function in (("respond_json", respond), ("begin_events", start), ("send_events", send)):
        monkeypatch.setattr(consumer, name, function)
    monkeypatch.setattr(consumer, "begin_heartbeat", lambda _: None)
    schema = json.dumps({"type": "array", "uniqueItems": True})
    request = make_request(
        "a", [1] * 10, None, 20, stream=stream, ignored=("s.uniqueItems",), checked=CheckedSchemas(schema)
    )
    answering = asyncio.create_task(consumer._begin(make_key(LIMIT), request))
    await eventually_async(partial(a.claim, "req_1"))
    usage = TokenCounts(10, output=1)
    await a.send(Tokens("req_1", 1, 0, [5], text, prompt=TokenCounts(10)), End("req_1", 1, 1, "stop", None, usage))
    await answering
    if not stream:
        assert sent[1][b"x-millrace-schema-valid"] == str(valid).lower().encode()
        assert sent[1][b"x-millrace-ignored"] == b"s.uniqueItems"
    assert sent[0 if not stream else -1]["schema_valid"] is valid
    assert trace.failure == ("" if valid else "schema")
    follower = StreamFollower(gate.dispatcher, "req_1", 1, None)
    *_, last = [event async for event in checked_events(follower.events(), follower.response_spec)]
    assert isinstance(last, CheckedEnd) and last.schema_valid is valid
    await gate.service.drain()


@pytest.mark.parametrize("code", ["stream_lost", "timeout"])
async def test_a_request_reported_as_failed_is_not_billed_though_it_completed(
    gate: Gate, a: Replica, code: str
) -> None:
    call = await gate.begin(make_key(LIMIT), "a")
    assert await a.claim(call.request_id)
    claim, pins = claim_key(call.request_id, 0), pins_key(call.execution.tenant)
    await gate.broker.eval(PIN, 2, claim, pins, 1, 1, b"block")  # type: ignore[misc]
    assert await gate.broker.exists(pins)
    await gate.broker.hset(claim, "state", "done")  # type: ignore[misc]
    gate.dispatcher.fail_locally(call.execution, ApiError(code, "lost"))
    with pytest.raises(ApiError, match="lost"):
        await events_of(gate, call)
    (usage_event,) = [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]
    assert (usage_event.attempt, usage_event.outcome, usage_event.finish_reason) == (1, "failed", code)
    assert not await gate.broker.exists(pins)  # nor does it keep its pins
    gate.service.release(call)


@pytest.mark.usefixtures("a")
async def test_resuming_an_unclaimed_execution_of_a_dead_gateway_releases_its_reservation(gate: Gate) -> None:
    call = await gate.begin(make_key(LIMIT), "a")
    await gate.broker.delete(gateway_stream(GATEWAY))  # as for a gateway that died
    with pytest.raises(ApiError) as exc_info:
        await anext(StreamFollower(gate.dispatcher, call.request_id, 1, None).events())
    assert exc_info.value.code == "worker_lost"
    (usage_event,) = [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]
    assert (usage_event.outcome, usage_event.finish_reason) == ("cancelled", "never_ran")
    gate.service.release(call)


async def test_a_client_that_disconnects_while_queued_pays_nothing(gate: Gate, a: Replica) -> None:
    key = make_key(LIMIT)
    call = await gate.begin(key, "a")
    gate.service.release(call)
    await gate.service.drain()
    assert await gate.left(key) == ("100", "1000")
    assert await gate.broker.hget(claim_key(call.request_id, 0), "state") == b"cancelled"  # type: ignore[misc]


async def test_a_resumable_request_runs_on_after_a_disconnect(
    gate: Gate, a: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_return, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(client_return, "RESUME_SECONDS", 1.5)
    readers, key = StreamSubscribers(gate.broker), make_key(LIMIT)
    call = await gate.begin(key, "a")
    await a.claim(call.request_id)
    gate.service.release(call, is_returning=True)
    for _ in range(20):  # longer than RESUME_SECONDS
        await readers.refresh(call.request_id, "another-user")
        await asyncio.sleep(0.1)
    assert await gate.broker.hget(claim_key(call.request_id, 0), "cancel") is None  # type: ignore[misc]
    assert await readers.leave(call.request_id, "another-user")  # the last one

    async def cancelled() -> bool:
        return await gate.broker.hget(claim_key(call.request_id, 0), "cancel") == b"1"  # type: ignore[misc]

    await eventually_async(cancelled)
    await a.send(end(call, TokenCounts(10, output=1), reason="cancelled"))


async def test_a_reader_that_disconnects_does_not_affect_other_readers(broker: redis.Redis) -> None:
    readers = StreamSubscribers(broker)
    await broker.hset(claim_key("req_1", 0), mapping={"gateway": "gw-x"})  # type: ignore[misc]
    await broker.xadd(gateway_stream("gw-x"), {"e": b""})  # that gateway is alive, and its client reads
    await readers.refresh("req_1", "one")
    await readers.refresh("req_1", "two")
    assert not await readers.leave("req_1", "one")
    assert not await readers.leave("req_1", "two")
    await readers.refresh("req_1", "one")
    await broker.delete(gateway_stream("gw-x"))
    assert await readers.leave("req_1", "one")


async def test_the_event_loop_runs_between_two_prompts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing the longer prompts of many connections without a pause would delay the streams of all tenants."""
    loop, turn, turns = asyncio.get_running_loop(), 0, []

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < 8:
            loop.call_soon(count_turn)

    async def tokenize(*_: object) -> list[int]:
        turns.append(turn)
        return []

    monkeypatch.setattr(tokenizer, "tokenize", tokenize)
    count_turn()
    request = InferenceRequest("a", [1] * (SHORT_CHARACTERS + 1), SamplingParams(), 20)
    await asyncio.gather(*(gate.service._routing.tokenizer.tokenize(MODELS["a"], request) for _ in range(8)))
    assert len(set(turns)) == 8


async def test_an_error_does_not_keep_the_body_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's trace refers to the error, whose traceback refers to the frames that hold the body."""
    consumer: Any = ChatCompletions()
    consumer.http_method, consumer.headers = consumer.method, {}
    reported = []

    async def refuse() -> None:
        raise ApiError("rate_limit_exceeded", "too much")

    async def respond(error: ApiError) -> None:
        reported.append(error)

    monkeypatch.setattr(consumer, "handle", refuse)
    monkeypatch.setattr(consumer, "respond_error", respond)
    await consumer._respond()
    assert [error.__traceback__ for error in reported] == [None]
