"""The published state of the child processes: written in place, checked when read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from millrace.environment.processes import FILE_BYTES, FILE_NAME, ProcessFile, ProcessState, read_processes


def test_published_states_are_read_and_described(tmp_path: Path) -> None:
    file = ProcessFile(tmp_path)
    assert read_processes(tmp_path, os.getpid()) == ()  # no state yet
    states = (
        ProcessState("worker-x", False, 4, "killed by SIGKILL", time.monotonic() + 8.2),
        ProcessState("beat", True),
        ProcessState("web", True, 1, "ended with status 1"),
    )
    file.publish(states)
    found = read_processes(tmp_path, os.getpid())
    assert found == states
    assert found[0].describe() == "restarting, 4 deaths, last: killed by SIGKILL, next start in 8 s"
    assert found[1].describe() == "running"
    assert found[2].describe() == "running, 1 death lately, last: ended with status 1"
    file.close()
    assert read_processes(tmp_path, os.getpid()) == ()


def test_an_update_needs_no_space(tmp_path: Path) -> None:
    file = ProcessFile(tmp_path)
    for number in (30, 3, 20):
        file.publish([ProcessState(f"p{n}", True) for n in range(number)])
        assert len(read_processes(tmp_path, os.getpid())) == number
        assert (tmp_path / FILE_NAME).stat().st_size == FILE_BYTES
    file.close()


def test_states_of_other_supervisors_and_torn_states_are_skipped(tmp_path: Path) -> None:
    file = ProcessFile(tmp_path)
    file.publish([ProcessState("a", True)])
    assert read_processes(tmp_path, os.getpid() + 1) == ()
    path = tmp_path / FILE_NAME
    torn = bytearray(path.read_bytes())
    torn[12] ^= 1
    path.write_bytes(torn)
    assert read_processes(tmp_path, os.getpid()) == ()
