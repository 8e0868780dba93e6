"""The wait between the systems of a benchmark until the other processes are at rest."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import pytest

from benchmarks.rest import Rest, read_cpu_seconds


def test_the_first_wait_observes_several_seconds_and_a_later_one_a_quiet_one() -> None:
    seconds = deque([0.05, 0.05, 0.06, 0.05, 0.05, 0.06])
    rest = Rest(measure=seconds.popleft)
    assert rest.wait()
    assert len(seconds) == 1
    assert rest.wait()
    assert not seconds


def test_it_waits_while_a_server_computes_on() -> None:
    seconds = deque([0.05] * 5 + [1.9, 0.8, 0.08, 0.07, 1.0])
    rest = Rest(measure=seconds.popleft)
    assert rest.wait()
    assert rest.wait()
    assert list(seconds) == [1.0]


def test_after_the_limit_it_ends_without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("benchmarks.rest.time.monotonic", lambda: float(next(now)))
    growing = iter(range(1000))
    assert not Rest(60, lambda: float(next(growing))).wait()


def test_without_a_limit_it_does_not_measure() -> None:
    assert Rest(0, lambda: pytest.fail("measured")).wait()


def test_cpu_seconds_are_those_of_other_processes_and_their_ended_children(tmp_path: Path) -> None:
    def write(pid: int, command: str, ticks: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({command}) S 1 2 3 4 5 6 7 8 9 10 {ticks} 20 0 1 0")

    per_second = os.sysconf("SC_CLK_TCK")
    write(10, "a (server) 7 8", f"{2 * per_second} {per_second} {4 * per_second} 0")
    write(11, "worker", f"0 0 0 {per_second}")
    write(os.getpid(), "benchmark", f"{100 * per_second} 0 0 0")
    (tmp_path / "12").mkdir()  # has ended
    (tmp_path / "sys").mkdir()
    assert read_cpu_seconds(tmp_path) == 8.0
