"""The state of a machine, which its gateways send with their heartbeats: free disk space, and processes that ended."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.host import host_name
from millrace.environment.processes import ProcessState, read_processes


class HostReport(msgspec.Struct, frozen=True):
    """The state of a machine with a process of the platform."""

    name: str
    free: int  # bytes of the watched disk with the least space
    min_free: int  # bytes below which new requests are rejected
    resume_at: int  # bytes at which they are accepted again
    is_disk_low: bool
    # Processes of `millrace up` that do not run or have ended lately. `next_start_at` is the time until then.
    processes: tuple[ProcessState, ...] = ()

    def read_processes(self) -> list[ProcessState]:
        """Return the states of the processes, with times of this machine."""
        now = time.monotonic()
        return [replace(process, next_start_at=now + process.next_start_at) for process in self.processes]


def report_host(data_dir: Path, space: FreeSpace) -> HostReport:
    """Return the state of this machine. `space` is that of its last look."""
    now = time.monotonic()
    processes = tuple(
        replace(process, next_start_at=max(0.0, process.next_start_at - now))
        for process in read_processes(data_dir)
        if process.deaths or not process.running
    )
    return HostReport(host_name(), space.free, space.min_free, space.resume_at, space.is_low, processes)
