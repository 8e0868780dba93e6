"""Storage of files' contents in `<data directory>/files`, which all gateways and web jobs share. No Django.

A file is written under a temporary name, flushed to disk and renamed, and then its row is written. A row therefore
always has contents. Contents without a row are left by a crash; a periodic job removes them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

UNFINISHED = ".part"


def new_name(prefix: str) -> str:
    """Return a new unguessable name with a prefix such as `file-`, `batch_` or `msgbatch_`."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class Storage:
    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / "files"

    def path(self, name: str) -> Path:
        return self._directory / name

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for writing. It gets its name only when it is complete."""
        part = self.part(name)
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.path(name))
            self._sync_directory()
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def part(self, name: str) -> Path:
        """Return the path for an unfinished file. Its directory is created."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._directory / f"{name}.{secrets.token_hex(4)}{UNFINISHED}"

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def read(self, name: str, byte_offset: int, size: int) -> bytes:
        """Return a part of a file.

        Raises:
            OSError: the file does not exist, or is shorter.
        """
        with self.path(name).open("rb") as file:
            file.seek(byte_offset)
            chunk = file.read(size)
        if len(chunk) != size:
            raise OSError(f"{name} ends before byte {byte_offset + size}")
        return chunk

    def find_old(self, seconds: float) -> Iterator[str]:
        """Yield the names of files that have not been written for `seconds`, including unfinished ones."""
        before = time.time() - seconds
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._directory):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        yield entry.name

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
