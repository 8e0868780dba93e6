"""Grammars are compiled outside the engine's thread, which runs other requests meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from inference_worker.contract.request import RequestError, RequestOutput, RequestRejected, StructuredSpec
from tests.support.waiting import eventually
from tests.support.worker.resident_engine import Harness

FORM = StructuredSpec("regex", "a{1,9}")


class SlowGrammars:
    """A fake compiler that waits for the test and reports that the grammar cannot be enforced."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.compiling_on: list[str] = []
        self._done: set[tuple[str, StructuredSpec]] = set()

    def knows(self, tenant: str, spec: StructuredSpec) -> bool:
        return (tenant, spec) in self._done

    def start(self, tenant: str, spec: StructuredSpec) -> None:
        if (tenant, spec) not in self._done:
            self.compiling_on.append(threading.current_thread().name)
            assert self.allowed.wait(60)
            self._done.add((tenant, spec))
        raise RequestRejected("unsupported_schema", "no form is supported", "guided_regex")

    def close(self) -> None:
        self.allowed.set()


@pytest.fixture
def grammars() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
def harness(grammars: SlowGrammars) -> Iterator[Harness]:
    harness = Harness()
    harness.engine.grammars = grammars  # type: ignore[assignment]
    yield harness
    harness.steps(1000)
    grammars.allowed.set()
    harness.client.close()
    harness.engine.check_integrity()


def test_other_requests_run_while_a_grammar_is_compiled(harness: Harness, grammars: SlowGrammars) -> None:
    held = harness.submit("req_1", structured=FORM)
    harness.submit("req_2", max_tokens=2)
    harness.steps(2)
    assert [harness.next()[0].job.billing_context.request_id for _ in range(2)] == ["req_2", "req_2"]
    assert harness.client.live() == [held]
    grammars.allowed.set()
    live, error = harness.next()
    assert live is held
    assert isinstance(error, RequestError)
    assert harness.client.live() == []
    assert grammars.compiling_on == ["grammars_0"]


def test_a_compiled_grammar_does_not_wait_for_another(harness: Harness, grammars: SlowGrammars) -> None:
    grammars._done.add(("1", FORM))
    harness.submit("req_1", structured=StructuredSpec("regex", "b"))
    known = harness.submit("req_2", structured=FORM)
    assert harness.next()[0] is known


def test_a_grammar_of_another_tenant_is_compiled_again(harness: Harness, grammars: SlowGrammars) -> None:
    grammars._done.add(("1", FORM))
    other = harness.submit("req_1", tenant=2, structured=FORM)
    assert harness.client.live() == [other]
    eventually(lambda: bool(grammars.compiling_on))
    grammars.allowed.set()
    assert harness.next()[0] is other


def test_an_execution_cancelled_during_compilation_ends_immediately(harness: Harness, grammars: SlowGrammars) -> None:
    held = harness.submit("req_1", structured=FORM)
    eventually(lambda: bool(grammars.compiling_on))
    harness.client.cancel(held)
    live, output = harness.next()
    assert live is held
    assert isinstance(output, RequestOutput)
    assert output.finish_reason == "cancelled"
    assert output.usage is not None
    assert harness.client.live() == []
    grammars.allowed.set()
    harness.submit("req_2", max_tokens=1)
    harness.steps(1)
    assert harness.next()[0].job.billing_context.request_id == "req_2"  # and no more outputs of the first
    assert harness.client.live() == []
