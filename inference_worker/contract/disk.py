"""Free space of the disks with the platform's state, and whether new requests must be rejected for lack of it.

The check has hysteresis: new requests are rejected below MILLRACE_MIN_FREE_DISK and accepted again at 125% of it. So a
disk near the limit does not change its state with every request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

RESUME_PERCENT = 125  # percent of the minimum at which new requests are accepted again


def free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged user can still write to the directory's disk.

    Raises:
        OSError: the directory is not accessible.
    """
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class FreeSpace:
    """The state of the watched disks at the last `look`. The disk with the least free space counts."""

    def __init__(self, directories: Sequence[Path], min_free: int) -> None:
        """Watch the disks of these directories. If `min_free` is 0, no disk is watched."""
        self._directories = directories if min_free else ()
        self.min_free = min_free
        self.resume_at = min_free * RESUME_PERCENT // 100
        self.free = self.resume_at
        self.is_low = False

    def look(self) -> bool:
        """Read the free space and return whether it is low. A directory that is not accessible does not count."""
        found = []
        for directory in self._directories:
            try:
                found.append(free_bytes(directory))
            except OSError as exc:
                log.warning("free_space_unknown", directory=str(directory), error=str(exc))
        if found:
            self.free = min(found)
            was_low = self.is_low
            self.is_low = self.free < (self.resume_at if was_low else self.min_free)
            if self.is_low != was_low:
                log.warning("disk_space_low" if self.is_low else "disk_space_recovered", free_bytes=self.free)
        return self.is_low

    def describe(self) -> str:
        """Return a description of the state."""
        if not self.is_low:
            return "ok"
        free, resume = self.free // 2**20, self.resume_at // 2**20
        return f"{free} MiB are free: new requests are rejected until {resume} MiB are free"
