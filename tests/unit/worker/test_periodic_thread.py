"""Threads that repeat a step: errors do not end them, and closing has a limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from structlog.testing import CapturingLogger

from inference_worker.worker import periodic_thread
from inference_worker.worker.periodic_thread import PeriodicThread


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    logger = CapturingLogger()
    monkeypatch.setattr(periodic_thread, "log", logger)
    return logger


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return an event that a step may wait for. It is set after the test."""
    event = threading.Event()
    yield event
    event.set()


def test_the_errors_of_a_step_are_logged_and_the_step_is_repeated(log: CapturingLogger) -> None:
    results = iter([redis.ConnectionError("away"), ValueError("defect"), None])
    has_passed = threading.Event()

    def step() -> None:
        if (error := next(results, None)) is not None:
            raise error
        has_passed.set()

    thread = PeriodicThread("steps", step, 0.001)
    thread.start()
    assert has_passed.wait(60)
    thread.close()
    assert not thread.is_alive()
    assert [(call.method_name, call.args, call.kwargs) for call in log.calls] == [
        ("warning", ("broker_unreachable",), {"thread": "steps", "error": "away"}),
        ("exception", ("thread_step_failed",), {"thread": "steps"}),
    ]


def test_a_step_can_end_its_thread() -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            thread.stop()

    thread = PeriodicThread("steps", step, 0.001)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert steps == [0, 1, 2]


def test_closing_does_not_wait_longer_than_its_limit(
    log: CapturingLogger, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic_thread, "CLOSING_SECONDS", 0.01)
    has_begun = threading.Event()

    def step() -> None:
        has_begun.set()
        released.wait(60)

    thread = PeriodicThread("steps", step, 60)
    thread.start()
    assert has_begun.wait(60)
    thread.close()
    assert thread.is_alive()
    assert [(call.args, call.kwargs) for call in log.calls] == [(("thread_left",), {"thread": "steps"})]
    released.set()
    thread.join(60)  # it does not repeat the step, nor wait for the interval
    assert not thread.is_alive()


def test_closing_during_the_first_interval_runs_no_step() -> None:
    steps: list[None] = []
    thread = PeriodicThread("steps", lambda: steps.append(None), 60, waits_first=True)
    thread.start()
    thread.close()
    assert not thread.is_alive()
    assert steps == []


def test_a_thread_is_started_once_and_closed_before_its_start_without_an_error() -> None:
    steps: list[None] = []
    thread = PeriodicThread("steps", lambda: steps.append(None), 60)
    thread.close()
    thread.start()
    thread.join(60)
    thread.start()  # such as by a second load
    thread.close()
    assert len(steps) == 1
