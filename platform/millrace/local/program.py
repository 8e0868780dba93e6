"""Child processes: their command, user and environment, and their end together with the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


class ServiceError(Exception):
    """Raised if an embedded service cannot be set up or started. The message says what to do."""


@dataclass(frozen=True)
class UnixUser:
    """The user and group ID of a child process."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Program:
    """A long-running child process.

    `ready` is polled until it returns True; it must return quickly and may use the network only on this machine. With
    `reports_ready`, the process calls `report_ready` of inference_worker.contract.readiness when it has started.
    `orphan_signal` is sent to the child if its parent dies. `on_exit` is called in a thread after every exit of the
    process, before the next start; it must return within seconds and never raise. `http_address` is where the process
    answers `GET /healthz` from its event loop: if the loop is blocked, the process is restarted.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    user: UnixUser | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 10.0
    orphan_signal: signal.Signals = signal.SIGKILL
    ready: Callable[[], bool] | None = None
    reports_ready: bool = False
    ready_seconds: float = 60.0
    on_exit: Callable[[], None] | None = None
    http_address: tuple[str, int] | None = None

    def popen_options(self) -> dict[str, Any]:
        """Return keyword arguments for `subprocess.Popen` and `asyncio.create_subprocess_exec`."""
        options: dict[str, Any] = {
            "cwd": self.cwd,
            "env": dict(self.environ),
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
            "preexec_fn": die_with_parent(self.orphan_signal),
        }
        if self.user:
            options |= {"user": self.user.uid, "group": self.user.gid, "extra_groups": []}
        return options

    def start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the program and wait until it is ready.

        Raises:
            ServiceError: it ends, or is not ready in time and was stopped.
        """
        process = subprocess.Popen(  # noqa: S603  (a fixed argument vector, no shell)
            self.argv, stdout=log, stderr=log, **self.popen_options()
        )
        deadline = time.monotonic() + self.ready_seconds
        while self.ready and not self.ready():
            if process.poll() is not None:
                raise ServiceError(f"{self.name} ended with status {process.returncode}; see {log.name}")
            if time.monotonic() > deadline:
                self.stop(process)
                raise ServiceError(f"{self.name} is not ready after {self.ready_seconds:.0f} s; see {log.name}")
            time.sleep(0.02)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the process to end, and kill it if it does not within `stop_seconds`."""
        process.send_signal(self.stop_signal)
        try:
            process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def die_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` that lets the kernel signal the child when its parent dies, or None if not supported.

    Popen calls it after changing user IDs, which would clear the setting.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here, since a forked child should do little
    parent = os.getpid()

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return request_signal


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is currently free."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def is_still_running(pid: int, marker: str) -> bool:
    """Return whether process `pid` runs with `marker` in its command line, since process IDs are reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    proc = Path(f"/proc/{pid}")
    if proc.parent.is_dir() and Path("/proc/self").exists():
        try:
            if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            return marker in (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return False
    listing = subprocess.run(  # noqa: S603
        ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return marker in listing.stdout


def end_leftover(pid: int, marker: str, signum: signal.Signals, seconds: float = 15.0) -> None:
    """End a process that an earlier, killed run left, if process `pid` is that process.

    Raises:
        ServiceError: the process does not end.
    """
    deadline = time.monotonic() + seconds
    is_signaled = False
    while is_still_running(pid, marker):
        if not is_signaled:
            os.kill(pid, signum)
            is_signaled = True
        if time.monotonic() > deadline:
            raise ServiceError(f"process {pid} of an earlier run ({marker}) does not end; kill it manually")
        time.sleep(0.05)
