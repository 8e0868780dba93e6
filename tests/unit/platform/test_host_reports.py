"""The state of a machine, as its gateways send it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.host import host_name
from millrace.environment.host_reports import HostReport, report_host
from millrace.environment.processes import ProcessFile, ProcessState


def sent(report: HostReport) -> HostReport:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=HostReport)


def test_processes_that_ended_are_reported_with_relative_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of different machines are never compared."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # so that this process is its own supervisor
    file = ProcessFile(tmp_path)
    down = ProcessState("worker-m", False, 4, "killed by SIGKILL", time.monotonic() + 100)
    file.publish([down, ProcessState("web", True), ProcessState("beat", True, 1, "x"), ProcessState("new", False)])
    report = sent(report_host(tmp_path, FreeSpace([], 0)))
    assert report.name == host_name()
    assert [process.name for process in report.processes] == ["worker-m", "beat", "new"]
    assert 90 < report.processes[0].next_start_at <= 100
    (read, *_) = report.read_processes()
    assert down.next_start_at - 1 < read.next_start_at < down.next_start_at + 60
    assert read.deaths == 4
    file.close()


def test_the_free_space_is_that_of_the_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_worker.contract.disk.free_bytes", lambda _: 70)
    space = FreeSpace([tmp_path], 100)
    space.look()
    report = sent(report_host(tmp_path, space))
    assert (report.free, report.min_free, report.resume_at, report.is_disk_low) == (70, 100, 125, True)
    assert report.processes == ()
