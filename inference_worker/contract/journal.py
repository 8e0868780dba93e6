"""The worker's journal: each execution's final counts are on disk before anybody is told of its end.

A directory of segments. Each is created with its full size, and one more is kept in reserve: the final counts of
running executions fit into the journal when the disk is full. Zeros follow a segment's last record.

A record is a usage event (`U`), the word that the broker has taken one (`C`, with its key), or that one must not be
settled (`D`). A segment is deleted once the settler has acknowledged everything in it; what is left when a
worker starts is replayed. A torn last record, from a power cut mid-write, is dropped: nobody had been told of that end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import msgspec

from inference_worker.contract.messages import ExecutionUsage, decode_usage, encode

SEGMENT_BYTES = 1 << 20
LOCK_NAME = "lock"
RECORD_BYTES = 1024  # reserved for each running execution: its usage event and the note that the broker has it
_HEADER = struct.Struct("<IIc")  # length, CRC-32 of kind and payload, kind

ExecutionKey = tuple[str, int, int]  # request id, execution, attempt
_decode_key = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
_decode_confirmation = msgspec.msgpack.Decoder(tuple[str, int, int, str]).decode


class JournalBusyError(Exception):
    """Another worker uses this journal: two workers were given one name."""


def is_free(directory: Path, wait_seconds: float = 0.0) -> bool:
    """Return whether no process has the journal's lock. Waits for at most `wait_seconds` until it is released."""
    until = time.monotonic() + wait_seconds
    try:
        with (directory / LOCK_NAME).open("r+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        return False
                    time.sleep(0.02)
                else:
                    return True
    except OSError:
        return True  # no journal was ever opened here


def execution_key(event: ExecutionUsage) -> ExecutionKey:
    return (event.billing_context.request_id, event.billing_context.execution, event.attempt)


@dataclass
class Segment:
    """One file of the journal, and what of it is not settled yet."""

    path: Path
    events: dict[ExecutionKey, ExecutionUsage] = field(default_factory=dict)
    stream_ids: dict[ExecutionKey, str] = field(default_factory=dict)  # broker's id of each event it has taken


class Journal:
    """Not thread-safe: one thread, the publisher's, owns it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = (folder / LOCK_NAME).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusyError(f"{folder} is in use: give each worker a MILLRACE_WORKER_NAME of its own") from None
        self.segments: list[Segment] = []
        self._file: FileIO | None = None  # of the segment written to, the last one; None: the disk had no space for one
        self._position = 0  # in it, behind the last record
        paths = sorted(folder.glob("*.journal"))
        self._next = int(paths[-1].stem) + 1 if paths else 1
        self._spare = paths.pop() if paths and _is_empty(paths[-1]) else None  # of full size, without a record
        confirmed: dict[ExecutionKey, str] = {}
        dropped: set[ExecutionKey] = set()
        for path in paths:
            self.segments.append(_read_segment(path, confirmed, dropped))
        for segment in self.segments:
            for key in segment.events.keys() & dropped:
                del segment.events[key]
            segment.stream_ids = {key: confirmed[key] for key in segment.events if key in confirmed}
        self.reserve()

    @property
    def room(self) -> int:
        """Bytes of records that fit without further space on the disk."""
        left = 0 if self._file is None else max(0, SEGMENT_BYTES - self._position)
        return left + (SEGMENT_BYTES if self._spare is not None else 0)

    def reserve(self) -> None:
        """Prepare the segment to write to and the next one, as far as the disk has space."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._open_segment()
            if self._spare is None:
                self._spare = self._create_segment()

    def append(self, events: Iterable[ExecutionUsage]) -> None:
        """Write the events and wait until they are on disk.

        Raises:
            OSError: the disk is full, or worse. It can be tried again with the same events: those that were written
                are skipped then.
        """
        waiting = [event for event in events if not any(execution_key(event) in s.events for s in self.segments)]
        records = [_record(b"U", encode(event)) for event in waiting]
        done = 0
        while done < len(waiting):
            number = self._fitting(records[done:])
            self._write(b"".join(records[done : done + number]), durable=True)
            self.segments[-1].events.update((execution_key(event), event) for event in waiting[done : done + number])
            done += number

    def confirm(self, key: ExecutionKey, stream_id: str) -> None:
        """Note that the broker has the event. Not synced: losing this note costs a look, not an event."""
        for segment in reversed(self.segments):
            if key in segment.events:
                segment.stream_ids[key] = stream_id
                break
        self._note(b"C", encode((*key, stream_id)))

    def drop(self, key: ExecutionKey) -> None:
        """Forget an event that must not be settled: its execution failed, or another attempt answered for it."""
        self._note(b"D", encode(key))
        for segment in self.segments:
            segment.events.pop(key, None)
            segment.stream_ids.pop(key, None)

    def settled_below(self, watermark: tuple[int, int]) -> None:
        """Forget events whose stream ids lie below the watermark, and delete segments with none left."""
        for segment in self.segments:
            for key, stream_id in list(segment.stream_ids.items()):
                if parse_stream_id(stream_id) < watermark:
                    del segment.events[key], segment.stream_ids[key]
        done = self.segments if self._file is None else self.segments[:-1]
        for segment in [s for s in done if not s.events]:
            segment.path.unlink(missing_ok=True)
            self.segments.remove(segment)

    def open_events(self) -> list[tuple[ExecutionUsage, str | None]]:
        """Events not known to be settled, oldest first, with their stream ids where the broker had taken them."""
        return [(event, s.stream_ids.get(key)) for s in self.segments for key, event in s.events.items()]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _open_segment(self) -> None:
        path, self._spare = self._spare or self._create_segment(), None
        if self._file is not None:
            self._file.close()
        self._file = path.open("r+b", buffering=0)
        self._position = 0
        self.segments.append(Segment(path))

    def _create_segment(self) -> Path:
        """Create the next segment, full of zeros, whole or not at all."""
        path = self._folder / f"{self._next:010d}.journal"
        part = path.with_suffix(".new")
        try:
            with part.open("wb") as file:
                file.write(bytes(SEGMENT_BYTES))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync_directory(self._folder)
        self._next += 1
        return path

    def _fitting(self, records: Sequence[bytes]) -> int:
        """Make sure that the first record fits, if need be into the next segment; returns how many fit."""
        if self._file is None or (self._position and self._position + len(records[0]) > SEGMENT_BYTES):
            self._open_segment()
        ends = itertools.accumulate(map(len, records), initial=self._position)
        return max(1, sum(end <= SEGMENT_BYTES for end in ends) - 1)

    def _note(self, kind: bytes, payload: bytes) -> None:
        """Write what may be lost: then it is found out again when the event is replayed."""
        record = _record(kind, payload)
        with contextlib.suppress(OSError):
            self._fitting([record])
            self._write(record)

    def _write(self, data: bytes, *, durable: bool = False) -> None:
        """Write records at the position. If that fails, none of them is there."""
        file = self._file
        if file is None:
            raise OSError(errno.ENOSPC, "no segment to write to")
        try:
            if os.pwrite(file.fileno(), data, self._position) < len(data):  # a disk that fills up takes a part
                raise OSError(errno.ENOSPC, "no room for a record of the journal")
            if durable:
                os.fdatasync(file.fileno())
        except OSError:
            os.pwrite(file.fileno(), bytes(len(data)), self._position)
            raise
        self._position += len(data)


def _record(kind: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(kind + payload), kind) + payload


def _is_empty(path: Path) -> bool:
    """Whether a segment was created and never written to."""
    data = path.read_bytes()
    return len(data) == SEGMENT_BYTES and not any(data)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def journalled(folder: Path) -> list[tuple[ExecutionUsage, bytes]]:
    """Events in a worker's journal, and as they are sent; the worker may go on writing meanwhile.

    Raises:
        OSError: it cannot be read.
        msgspec.MsgspecError, ValueError: another version wrote it, or it is damaged.
    """
    found: dict[ExecutionKey, tuple[ExecutionUsage, bytes]] = {}
    for path in sorted(folder.glob("*.journal")):
        with contextlib.suppress(FileNotFoundError):  # all of it was settled just now
            for kind, payload in _records(path.read_bytes()):
                if kind == b"U":
                    event = decode_usage(payload)
                    found[execution_key(event)] = (event, payload)
                elif kind == b"D":
                    found.pop(_decode_key(payload), None)
    return list(found.values())


def parse_stream_id(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)


def _read_segment(path: Path, confirmed: dict[ExecutionKey, str], dropped: set[ExecutionKey]) -> Segment:
    """Read a segment's events. What is noted of some, maybe of earlier segments, goes to `confirmed` and `dropped`."""
    segment = Segment(path)
    for kind, payload in _records(path.read_bytes()):
        if kind == b"U":
            event = decode_usage(payload)
            segment.events[execution_key(event)] = event
        elif kind == b"D":
            dropped.add(_decode_key(payload))
        else:
            request_id, execution, attempt, stream_id = _decode_confirmation(payload)
            confirmed[request_id, execution, attempt] = stream_id
    return segment


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + _HEADER.size <= len(data):
        length, checksum, kind = _HEADER.unpack_from(data, position)
        payload = data[position + _HEADER.size : position + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(kind + payload) != checksum:
            return
        yield kind, payload
        position += _HEADER.size + length
