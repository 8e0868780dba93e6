"""Lock files: a process that gets the lock of its predecessor's file knows that the predecessor has ended."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from io import FileIO
from pathlib import Path

LOCK_PAUSE_SECONDS = 0.02  # between attempts to lock
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # ID of this machine's boot
_ID_BYTES = 16


class LockFile:
    """An open lock file. The lock ends with the process, or with `close`."""

    def __init__(self, path: Path) -> None:
        """Open the file, which is created if it does not exist.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")

    def lock(self, wait_seconds: float = 0.0) -> bool:
        """Lock the file. Return False if another process has locked it for longer than `wait_seconds`."""
        until = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(LOCK_PAUSE_SECONDS)
            else:
                return True

    def identify(self) -> str:
        """Return the identity of the file, which must be locked. It is stored in the file.

        A copy of the file has another identity, also that of a cloned machine. If none can be stored, such as on a full
        disk, each call returns another one.
        """
        try:
            stored = os.pread(self._file.fileno(), _ID_BYTES + 1, 0)
            if len(stored) != _ID_BYTES:  # it is new, or its process was killed meanwhile
                stored = secrets.token_hex(_ID_BYTES // 2).encode()
                self._file.truncate(0)
                os.pwrite(self._file.fileno(), stored, 0)
            boot_id = BOOT_ID.read_bytes() if BOOT_ID.exists() else b""
            inode = str(os.fstat(self._file.fileno()).st_ino).encode()
            return hashlib.blake2s(b":".join((stored, inode, boot_id)), digest_size=16).hexdigest()
        except OSError:
            return secrets.token_hex(_ID_BYTES)

    def close(self) -> None:
        self._file.close()
