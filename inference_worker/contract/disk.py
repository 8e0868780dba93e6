"""Free space of the disks that hold the platform's state, and whether new work has to wait for more of it.

The watch has hysteresis: below MILLRACE_MIN_FREE_DISK new work is refused, and it is taken again when a quarter more
is free. So a disk near the limit does not switch with every request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

RESUME_PERCENT = 125  # of the minimum: new work is taken again


def free_bytes(folder: Path) -> int:
    """Return the bytes that an ordinary user can still write to the folder's disk.

    Raises:
        OSError: the folder cannot be reached.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class FreeSpace:
    """State of the watched disks as of the last `look`. The fullest one counts."""

    def __init__(self, folders: Sequence[Path], min_free: int) -> None:
        """Watch the disks of the folders; a `min_free` of 0 watches none."""
        self._folders = folders if min_free else ()
        self.min_free = min_free
        self.resume_at = min_free * RESUME_PERCENT // 100
        self.free = self.resume_at
        self.is_low = False

    def look(self) -> bool:
        """Read the free space; returns whether it is low. A folder that cannot be reached does not count."""
        found = []
        for folder in self._folders:
            try:
                found.append(free_bytes(folder))
            except OSError as exc:
                log.warning("free_space_unknown", folder=str(folder), error=str(exc))
        if found:
            self.free = min(found)
            was_low = self.is_low
            self.is_low = self.free < (self.resume_at if was_low else self.min_free)
            if self.is_low != was_low:
                log.warning("disk_space_low" if self.is_low else "disk_space_recovered", free_bytes=self.free)
        return self.is_low

    def describe(self) -> str:
        """Return the state in words."""
        if not self.is_low:
            return "ok"
        free, resume = self.free // 2**20, self.resume_at // 2**20
        return f"{free} MiB are free: new requests are refused until {resume} MiB are"
