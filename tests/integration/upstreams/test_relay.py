"""The relay against a server that plays the providers' protocols, with faults."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from inference_worker.contract.messages import Machine, read_metrics
from inference_worker.contract.request import RequestError, RequestOutput, TokenCounts
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine
from inference_worker.worker.engine_client import Outcome, Requeued
from inference_worker.worker.relay import circuit_breaker, relay
from inference_worker.worker.replica import LoadedEngine, LocalReplica
from tests.support.upstreams.protocol_server import USAGE, Answer, ProtocolServer
from tests.support.upstreams.relay_harness import ANTHROPIC, OPENAI, SECRET, Harness
from tests.support.waiting import eventually

FROM_UPSTREAM = TokenCounts(USAGE["prompt"] - USAGE["cached"], USAGE["cached"], output=USAGE["output"])


@pytest.fixture(scope="module")
def running() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


@pytest.fixture
def server(running: ProtocolServer) -> ProtocolServer:
    running.answers.clear()
    running.received.clear()
    running.disconnected.clear()
    running.default = Answer()
    return running


@pytest.fixture
def relays(server: ProtocolServer) -> Iterator[Callable[..., Harness]]:
    started: list[Harness] = []

    def start(engine: UpstreamEngine = OPENAI, **fields: Any) -> Harness:
        started.append(Harness(server, engine, **fields))
        return started[-1]

    yield start
    for each in started:
        each.relay.close()
        assert not each.relay.live()
        assert not each.broken.is_set()


def text(outcomes: Sequence[Outcome], index: int = 0) -> str:
    return "".join(each.text for each in outcomes if isinstance(each, RequestOutput) and each.index == index)


def calls(outcomes: Sequence[Outcome]) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for call in (call for each in outcomes if isinstance(each, RequestOutput) for call in each.calls):
        name, arguments = found.get(call.number, ("", ""))
        found[call.number] = name + call.name, arguments + call.arguments
    return found


@pytest.mark.parametrize("engine", [OPENAI, ANTHROPIC])
def test_a_stream_is_relayed_with_its_usage(
    server: ProtocolServer, relays: Callable[..., Harness], engine: UpstreamEngine
) -> None:
    arguments = '{"city": "Paris", "days": 2}'
    server.default = Answer(
        "It is sunny", "Let me think", calls=(("weather", arguments), ("time", "")), usage={**USAGE, "reasoning": 4}
    )
    harness = relays(engine)
    outcomes = harness.run()
    last = outcomes[-1]
    assert isinstance(last, RequestOutput)
    assert (text(outcomes), last.finish_reason, last.usage) == ("It is sunny", "stop", FROM_UPSTREAM)
    assert last.usage_source == "upstream"
    assert "".join(each.reasoning for each in outcomes if isinstance(each, RequestOutput)) == "Let me think"
    assert calls(outcomes) == {0: ("weather", arguments), 1: ("time", "")}
    (received,) = server.received
    assert received.body["model"] == "model-x"
    assert received.body["messages"] == [{"role": "user", "content": "Hi"}]
    if engine == ANTHROPIC:
        assert received.path == "/v1/messages"
        assert (received.headers["x-api-key"], received.body["max_tokens"]) == (SECRET, 50)
        assert "".join(each.signature for each in outcomes if isinstance(each, RequestOutput)) == "sig-of-the-provider"
    else:
        assert received.path == "/v1/chat/completions"
        assert received.headers["authorization"] == f"Bearer {SECRET}"
        assert (received.body["max_completion_tokens"], last.reasoning_tokens) == (50, 4)


def test_several_answers_end_one_by_one_and_the_usage_comes_once(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.default = Answer("a b")
    server.received.clear()
    harness = relays()
    harness.submit(n=2)
    outcomes = harness.outcomes()
    ends = [each for each in outcomes if isinstance(each, RequestOutput) and each.finish_reason]
    assert [(each.index, each.usage is None) for each in ends] == [(0, True), (1, False)]


# Faults. Each execution has exactly one last outcome, and its usage is the operator's cost.

FAULTS: dict[str, tuple[Answer, str]] = {
    "cut": (Answer(cut_after=5), "upstream_error"),
    "malformed": (Answer(malformed_after=5), "upstream_error"),
    "error event": (Answer(error_after=5, error={"type": "overloaded_error"}), "server_is_overloaded"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("engine", [OPENAI, ANTHROPIC])
def test_a_failure_after_tokens_fails_with_the_usage_so_far(
    server: ProtocolServer, relays: Callable[..., Harness], engine: UpstreamEngine, fault: str
) -> None:
    server.answers.append(FAULTS[fault][0])
    harness = relays(engine)
    outcomes = harness.run()
    assert text(outcomes)
    error = outcomes[-1]
    assert isinstance(error, RequestError)
    assert (error.code, error.usage_source) == (FAULTS[fault][1], "estimated")
    assert error.usage is not None
    prompt = FROM_UPSTREAM.prompt if engine == ANTHROPIC else 25
    assert (error.usage.prompt, error.usage.output) == (prompt, -(-len(text(outcomes)) // 4))
    assert len(server.received) == 1, "tokens were sent, so the request is not repeated"
    assert text(harness.run(name="next")) == "Hello from upstream", "the relay serves the next request"


@pytest.mark.parametrize("engine", [OPENAI, ANTHROPIC])
def test_missing_and_surplus_usage(
    server: ProtocolServer, relays: Callable[..., Harness], engine: UpstreamEngine
) -> None:
    server.answers += [Answer("x" * 41, usage=None), Answer(usage={**USAGE, "output": 100_000}), Answer(has_done=False)]
    harness = relays(engine)
    missing, surplus, undone = (harness.run(name=str(number))[-1] for number in range(3))
    assert isinstance(missing, RequestOutput)
    assert isinstance(surplus, RequestOutput)
    assert isinstance(undone, RequestOutput)
    assert (missing.usage, missing.usage_source) == (TokenCounts(25, output=11), "estimated")
    assert surplus.usage is not None
    assert surplus.reported_usage is not None
    assert (surplus.usage.output, surplus.usage_source) == (50, "upstream")
    assert (surplus.usage.prompt, surplus.reported_usage.output) == (USAGE["prompt"], 100_000)
    assert undone.usage == FROM_UPSTREAM


@pytest.mark.parametrize("status", [429, 529])
def test_a_request_waits_for_capacity_as_the_upstream_says(
    server: ProtocolServer, relays: Callable[..., Harness], status: int
) -> None:
    server.answers += [Answer(status=status, headers={"retry-after-ms": "120"})]
    harness = relays()
    began = time.monotonic()
    outcomes = harness.run()
    assert time.monotonic() - began >= 0.12
    assert text(outcomes) == "Hello from upstream"
    assert len(server.received) == 2


def test_a_request_with_another_target_or_too_little_time_does_not_wait(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers += [Answer(status=429, headers={"retry-after": "30"})]
    harness = relays()
    (error,) = harness.run(waits=False)
    assert isinstance(error, RequestError)
    assert (error.code, error.retry_after, error.usage) == ("server_is_overloaded", 30.0, TokenCounts())
    for credential, pause in ((7, 60.0), (8, 3000.0)):  # tenants share the first one; the other one is a tenant's own
        harness.relay.breaker._resumes_at.clear()
        server.answers += [Answer(status=529, headers={"retry-after": "3000"})]
        (error,) = harness.run(name="late", seconds=30, credential=credential)
        assert isinstance(error, RequestError)
        assert (error.code, error.retry_after) == ("server_is_overloaded", pause)


def test_a_credential_without_capacity_or_secret_does_not_stop_the_others(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers += [Answer(status=429, headers={"retry-after": "3000"})]
    harness = relays()
    for credential, received in ((8, 1), (8, 1), (9, 1)):  # the first is limited, the last has no secret
        (error,) = harness.run(name="own", waits=False, credential=credential)
        assert isinstance(error, RequestError)
        assert (error.code, len(server.received)) == ("server_is_overloaded", received)
    assert text(harness.run(name="others", waits=False)) == "Hello from upstream"


REJECTIONS = [
    (400, {"message": "bad temperature", "type": "invalid_request_error", "param": "temperature"}, "upstream_rejected"),
    (400, {"message": "too long", "code": "context_length_exceeded"}, "context_length_exceeded"),
    (400, {"message": "prompt is too long: 9 tokens > 8 maximum"}, "context_length_exceeded"),
    (401, {"message": f"Incorrect API key provided: {SECRET}"}, "upstream_error"),
    (404, {"message": "no model"}, "upstream_error"),
    (429, {"message": "quota", "code": "insufficient_quota"}, "upstream_error"),
    (500, {"message": "boom"}, "upstream_error"),
]


@pytest.mark.parametrize(("status", "error", "code"), REJECTIONS)
def test_rejections_are_typed_and_name_no_secret(
    server: ProtocolServer, relays: Callable[..., Harness], status: int, error: dict[str, str], code: str
) -> None:
    server.answers.append(Answer(status=status, error=error))
    (outcome,) = relays().run()
    assert isinstance(outcome, RequestError)
    assert (outcome.code, outcome.usage) == (code, TokenCounts())
    assert SECRET not in outcome.message
    if status == 400:
        assert error["message"] in outcome.message
        assert outcome.param == error.get("param")


def test_a_refusal_of_a_tenants_own_credential_does_not_name_the_operator(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers += [Answer(status=401), Answer(status=429, error={"code": "insufficient_quota", "message": "x"})]
    harness = relays()
    for name in ("refused", "no quota"):
        (error,) = harness.run(name=name, credential=8)
        assert isinstance(error, RequestError)
        assert (error.code, "your own credential" in error.message) == ("upstream_error", True)


def test_a_cancelled_execution_closes_its_stream_and_counts_what_it_sent(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers.append(Answer("one two three", holds=threading.Event()))
    harness = relays()
    live = harness.submit()
    sent = [harness.next()]
    while not text(sent):
        sent.append(harness.next())
    harness.relay.requeue(live)  # without effect, since a token was sent
    harness.relay.cancel(live)
    harness.relay.cancel(live)
    (last,) = harness.outcomes()
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.usage, last.usage_source) == ("cancelled", TokenCounts(25, output=1), "estimated")
    assert server.disconnected.wait(20)


def test_the_prompt_of_an_execution_that_is_cancelled_before_the_response_is_counted(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    hold = threading.Event()
    server.answers.append(Answer(waits=hold))
    harness = relays()
    live = harness.submit()
    eventually(lambda: server.received)
    harness.relay.cancel(live)
    (last,) = harness.outcomes()
    hold.set()
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.usage, last.usage_source) == ("cancelled", TokenCounts(25), "estimated")


def test_executions_that_wait_for_a_slot_are_requeued_or_cancelled_without_usage(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    hold = threading.Event()
    server.answers.append(Answer(waits=hold))
    harness = relays(concurrency=1)
    first, second, third = (harness.submit(name) for name in ("1", "2", "3"))
    harness.relay.requeue(second)
    assert isinstance(harness.next(), Requeued)
    harness.relay.cancel(third)
    cancelled = harness.next()
    assert isinstance(cancelled, RequestOutput)
    assert (cancelled.finish_reason, cancelled.usage) == ("cancelled", TokenCounts())
    assert harness.relay.live() == [first]
    hold.set()
    assert text(harness.outcomes()) == "Hello from upstream"
    assert len(server.received) == 1


def test_a_request_past_its_deadline_fails(server: ProtocolServer, relays: Callable[..., Harness]) -> None:
    hold = threading.Event()
    server.answers.append(Answer(waits=hold))
    (error,) = relays().run(seconds=0.2)
    hold.set()
    assert isinstance(error, RequestError)
    assert (error.code, error.usage) == ("timeout", TokenCounts())


def reported_state(harness: Harness) -> tuple[bool, int]:
    """Return the states of the circuits in the heartbeat of the relay's replica. The metrics have the same."""
    replica = LocalReplica("m-0.aa", ModelSpec("m", "x", "auto"))
    replica.loaded = LoadedEngine(harness.relay, Machine("1", "upstream", 1, "", 0, 0), 1, None)
    beat = replica.heartbeat(1, accepts=True, draining=False, disk_low=False)
    (record,) = replica.new_records()
    metrics = read_metrics(record.payload)
    assert metrics is not None
    names = "millrace_upstream_circuit_open", "millrace_upstream_tenants_paused"
    assert [metrics.gauges[name] for name in names] == [beat.circuit_open, beat.tenants_paused]
    return beat.circuit_open, beat.tenants_paused


