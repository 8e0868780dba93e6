"""Run a command, and end it with all its descendants if the worker ends, for whatever reason.

    python guard.py LOG SECONDS PROGRAM ARGUMENT…

Standard input is a pipe of the worker. If it ends, the worker was killed: all processes of the command are killed.
After any byte, they first get SIGTERM and SECONDS to end. The exit status is that of the command, or 128 plus the
signal. The command's output is appended to LOG. Above `MAX_LOG_BYTES`, LOG becomes LOG.1.

This program needs only the standard library, so that it starts within milliseconds and uses little memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
READ_BYTES = 64 * 2**10
POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class BoundedLog:
    """A log file that is replaced when it is too large. Errors of the disk lose output, but stop nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._size = 0

    def write(self, data: bytes) -> None:
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._size = os.fstat(self._file).st_size
            os.write(self._file, data)
            self._size += len(data)
            if self._size > MAX_LOG_BYTES:
                os.close(self._file)
                self._file = -1
                self._path.replace(f"{self._path}.1")
        except OSError:
            pass


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _signal_group(group: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def _children() -> list[int]:
    """Return the processes whose parent is this one, also descendants whose parents have ended."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _kill_all(group: int) -> None:
    """Kill the command's process group, then every descendant that is left."""
    deadline = time.monotonic() + 5.0
    _signal_group(group, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


class _Guard:
    def __init__(self, log: BoundedLog, seconds: float, argv: list[str]) -> None:
        self._log = log
        self._seconds = seconds
        parent = os.getpid()

        def prepare() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self._child = subprocess.Popen(  # noqa: S603 - an argument vector, no shell
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )
        assert self._child.stdout is not None  # noqa: S101 - for the type checker
        self._output = self._child.stdout.fileno()
        os.set_blocking(self._output, False)
        self._files = [0, self._output]

    def run(self) -> int:
        """Wait for the end of the command or of the worker, and return the exit status."""
        deadline = float("inf")  # after which a command that was asked to end is killed
        while self._child.poll() is None and time.monotonic() < deadline:
            ready = select.select(self._files, [], [], POLL_SECONDS)[0]
            if self._output in ready:
                self._copy_output()
            if 0 in ready:
                self._files.remove(0)
                if not os.read(0, 1):
                    break
                _signal_group(self._child.pid, signal.SIGTERM)
                deadline = time.monotonic() + self._seconds
        self._copy_output()
        status = self._child.poll()
        _kill_all(self._child.pid)
        self._copy_output()
        if status is None:
            status = -signal.SIGKILL
        return status if status >= 0 else 128 - status

    def _copy_output(self) -> None:
        try:
            while data := os.read(self._output, READ_BYTES):
                self._log.write(data)
                if len(data) < READ_BYTES:
                    return
        except BlockingIOError:
            return
        except OSError:
            pass
        if self._output in self._files:  # no process has the pipe any more
            self._files.remove(self._output)


def main() -> int:
    log = BoundedLog(Path(sys.argv[1]))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of a terminal or a supervisor: the worker decides
        signal.signal(signum, lambda *_: None)  # NOTE: not SIG_IGN, which the command would inherit
    try:
        guard = _Guard(log, float(sys.argv[2]), sys.argv[3:])
    except OSError as exc:
        log.write(f"{sys.argv[3]}: {exc.strerror}\n".encode())
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main())
