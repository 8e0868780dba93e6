"""Detection of a child whose event loop is blocked: it answers no request while the process uses CPU time.

A process that was stopped, or whose machine was suspended, uses no CPU time and is not blocked. The same applies to a
process that waits. Time is counted in polls of fixed length, so a pause of the supervisor itself counts as one poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class WatchdogLimits:
    """The limits of a blocked child, and of the restarts for that reason."""

    blocked_seconds: float = 30.0  # without an answer, while the process used CPU time
    poll_seconds: float = 2.0
    min_cpu_share: float = 0.1  # share of one core during a poll; less is a process that waits
    max_restarts: int = 2
    window_seconds: float = 600.0


class Watchdog:
    """The watchdog of one child, which serves HTTP from its event loop."""

    def __init__(self, address: tuple[str, int], limits: WatchdogLimits) -> None:
        self._address = address
        self._limits = limits
        self._restarted_at: deque[float] = deque(maxlen=limits.max_restarts)

    async def wait_until_blocked(self, pid: int, *, has_answered: bool = False) -> None:
        """Return when process `pid` is blocked.

        Before the first answer, such as during its start, a process is not blocked.
        """
        limits, blocked_seconds = self._limits, 0.0
        probe = asyncio.create_task(self._receives_answer())
        try:
            while blocked_seconds < limits.blocked_seconds:
                before = cpu_seconds(pid)
                await asyncio.wait({probe}, timeout=limits.poll_seconds)
                if probe.done():
                    if probe.result():
                        has_answered, blocked_seconds = True, 0.0
                    await asyncio.sleep(limits.poll_seconds)
                    probe = asyncio.create_task(self._receives_answer())
                elif has_answered and cpu_seconds(pid) - before >= limits.min_cpu_share * limits.poll_seconds:
                    blocked_seconds += limits.poll_seconds
        finally:
            probe.cancel()

    def take_restart(self) -> bool:
        """Count a restart. Return False if there were too many lately."""
        now = time.monotonic()
        restarts = self._restarted_at
        if len(restarts) == self._limits.max_restarts and now - restarts[0] < self._limits.window_seconds:
            return False
        restarts.append(now)
        return True

    async def _receives_answer(self) -> bool:
        """Send a request and wait for the answer, for any time. Return False if the child accepts no connection."""
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return False
        try:
            writer.write(_REQUEST)
            with contextlib.suppress(OSError):  # a connection that the child closes is an answer, too
                await reader.read(1)
        finally:
            writer.close()
        return True


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process; always 0 without /proc or such a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