@pytest.mark.parametrize("fault", [Answer(cut_after=5), Answer(status=500), Answer(malformed_after=5)])
def test_failures_of_one_tenant_pause_only_this_tenant(
    server: ProtocolServer, relays: Callable[..., Harness], fault: Answer
) -> None:
    server.answers.extend([fault] * (circuit_breaker.MAX_FAILURES + 1))
    harness = relays()
    for number in range(circuit_breaker.MAX_FAILURES + 1):
        harness.submit(name=str(number))
    for _ in range(circuit_breaker.MAX_FAILURES + 1):
        harness.outcomes()
    assert reported_state(harness) == (False, 1)
    (error,) = harness.run(name="same tenant", waits=False)
    assert isinstance(error, RequestError)
    assert (error.code, "Your last requests" in error.message) == ("server_is_overloaded", True)
    assert 0 < (error.retry_after or 0) <= circuit_breaker.FIRST_OPEN_SECONDS
    assert text(harness.run(name="another tenant", waits=False, tenant=2)) == "Hello from upstream"
    assert text(harness.run(name="own credential", waits=False, credential=8)) == "Hello from upstream"
    assert text(harness.run(name="waits")) == "Hello from upstream"
    eventually(lambda: reported_state(harness) == (False, 0))  # recorded after the response is delivered


