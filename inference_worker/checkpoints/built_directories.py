"""Directories that are built once, completely or not at all, also by concurrent processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def build_once(target: Path, build: Callable[[Path], None], is_complete: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return the directory `target`. If it is not complete, `build` fills it; no process sees a partial one.

    Args:
        build: fills an empty directory. Its errors are raised, and leave no directory.
        is_complete: returns whether the directory exists and needs no build.
    """
    if is_complete(target):
        return target
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with _lock(parent / f".{target.name}.lock"):
        if is_complete(target):  # another process created it meanwhile
            return target
        for stale in parent.glob(f".{target.name}.*.partial"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        partial = parent / f".{target.name}.{uuid.uuid4().hex}.partial"
        partial.mkdir()
        try:
            build(partial)
            _sync(partial)
            shutil.rmtree(target, ignore_errors=True)  # if it exists, it is damaged
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


def _sync(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if not path.is_symlink()]
    for path in [*files, directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
