"""Disks that `millrace up` watches, and a reserve for when they are almost full.

PostgreSQL stops if it cannot write its log, and Valkey rejects writes. Both must be able to record the usage of active
requests. A reserve file in the data directory keeps space for that. The supervisor deletes the file when the disk is
almost full, and creates it again when there is space.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from inference_worker.contract.disk import RESUME_PERCENT, free_bytes

FILE_NAME = "disk-reserve"


def watched_directories(data_dir: Path) -> list[Path]:
    """Return the data directory, and the embedded PostgreSQL's directory if it is elsewhere."""
    try:
        postgres_directory = Path(json.loads((data_dir / "postgres.json").read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError):
        return [data_dir]
    return (
        [data_dir]
        if postgres_directory.is_relative_to(data_dir) or not postgres_directory.exists()
        else [data_dir, postgres_directory]
    )


class DiskReserve:
    """The reserve file. All sizes are derived from MILLRACE_MIN_FREE_DISK.

    The file has half of the minimum, and is released when a quarter of the minimum is free. Therefore the platform
    rejects new requests even after the release.
    """

    def __init__(self, data_dir: Path, min_free: int) -> None:
        self._path = data_dir / FILE_NAME
        self._size = min_free // 2
        self._release_below = min_free // 4
        self._is_released = False
        self._create_above = min_free * RESUME_PERCENT // 100 + self._size

    def adjust(self) -> str | None:
        """Release or create the reserve if necessary. Return a message about the change, or None.

        Raises:
            OSError: the data directory cannot be read or written.
        """
        if not self._size:
            self._path.unlink(missing_ok=True)
            return None
        free = free_bytes(self._path.parent)
        is_there = self._path.exists()
        if is_there and free < self._release_below:
            self._path.unlink(missing_ok=True)
            self._is_released = True
            return f"the disk is almost full ({free // 2**20} MiB free): new requests are rejected, reserve released"
        if not is_there and free >= self._create_above:
            self._create()
            if self._is_released:
                self._is_released = False
                return "the disk has space again; the reserve was created, new requests are accepted"
        return None

    def _create(self) -> None:
        part = self._path.with_suffix(".new")
        try:
            with part.open("wb") as file:
                _allocate(file.fileno(), self._size)
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def _allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes of disk space to a file."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    block = bytes(2**20)
    for start in range(0, size, len(block)):
        os.pwrite(descriptor, block[: size - start], start)
