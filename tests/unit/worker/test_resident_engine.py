"""The engine's thread: submission, output and end of executions. The model is fake, the engine real."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from structlog.testing import CapturingLogger

from inference_worker.contract.metric_families import GENERATION_TOKENS, ITL
from inference_worker.contract.request import (
    CacheBreakpoint,
    Request,
    RequestError,
    RequestOutput,
    ServiceClass,
)
from inference_worker.worker.engine_client import Requeued, is_last
from tests.support.waiting import eventually
from tests.support.worker.resident_engine import Harness


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.steps(1000)
    harness.client.close()
    harness.engine.check_integrity()


def test_an_execution_is_run_and_ends(harness: Harness) -> None:
    live = harness.submit("req_1", max_tokens=3)
    harness.steps(3)
    outputs = [harness.next() for _ in range(3)]
    assert all(delivered is live for delivered, _ in outputs)
    results = [output for _, output in outputs if isinstance(output, RequestOutput)]
    assert [token for result in results for token in result.token_ids] == [100, 101, 102]
    assert results[-1].finish_reason == "length"
    assert harness.client.live() == []
    assert live.first_token_at is not None
    assert live.scheduled_at is not None
    assert live.claimed_at <= live.scheduled_at <= live.first_token_at


def test_an_execution_lasts_until_its_last_choice_ends(harness: Harness) -> None:
    live = harness.submit("req_1", max_tokens=2, n=3)
    outputs: list[RequestOutput] = []
    while not any(is_last(output) for output in outputs):
        if any(output.finish_reason for output in outputs):
            assert harness.client.live() == [live]
        harness.steps(1)
        eventually(lambda: not harness.delivered.empty())
        while not harness.delivered.empty():
            _, output = harness.next()
            assert isinstance(output, RequestOutput)
            outputs.append(output)
    assert sorted(output.index for output in outputs if output.finish_reason) == [0, 1, 2]
    assert [output.usage.output for output in outputs if output.usage] == [6]
    assert harness.client.live() == []


def test_the_jobs_parameters_reach_the_engine(harness: Harness) -> None:
    seen: list[Request] = []
    add = harness.engine.add_request
    harness.engine.add_request = lambda request: (seen.append(request), add(request))[1]  # type: ignore[method-assign]
    pin = CacheBreakpoint(16, 300)
    harness.submit("req_1", weight=2.0, service_class=ServiceClass.FLEX, priority=7, breakpoints=(pin,))
    harness.steps(10)
    assert harness.next()[0].job.priority == 7
    (request,) = seen
    assert (request.tenant, request.weight, request.priority) == ("1", 2.0, 7)
    assert (request.service_class, request.breakpoints, request.structured) == (ServiceClass.FLEX, (pin,), None)


def test_counters_can_be_read_during_steps_and_only_increase(harness: Harness) -> None:
    harness.steps(1000)
    for number in range(8):
        harness.submit(f"req_{number}", max_tokens=60)
    seen, gaps, ended = [0.0], [0], 0
    while ended < 8:
        snapshot = harness.client.metrics()
        seen.append(snapshot.counters[GENERATION_TOKENS][""])
        gaps.append(sum(snapshot.histograms[ITL].counts))
        while not harness.delivered.empty():
            ended += getattr(harness.next()[1], "finish_reason", None) is not None
    assert (seen, gaps) == (sorted(seen), sorted(gaps))
    eventually(lambda: harness.client.metrics().counters[GENERATION_TOKENS] == {"": 8 * 60})
    eventually(lambda: sum(harness.client.metrics().histograms[ITL].counts) == 8 * 59)


def test_a_request_that_can_never_fit_is_rejected_with_the_reason(harness: Harness) -> None:
    live = harness.submit("req_1", prompt=500, max_tokens=100)
    refused, error = harness.next()
    assert refused is live
    assert isinstance(error, RequestError)
    assert error.code == "context_length_exceeded"
    assert harness.client.live() == []


def test_a_cancel_takes_effect_within_two_steps(harness: Harness) -> None:
    live = harness.submit("req_1", max_tokens=50)
    harness.steps(4)
    for _ in range(4):
        harness.next()
    harness.client.cancel(live)
    harness.steps(2)
    outputs = [harness.next()]
    while not (isinstance(outputs[-1][1], RequestOutput) and outputs[-1][1].finish_reason):
        outputs.append(harness.next())
    assert len(outputs) <= 3
    final = outputs[-1][1]
    assert isinstance(final, RequestOutput)
    assert final.finish_reason == "cancelled"
    assert final.usage is not None
    assert final.usage.prompt == 20
    assert 4 <= final.usage.output <= 6
    eventually(lambda: harness.client.stats().kv_blocks_used == 0)


@pytest.mark.parametrize(("failure", "pins"), [(None, 6), (RequestError("timeout", "too late"), 4)])
def test_an_unbilled_execution_pins_only_computed_blocks(
    harness: Harness, failure: RequestError | None, pins: int
) -> None:
    live = harness.submit("req_1", prompt=100, breakpoints=(CacheBreakpoint(96, 300),))
    eventually(lambda: len(harness.engine.scheduler.cache.pins) == 6)
    harness.client.cancel(live, failure)
    harness.steps(1)
    harness.next()
    assert len(harness.engine.scheduler.cache.pins) == pins


def test_cancelling_twice_or_after_the_end_has_no_effect(harness: Harness) -> None:
    live = harness.submit("req_1", max_tokens=1)
    harness.steps(1)
    harness.next()
    harness.client.cancel(live)
    harness.client.cancel(live)
    other = harness.submit("req_2", max_tokens=1)
    harness.steps(1)
    assert harness.next()[0] is other
    assert harness.delivered.empty()


def test_only_an_execution_that_has_not_started_can_be_requeued(harness: Harness) -> None:
    begun = harness.submit("req_begun", max_tokens=3)
    harness.steps(1)
    harness.next()
    waiting = harness.submit("req_waiting")
    for live in (begun, waiting):
        harness.client.requeue(live)
    harness.steps(3)
    outcomes = [harness.next() for _ in range(3)]
    assert (waiting, Requeued()) in outcomes
    ended = [o for live, o in outcomes if live is begun and isinstance(o, RequestOutput) and o.finish_reason]
    assert [output.finish_reason for output in ended] == ["length"]


def test_a_broken_engine_ends_all_executions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    live = harness.submit("req_1", max_tokens=50)
    harness.steps(1)
    harness.next()

    def broken() -> list[RequestOutput]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(harness.engine, "step", broken)
    harness.steps(2)
    while not isinstance((delivered := harness.next())[1], RequestError):
        pass
    assert delivered[0] is live
    assert harness.broken.wait(60)
    assert harness.client.live() == []


def test_a_hung_step_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_worker.worker.engine_client.CLOSING_SECONDS", 0.2)
    harness = Harness()
    live = harness.submit("req_1")
    eventually(lambda: bool(harness.client._live))  # its step has begun, or is about to
    log = CapturingLogger()
    monkeypatch.setattr("inference_worker.worker.engine_client.log", log)
    began = time.monotonic()
    harness.client.close()
    assert time.monotonic() - began < 30
    assert [(call.args, call.kwargs) for call in log.calls] == [(("engine_left",), {"executions": [live.engine_id]})]
    harness.steps(1000)
