"""Disks of a platform that `millrace up` runs: which ones to watch, and a reserve for when they are almost full.

PostgreSQL stops when it cannot write its log, and Valkey refuses writes. Both must be able to record the usage of
requests that already run. A reserve file in the data directory keeps space for that. The supervisor deletes the file
when the disk is almost full and creates it again when there is space.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from inference_worker.contract.disk import RESUME_PERCENT, free_bytes

FILE_NAME = "disk-reserve"


def watched_folders(data_dir: Path) -> list[Path]:
    """Return the data directory, and the embedded PostgreSQL's if that lies elsewhere."""
    try:
        elsewhere = Path(json.loads((data_dir / "postgres.json").read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError):
        return [data_dir]
    return [data_dir] if elsewhere.is_relative_to(data_dir) or not elsewhere.exists() else [data_dir, elsewhere]


class DiskReserve:
    """The reserve file. All sizes follow from MILLRACE_MIN_FREE_DISK.

    The file is half of the minimum and is released when a quarter of the minimum is free. So the platform still refuses
    new requests after the release.
    """

    def __init__(self, data_dir: Path, min_free: int) -> None:
        self._path = data_dir / FILE_NAME
        self._size = min_free // 2
        self._release_below = min_free // 4
        self._was_released = False
        self._create_above = min_free * RESUME_PERCENT // 100 + self._size

    def adjust(self) -> str | None:
        """Release or create the reserve, if that is due; returns what was done, in words.

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
            self._was_released = True
            return (
                f"the disk is almost full ({free // 2**20} MiB are free): its reserve is released, new requests refused"
            )
        if not is_there and free >= self._create_above:
            self._create()
            if self._was_released:
                self._was_released = False
                return "the disk has space again: its reserve is there, new requests are taken"
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
    """Give a file that many bytes of real space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    block = bytes(2**20)
    for start in range(0, size, len(block)):
        os.pwrite(descriptor, block[: size - start], start)