def test_failures_with_an_own_credential_pause_only_its_requests(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers.extend([Answer(status=500)] * circuit_breaker.MAX_FAILURES)
    harness = relays()
    for number in range(circuit_breaker.MAX_FAILURES):
        harness.run(name=str(number), credential=8)
    (error,) = harness.run(name="same credential", waits=False, credential=8)
    assert isinstance(error, RequestError)
    assert "your own credential" in error.message
    assert text(harness.run(name="same tenant", waits=False)) == "Hello from upstream"
    assert text(harness.run(name="another tenant", waits=False, tenant=2)) == "Hello from upstream"


def test_an_upstream_that_cannot_be_reached_opens_the_circuit(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        harness = relays(base_url=f"http://127.0.0.1:{closed.getsockname()[1]}/v1")
        for number in range(circuit_breaker.MAX_FAILURES):
            harness.run(name=str(number))
    assert reported_state(harness) == (True, 0)
    (error,) = harness.run(name="another tenant", waits=False, tenant=2)
    assert isinstance(error, RequestError)
    assert error.code == "server_is_overloaded"


def test_requests_without_a_token_until_their_deadline_are_failures(
    server: ProtocolServer, relays: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.1)
    hold = threading.Event()
    server.answers.extend([Answer(waits=hold)] * circuit_breaker.MAX_FAILURES)
    harness = relays()
    for number in range(circuit_breaker.MAX_FAILURES):
        harness.submit(name=str(number), seconds=0.3)
    for _ in range(circuit_breaker.MAX_FAILURES):
        harness.outcomes()
    hold.set()
    assert reported_state(harness) == (False, 1)


def test_the_circuit_opens_after_faults_of_two_tenants_and_closes_after_a_probe(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    server.answers.extend(Answer(status=500) for _ in range(circuit_breaker.MAX_FAILURES))
    harness = relays()
    for number in range(circuit_breaker.MAX_FAILURES):
        harness.run(name=str(number), tenant=1 + number % 2)
    for credential in (None, None, 8, 9):
        (error,) = harness.run(name="rejected", waits=False, credential=credential)
        assert isinstance(error, RequestError)
        assert error.code == "server_is_overloaded"
        assert error.retry_after
        assert harness.relay.breaker.is_open, "a rejection says nothing about the upstream"
        assert reported_state(harness) == (True, 0)
    assert len(server.received) == circuit_breaker.MAX_FAILURES
    assert text(harness.run(name="probe", tenant=3)) == "Hello from upstream"
    eventually(lambda: reported_state(harness) == (False, 0))  # recorded after the response is delivered


def test_internal_addresses_and_unencrypted_urls_are_refused(
    server: ProtocolServer, relays: Callable[..., Harness]
) -> None:
    with pytest.raises(ValueError, match="https"):
        relays(allow_internal=False)
    harness = relays(allow_internal=False, base_url=f"https://localhost:{server.port}/v1")
    connections = server.connections
    (error,) = harness.run()
    assert isinstance(error, RequestError)
    assert (error.code, server.connections) == ("upstream_error", connections)
    assert "internal" in error.message


def test_500_streams_at_once(server: ProtocolServer, relays: Callable[..., Harness]) -> None:
    hold = threading.Event()
    server.default = Answer(holds=hold)
    harness = relays(concurrency=500)
    for number in range(500):
        harness.submit(str(number))
    eventually(lambda: server.open_streams >= 500)
    hold.set()
    server.default = Answer()
    ends = [outcome for _ in range(500) for outcome in harness.outcomes()[-1:]]
    assert all(isinstance(end, RequestOutput) and end.usage == FROM_UPSTREAM for end in ends)
    assert harness.relay.metrics().counters["vllm:request_success"]["stop"] == 500
