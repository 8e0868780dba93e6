"""Supervision of child processes: they are restarted when they end, and stopped in order.

Each child leads a session, so that Ctrl-C reaches only the supervisor, and dies with the supervisor. A child that ends
is started again after a pause, which doubles with each of its deaths up to MAX_PAUSE_SECONDS. Other children are not
affected. Only during the first start of the platform, a child that keeps ending makes the start fail. A child whose
event loop is blocked (watchdog.py) is ended, so that it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inference_worker.contract.readiness import READY_FD
from millrace.environment.processes import ProcessState
from millrace.local.program import Program
from millrace.local.watchdog import Watchdog, WatchdogLimits

FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # after running this long, the next pause is the first again
MAX_START_DEATHS = 5  # deaths of one child after which the platform's start fails
POLL_SECONDS = 0.05
EXIT_HOOK_SECONDS = 3.0
DUMP_SECONDS = 10.0  # in which a blocked child must have written its stacks and ended
LOG_BYTES = 10 * 2**20
TAIL_LINES = 20
Publish = Callable[[Sequence[ProcessState]], None]


class ChildFailed(Exception):
    """Raised if a child did not become ready. The message contains the end of its log."""


@dataclass(eq=False)
class Child:
    """A program and its current process, if any."""

    program: Program
    log: Path
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None
    started_at: float = 0.0  # start time of the current process
    deaths: int = 0  # since it last ran for HEALTHY_SECONDS
    last_end: str = ""
    next_start_at: float = 0.0
    watchdog: Watchdog | None = None
    ready_pipe: int = -1  # pipe of the current process
    has_reported: bool = False  # the current process has reported that it is ready

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def has_started(self) -> bool:
        """Return whether the process runs and has reported that it is ready, if its program does."""
        return self.is_running and (self.has_reported or not self.program.reports_ready)

    @property
    def state(self) -> ProcessState:
        """Return the state that is published."""
        return ProcessState(self.program.name, self.is_running, self.deaths, self.last_end, self.next_start_at)


class Supervisor:
    """Running programs, which are stopped in the reverse of the order in which they were added.

    `publish` receives the state of all children after each change.
    """

    def __init__(
        self,
        logs: Path,
        on_message: Callable[[str], None],
        publish: Publish | None = None,
        limits: WatchdogLimits = WatchdogLimits(),  # noqa: B008 - it is immutable
    ) -> None:
        self._children: dict[str, Child] = {}
        self._logs = logs
        self._on_message = on_message
        self._publish_states = publish
        self._limits = limits
        self._stopping = False
        self._starting = True  # during the platform's start a child that keeps ending makes it fail
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, programs: Iterable[Program]) -> None:
        """Add programs without starting them."""
        for program in programs:
            address = program.http_address
            watchdog = None if address is None else Watchdog(address, self._limits)
            log = self._logs / f"{program.name}.log"
            self._children[program.name] = Child(program, log, watchdog=watchdog)

    async def start(self, name: str) -> None:
        """Start a program and wait until it is ready.

        Raises:
            ChildFailed: this or another child keeps ending, or this one is not ready in time.
        """
        child = self._children[name]
        child.task = asyncio.create_task(self._keep_running(child))
        deadline = time.monotonic() + child.program.ready_seconds
        while not await self._is_ready(child):
            if self._failed.done():
                self._failed.result()
            if time.monotonic() > deadline:
                raise ChildFailed(f"{name} is not ready after {child.program.ready_seconds:.0f} s\n{tail(child.log)}")
            await asyncio.sleep(POLL_SECONDS)

    async def finish_start(self) -> None:
        """Wait until every child runs and is ready. Afterwards, the end of a child does not fail the platform.

        Raises:
            ChildFailed: a child keeps ending.
        """
        while not all(child.has_started for child in self._children.values() if child.task is not None):
            if self._failed.done():
                self._failed.result()
            await asyncio.sleep(POLL_SECONDS)
        self._starting = False

    async def watch(self) -> None:
        """Wait for a failure of the start. Once the start is finished, wait forever.

        Raises:
            ChildFailed: a child keeps ending.
        """
        await asyncio.shield(self._failed)

    async def stop(self, stop_now: asyncio.Event) -> None:
        """Stop all children in reverse order. Once `stop_now` is set, kill them without waiting."""
        self._stopping = True
        self._failed.cancel()
        for child in reversed(self._children.values()):
            if child.task is None:
                continue
            if child.process is not None and child.process.returncode is None:
                await self._stop_one(child, child.process, stop_now)
                await asyncio.wait([child.task], timeout=EXIT_HOOK_SECONDS)  # for `on_exit`
            child.task.cancel()
            await asyncio.gather(child.task, return_exceptions=True)

    def pid(self, name: str) -> int | None:
        """Return the process ID of a running child, or None."""
        process = self._children[name].process
        return process.pid if process and process.returncode is None else None

    async def _is_ready(self, child: Child) -> bool:
        if not child.has_started:
            return False
        return child.program.ready is None or await asyncio.to_thread(child.program.ready)

    async def _keep_running(self, child: Child) -> None:
        """Run the child repeatedly, until the supervisor stops or the start fails."""
        name = child.program.name
        while not self._stopping:
            child.started_at = time.monotonic()
            try:
                end = describe_exit(await self._run_once(child))
            except OSError as exc:
                end = f"cannot be started: {exc}"
                if self._starting:
                    self._fail_start(f"{name} {end}")
                    return
            if self._stopping:
                return
            pause = self._note_death(child, end)
            if self._starting and child.deaths >= MAX_START_DEATHS:
                advice = "Fix the problem in its log, then start again."
                self._fail_start(
                    f"{name} {end}, {child.deaths} times before the platform was ready. {advice}\n{tail(child.log)}"
                )
                return
            self._on_message(f"{name} {end}; starting it again in {pause:g} s (log: {child.log})")
            await asyncio.sleep(pause)

    def _note_death(self, child: Child, end: str) -> float:
        """Count and publish the end of a child. Return the seconds until the next start."""
        now = time.monotonic()
        if now - child.started_at >= HEALTHY_SECONDS:
            child.deaths = 0
        child.deaths += 1
        pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(child.deaths - 1, 32))
        child.last_end = end.removeprefix("was ")
        child.next_start_at = now + pause
        self._publish()
        return pause

    def _forget_deaths(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Reset the back-off of a child whose process has run long enough."""
        if child.process is process and child.is_running:
            child.deaths = 0
            self._publish()

    def _publish(self) -> None:
        if self._publish_states is None:
            return
        with contextlib.suppress(OSError):  # the disk may be broken; the state is optional
            self._publish_states([child.state for child in self._children.values() if child.task is not None])

    async def _run_once(self, child: Child) -> int:
        child.has_reported = False
        options = child.program.popen_options()
        with _open_log(child.log) as log, _ready_pipe(child, options):
            process = await asyncio.create_subprocess_exec(*child.program.argv, stdout=log, stderr=log, **options)
        child.process = process
        self._publish()
        healthy = asyncio.get_running_loop().call_later(HEALTHY_SECONDS, self._forget_deaths, child, process)
        watching = asyncio.create_task(self._end_if_blocked(child, process))
        status = await process.wait()
        healthy.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        _kill_session(process.pid)  # processes that it started and left
        if child.program.on_exit is not None:
            await asyncio.to_thread(child.program.on_exit)
        return status

    async def _end_if_blocked(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """End the child when its event loop is blocked, and let it write its stacks, up to a number of restarts."""
        if child.watchdog is None:
            return
        name, is_left = child.program.name, False
        while not self._stopping:
            await child.watchdog.wait_until_blocked(process.pid, has_answered=is_left)
            problem = f"{name} has answered no request for {self._limits.blocked_seconds:g} s while it used CPU time"
            if child.watchdog.take_restart():
                self._on_message(f"{problem}; ending it after it wrote its stacks to its log (log: {child.log})")
                await self._abort(process)
                return
            if not is_left:
                minutes = self._limits.window_seconds / 60
                restarts = f"It was restarted {self._limits.max_restarts} times in {minutes:g} minutes for this"
                self._on_message(f"{problem}. {restarts}, so it is left running (log: {child.log})")
                is_left = True

    async def _abort(self, process: asyncio.subprocess.Process) -> None:
        """Let the process write the stacks of all threads and end. Kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGABRT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), DUMP_SECONDS)
        if process.returncode is None:
            _kill_session(process.pid)

    def _fail_start(self, message: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(ChildFailed(message))

    async def _stop_one(self, child: Child, process: asyncio.subprocess.Process, stop_now: asyncio.Event) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(child.program.stop_signal)
        waiters = {asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop_now.wait())}
        _, pending = await asyncio.wait(
            waiters, timeout=child.program.stop_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for waiter in pending:
            waiter.cancel()
        if process.returncode is None:
            if not stop_now.is_set():
                self._on_message(f"{child.program.name} does not end; killing it")
            _kill_session(process.pid)
            await process.wait()


@contextlib.contextmanager
def _ready_pipe(child: Child, options: dict[str, Any]) -> Iterator[None]:
    """Add the pipe through which the child reports that it is ready to the options of its process, if it does."""
    if not child.program.reports_ready:
        yield
        return
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    child.ready_pipe = reader

    def read() -> None:
        loop.remove_reader(reader)
        if os.read(reader, 1) and child.ready_pipe == reader:  # nothing: the process ended without a report
            child.has_reported = True
        os.close(reader)

    loop.add_reader(reader, read)
    options["pass_fds"] = (writer,)
    options["env"][READY_FD] = str(writer)
    try:
        yield
    finally:
        os.close(writer)


def _open_log(path: Path) -> IO[bytes]:
    """Open a child's log. If that fails, the child runs without a log."""
    try:
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """Return a description of how a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, after a line with its path."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            last_lines = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as exc:
        return f"({exc})"
    return "\n".join([f"the end of {log}:", *(f"  {line}" for line in last_lines)])
