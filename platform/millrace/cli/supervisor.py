"""Keeps a set of child processes alive, and ends them in order.

Each child leads a session of its own, so that Ctrl-C reaches the supervisor alone, and dies with the supervisor. A
child that ends is started again after a pause; one that keeps ending ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from millrace.services.program import Program

DEATHS = 5  # this many …
WITHIN_SECONDS = 60.0  # … in this time, and we give up
FIRST_PAUSE = 0.25
POLL_SECONDS = 0.05
LOG_BYTES = 10 * 2**20
TAIL_LINES = 20


class ChildFailed(Exception):
    """A child would not run; the message holds the end of its log."""


@dataclass(eq=False)
class Child:
    """A program and its present process, if it has one."""

    program: Program
    log: Path
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    deaths: deque[float] = field(default_factory=deque)


class Supervisor:
    """Runs programs. They are stopped in the reverse of the order in which they were added, whenever they started."""

    def __init__(self, logs: Path, tell: Callable[[str], None]) -> None:
        self._children: dict[str, Child] = {}
        self._logs = logs
        self._tell = tell
        self._stopping = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, programs: Iterable[Program]) -> None:
        """Take charge of programs, without starting them."""
        for program in programs:
            self._children[program.name] = Child(program, self._logs / f"{program.name}.log")

    async def start(self, name: str) -> None:
        """Start a program and wait until it is ready.

        Raises:
            ChildFailed: it (or another child) keeps ending, or it is not ready in its time.
        """
        child = self._children[name]
        child.keeper = asyncio.create_task(self._keep(child))
        until = time.monotonic() + child.program.ready_seconds
        while not await self._is_ready(child):
            if self._failed.done():
                self._failed.result()
            if time.monotonic() > until:
                raise ChildFailed(f"{name} is not ready after {child.program.ready_seconds:.0f} s\n{tail(child.log)}")
            await asyncio.sleep(POLL_SECONDS)

    async def watch(self) -> None:
        """Wait for as long as all goes well.

        Raises:
            ChildFailed: a child keeps ending.
        """
        await asyncio.shield(self._failed)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop all, last first; once `hurry` is set, without waiting for any to end by itself."""
        self._stopping = True
        self._failed.cancel()
        for child in reversed(self._children.values()):
            if child.keeper is None:
                continue
            if child.process is not None and child.process.returncode is None:
                await self._stop_one(child, child.process, hurry)
            child.keeper.cancel()
            await asyncio.gather(child.keeper, return_exceptions=True)

    def pid(self, name: str) -> int | None:
        """The process id of a running child."""
        process = self._children[name].process
        return process.pid if process and process.returncode is None else None

    async def _is_ready(self, child: Child) -> bool:
        if child.process is None or child.process.returncode is not None:
            return False
        return child.program.ready is None or await asyncio.to_thread(child.program.ready)

    async def _keep(self, child: Child) -> None:
        """Run the child again and again, until told to stop or it is hopeless."""
        name = child.program.name
        while not self._stopping:
            try:
                status = await self._run_once(child)
            except OSError as fault:
                self._give_up(f"{name} cannot be started: {fault}")
                return
            if self._stopping:
                return
            now = time.monotonic()
            child.deaths.append(now)
            while child.deaths[0] < now - WITHIN_SECONDS:
                child.deaths.popleft()
            if len(child.deaths) >= DEATHS:
                self._give_up(f"{name} {ended(status)}, {DEATHS} times within a minute\n{tail(child.log)}")
                return
            pause = FIRST_PAUSE * 2 ** (len(child.deaths) - 1)
            self._tell(f"{name} {ended(status)}; starting it again in {pause:g} s (log: {child.log})")
            await asyncio.sleep(pause)

    async def _run_once(self, child: Child) -> int:
        if child.log.exists() and child.log.stat().st_size > LOG_BYTES:
            child.log.replace(child.log.with_suffix(".log.1"))
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.program.argv, stdout=log, stderr=log, **child.program.popen_options()
            )
        status = await child.process.wait()
        _kill_session(child.process.pid)  # what it started and left behind
        if child.program.on_exit is not None:
            await asyncio.to_thread(child.program.on_exit)
        return status

    def _give_up(self, message: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(ChildFailed(message))

    async def _stop_one(self, child: Child, process: asyncio.subprocess.Process, hurry: asyncio.Event) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(child.program.stop_signal)
        waits = {asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())}
        _, pending = await asyncio.wait(waits, timeout=child.program.stop_seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        if process.returncode is None:
            if not hurry.is_set():
                self._tell(f"{child.program.name} does not end; killing it")
            _kill_session(process.pid)
            await process.wait()


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def ended(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, with its name above them."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            said = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as fault:
        return f"({fault})"
    return "\n".join([f"the end of {log}:", *(f"  {line}" for line in said)])
