"""State of the processes that `millrace up` runs, published for the gateway and the operators' console.

The supervisor overwrites one small file of the data directory in place. The file keeps its size, so that an update
needs no free space: the state is there when the disk is full and when Valkey is down.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inference_worker.contract.texts import Text

FILE_NAME = "processes"
FILE_BYTES = 16 * 1024
MAX_READS = 5  # reads of a file that is being written
_HEADER = struct.Struct("<II")  # length and CRC-32 of the payload


class ProcessState(msgspec.Struct, frozen=True):
    """State of one child process. Times are of `time.monotonic`, which all processes of a machine share."""

    name: str
    running: bool
    deaths: int = 0  # number of times it ended since it last ran for a while
    last_end: str = ""  # "killed by SIGKILL"
    next_start_at: float = 0.0  # if it is not running

    def describe(self) -> str:
        """Return a description of the state, without the process's name."""
        if not self.deaths:
            return Text("running") if self.running else Text("starting")
        if self.running:
            return Text(
                "running, 1 death lately, last: %(last_end)s",
                "running, %(number)s deaths lately, last: %(last_end)s",
                number=self.deaths,
                last_end=self.last_end,
            )
        return Text(
            "restarting, 1 death, last: %(last_end)s, next start in %(seconds)s s",
            "restarting, %(number)s deaths, last: %(last_end)s, next start in %(seconds)s s",
            number=self.deaths,
            last_end=self.last_end,
            seconds=max(0, round(self.next_start_at - time.monotonic())),
        )


class _Published(msgspec.Struct, frozen=True):
    supervisor: int  # its process ID
    processes: tuple[ProcessState, ...]


_decode = msgspec.msgpack.Decoder(_Published).decode


class ProcessFile:
    """The supervisor's side of the file."""

    def __init__(self, data_dir: Path) -> None:
        """Reserve the file's space.

        Raises:
            OSError: the data directory cannot be written.
        """
        self._path = data_dir / FILE_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._fd, bytes(FILE_BYTES), 0)

    def publish(self, processes: Sequence[ProcessState]) -> None:
        """Overwrite the published state. A write that fails leaves a state that readers skip."""
        payload = msgspec.msgpack.encode(_Published(os.getpid(), tuple(processes)))
        record = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        if len(record) <= FILE_BYTES:
            os.pwrite(self._fd, record, 0)

    def close(self) -> None:
        """Remove the file. All processes must have ended."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def read_processes(data_dir: Path, supervisor: int | None = None) -> tuple[ProcessState, ...]:
    """Return the states that `supervisor` (default: the parent process) last published, or none.

    A file left by a supervisor that was killed has another process ID and is skipped.
    """
    expected_supervisor = os.getppid() if supervisor is None else supervisor
    for _ in range(MAX_READS):
        try:
            data = (data_dir / FILE_NAME).read_bytes()
        except OSError:
            return ()
        if len(data) < _HEADER.size:
            return ()
        length, checksum = _HEADER.unpack_from(data)
        payload = data[_HEADER.size : _HEADER.size + length]
        if length and zlib.crc32(payload) == checksum:
            try:
                published = _decode(payload)
            except msgspec.MsgspecError:  # written by another version
                return ()
            return published.processes if published.supervisor == expected_supervisor else ()
    return ()
