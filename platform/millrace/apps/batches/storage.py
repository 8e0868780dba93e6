"""Where files' contents lie: one file each in `<data directory>/files`, which all gateways and web jobs share.

A file is written under another name, flushed to the disk and renamed; then its row is written. So a row always has its
contents, and contents without a row are left over by a crash: the sweep removes them. Free of Django.
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


def new_name(kind: str) -> str:
    """Return a name that nobody guesses: `file-…`, `batch_…`, `msgbatch_…`."""
    return f"{kind}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class Storage:
    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "files"

    def path(self, name: str) -> Path:
        return self._folder / name

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for writing; it appears under its name only if it was written completely."""
        part = self.part(name)
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.path(name))
            self._sync_folder()
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def part(self, name: str) -> Path:
        """Where an unfinished file may lie; the folder is there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder / f"{name}.{secrets.token_hex(4)}{UNFINISHED}"

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def read(self, name: str, byte_offset: int, size: int) -> bytes:
        """Return a part of a file.

        Raises:
            OSError: it is not there, or shorter.
        """
        with self.path(name).open("rb") as file:
            file.seek(byte_offset)
            found = file.read(size)
        if len(found) != size:
            raise OSError(f"{name} ends before byte {byte_offset + size}")
        return found

    def old(self, seconds: float) -> Iterator[str]:
        """Yield names in the directory without a write for this time, including unfinished ones."""
        before = time.time() - seconds
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        yield entry.name

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
