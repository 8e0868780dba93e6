"""A wait between the systems of a benchmark until the other processes are at rest.

The threads of a server may compute on for a time after its last answer. They would slow down the system that is
measured next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

MARGIN = 0.02  # share of a core
LIMIT_SECONDS = 60.0
SAMPLES = 5  # seconds; their median is the usage at rest
_TICKS = os.sysconf("SC_CLK_TCK")


def measure_second() -> float:
    """Return the CPU time that all other processes take in the next second, as a share of a core."""
    started, before = time.monotonic(), read_cpu_seconds()
    time.sleep(1.0)
    return (read_cpu_seconds() - before) / (time.monotonic() - started)


def read_cpu_seconds(processes: Path = Path("/proc")) -> float:
    """Return the CPU seconds of all other processes, and of their children that have ended."""
    own, ticks = str(os.getpid()), 0
    for directory in processes.iterdir():
        if not directory.name.isdecimal() or directory.name == own:
            continue
        try:
            stat = (directory / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended
            continue
        # After the command, which may contain anything: utime, stime, cutime and cstime are fields 14 to 17.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS


class Rest:
    """The usage of the CPU by the machine's other processes. The least usage seen is that at rest."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS, measure: Callable[[], float] = measure_second) -> None:
        """limit_seconds: the longest wait; 0 does not wait."""
        self._limit = limit_seconds
        self._measure = measure
        self._samples: list[float] = []

    def wait(self) -> bool:
        """Wait until all other processes together take at most 2 % of a core more than at rest, for one second.

        Returns:
            Whether that happened within the limit.
        """
        deadline = time.monotonic() + self._limit
        while time.monotonic() < deadline:
            self._samples.append(used := self._measure())
            at_rest = statistics.median(sorted(self._samples)[:SAMPLES])
            if len(self._samples) >= SAMPLES and used <= at_rest + MARGIN:
                return True
        return self._limit == 0
