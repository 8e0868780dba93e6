"""Servers of managed engines: their start, health, logs, failures and ends, with real processes."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from inference_worker.worker.managed import guard
from inference_worker.worker.managed import server as module
from inference_worker.worker.managed.server import ManagedServer, ManagedServerError, server_environ
from tests.support.upstreams.platform import CHILD_SERVER
from tests.support.waiting import eventually

CHILD = f"CHILD_API_KEY={{api_key}} {sys.executable} {CHILD_SERVER} {{port}}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ManagedServer]]:
    servers: list[ManagedServer] = []

    def make(options: str = "", command: str = CHILD) -> ManagedServer:
        spec = UpstreamSpec(UpstreamEngine.MANAGED, "", "org/model; touch x", command=f"{command} {options}")
        servers.append(ManagedServer("m", spec, [sys.executable, "sleep", "no-such-program"], tmp_path / "logs"))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def logged(server: ManagedServer, word: str) -> int:
    """Return the number that the server has printed after a word."""
    found: list[str] = []
    eventually(lambda: found.extend(re.findall(rf"{word} (\d+)", server.log_path.read_text())) or found)
    return int(found[-1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def healthy(server: ManagedServer) -> ManagedServer:
    server.wait_until_healthy(lambda: False)
    return server


def test_a_server_is_started_without_a_shell_and_stopped_with_its_descendants(
    start: Callable[..., ManagedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 1.0)
    server = healthy(start("slow fork deaf {model} '{model}'"))
    pid, sleeper = logged(server, "listening"), logged(server, "sleeper")
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert words[-3:-1] == [b"org/model; touch x"] * 2
    tree = [*Path("/proc").glob("[0-9]*/cmdline")]
    lines = [path.read_bytes() for path in tree if path.exists()]
    assert not any(server.api_key.encode() in line for line in lines), "the key is in a command line"
    assert server.log_path.stat().st_mode & 0o777 == 0o600
    server.stop()
    assert not is_alive(pid)
    assert not is_alive(sleeper)


@pytest.mark.parametrize("killed", ["worker", "guard"])
def test_a_server_ends_with_a_killed_worker_or_guard(
    start: Callable[..., ManagedServer], tmp_path: Path, killed: str
) -> None:
    if killed == "guard":
        server = healthy(start())
        assert server._process is not None
        server._process.kill()
        pid = logged(server, "listening")
    else:
        log, port = tmp_path / "log", module._free_port()
        arguments = [
            "-I",
            "-S",
            guard.__file__,
            str(log),
            "60",
            sys.executable,
            str(CHILD_SERVER),
            str(port),
            "fork",
        ]
        command = repr([sys.executable, *arguments])
        program = f"import subprocess, time; child = subprocess.Popen({command}, stdin=subprocess.PIPE)"
        worker = subprocess.Popen([sys.executable, "-c", program + "; time.sleep(600)"])
        found: list[str] = []
        eventually(lambda: (log.exists() and found.extend(re.findall(r"listening (\d+)", log.read_text()))) or found)
        pid = int(found[0])
        worker.kill()
        worker.wait()
        sleeper = int(re.findall(r"sleeper (\d+)", log.read_text())[0])
        eventually(lambda: not is_alive(sleeper))
    eventually(lambda: not is_alive(pid))


def test_a_failure_after_the_start_is_reported_once(
    start: Callable[..., ManagedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    server = healthy(start())
    server.watch(reasons.put)
    os.kill(logged(server, "listening"), signal.SIGKILL)
    assert "ended with status 137" in reasons.get(timeout=20)
    short = {"STOP": 1.0, "CHECK": 0.1, "CHECK_TIMEOUT": 0.2, "MAX_UNHEALTHY": 0.5}
    for name, seconds in short.items():
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    stuck = healthy(start())
    stuck.watch(reasons.put)
    pid = logged(stuck, "listening")
    os.kill(pid, signal.SIGSTOP)
    assert "did not answer" in reasons.get(timeout=20)
    assert not is_alive(pid)
    stopped = healthy(start())
    stopped.watch(reasons.put)
    stopped.stop()
    time.sleep(3 * module.POLL_SECONDS)
    assert reasons.empty()


def test_a_server_that_does_not_become_healthy_is_stopped(
    start: Callable[..., ManagedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ManagedServerError, match="status 3 after"):
        healthy(start("dies"))
    with pytest.raises(ManagedServerError, match="no program"):
        start(command="no-such-program {port}")
    with pytest.raises(ManagedServerError, match="MILLRACE_MANAGED_PROGRAMS"):
        start(command="/bin/sh -c {port}")
    asleep = start(command="sleep 600 --port={port}")
    with pytest.raises(ManagedServerError, match="status 1"):
        healthy(asleep)
    asleep = start(command="sleep 6{port}")
    with pytest.raises(ManagedServerError, match="removed"):
        asleep.wait_until_healthy(lambda: True)
    monkeypatch.setattr(module, "MAX_START_SECONDS", 0.3)
    asleep = start(command="sleep 6{port}")
    with pytest.raises(ManagedServerError, match="not healthy after"):
        healthy(asleep)
    assert asleep._process is not None
    assert asleep._process.poll() is not None


def test_the_log_of_a_server_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_LOG_BYTES", 1000)
    log = guard.BoundedLog(tmp_path / "log")
    for number in range(100):
        log.write(b"%098d\n\n" % number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() <= {"log", "log.1"}
    assert max(sizes.values()) <= 1100
    assert b"%098d" % 99 in (tmp_path / "log").read_bytes() + (tmp_path / "log.1").read_bytes()


def test_a_server_inherits_no_secrets() -> None:
    environ = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "VLLM_USE_V1": "1", "HF_HOME": "/models"}
    secrets = {
        "MILLRACE_VALKEY_URL": "redis://:pw@h",
        "MILLRACE_WORKER_SECRET": "x",
        "HF_TOKEN": "t",
        "AWS_SECRET": "a",
    }
    assert server_environ(environ | secrets) == environ
