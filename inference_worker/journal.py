"""The worker's journal: each leg's final counts are on disk before anybody is told of its end.

A folder of append-only segments. A record is a usage event (`U`), the word that the broker has taken one (`C`, with its
key), or that one must not be settled (`D`, likewise). A segment is deleted once the settler has acknowledged everything
in it; what is left when a worker starts is replayed. A torn last record, from a power cut mid-write, is dropped: nobody
had been told of that end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from inference_worker.protocol import UsageEvent, decode_usage, encode

SEGMENT_BYTES = 1 << 20
LOCK_NAME = "lock"
_HEADER = struct.Struct("<IIc")  # length, CRC-32 of kind and payload, kind

LegKey = tuple[str, int, int]  # request id, leg, attempt
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


def leg_key(event: UsageEvent) -> LegKey:
    return (event.envelope.request_id, event.envelope.leg, event.attempt)


@dataclass
class Segment:
    """One file of the journal, and what of it is not settled yet."""

    path: Path
    events: dict[LegKey, UsageEvent] = field(default_factory=dict)
    stream_ids: dict[LegKey, str] = field(default_factory=dict)  # broker's id of each event it has taken


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
        paths = sorted(folder.glob("*.journal"))
        confirmed: dict[LegKey, str] = {}
        dropped: set[LegKey] = set()
        for path in paths:
            self.segments.append(_read_segment(path, confirmed, dropped))
        for segment in self.segments:
            for key in segment.events.keys() & dropped:
                del segment.events[key]
            segment.stream_ids = {key: confirmed[key] for key in segment.events if key in confirmed}
        self._next = int(paths[-1].stem) + 1 if paths else 1
        self._open_segment()

    def append(self, events: Iterable[UsageEvent]) -> None:
        """Write the events and wait until they are on disk.

        Raises:
            OSError: the disk is full, or worse. Nothing was written then, and it can be tried again.
        """
        events = list(events)
        end = self._file.tell()
        try:
            for event in events:
                self._write(b"U", encode(event))
            os.fdatasync(self._file.fileno())
        except OSError:
            self._file.truncate(end)  # what stands behind a torn record would never be read
            self._file.seek(end)
            raise
        self.segments[-1].events.update((leg_key(event), event) for event in events)

    def confirm(self, key: LegKey, stream_id: str) -> None:
        """Note that the broker has the event. Not synced: losing this note costs a look, not an event."""
        for segment in reversed(self.segments):
            if key in segment.events:
                segment.stream_ids[key] = stream_id
                break
        self._note(b"C", encode((*key, stream_id)))
        if self._file.tell() > SEGMENT_BYTES:
            self._file.close()
            self._open_segment()

    def drop(self, key: LegKey) -> None:
        """Forget an event that must not be settled: its leg failed, or another attempt answered for it."""
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
        for segment in [s for s in self.segments[:-1] if not s.events]:
            segment.path.unlink(missing_ok=True)
            self.segments.remove(segment)

    def open_events(self) -> list[tuple[UsageEvent, str | None]]:
        """Events not known to be settled, oldest first, with their stream ids where the broker had taken them."""
        return [(event, s.stream_ids.get(key)) for s in self.segments for key, event in s.events.items()]

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _open_segment(self) -> None:
        path = self._folder / f"{self._next:010d}.journal"
        self._next += 1
        self._file = path.open("ab", buffering=0)
        self.segments.append(Segment(path))

    def _note(self, kind: bytes, payload: bytes) -> None:
        """Write what may be lost: then it is found out again when the event is replayed."""
        end = self._file.tell()
        try:
            self._write(kind, payload)
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)

    def _write(self, kind: bytes, payload: bytes) -> None:
        record = _HEADER.pack(len(payload), zlib.crc32(kind + payload), kind) + payload
        if self._file.write(record) < len(record):  # unbuffered: a disk that fills up takes a part
            raise OSError(errno.ENOSPC, "no room for a record of the journal")


def journalled(folder: Path) -> list[tuple[UsageEvent, bytes]]:
    """Events in a worker's journal, and as they are sent; the worker may go on writing meanwhile.

    Raises:
        OSError: it cannot be read.
        msgspec.MsgspecError, ValueError: another version wrote it, or it is damaged.
    """
    found: dict[LegKey, tuple[UsageEvent, bytes]] = {}
    for path in sorted(folder.glob("*.journal")):
        with contextlib.suppress(FileNotFoundError):  # all of it was settled just now
            for kind, payload in _records(path.read_bytes()):
                if kind == b"U":
                    event = decode_usage(payload)
                    found[leg_key(event)] = (event, payload)
                elif kind == b"D":
                    found.pop(_decode_key(payload), None)
    return list(found.values())


def parse_stream_id(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)


def _read_segment(path: Path, confirmed: dict[LegKey, str], dropped: set[LegKey]) -> Segment:
    """Read a segment's events. What is noted of some, maybe of earlier segments, goes to `confirmed` and `dropped`."""
    segment = Segment(path)
    for kind, payload in _records(path.read_bytes()):
        if kind == b"U":
            event = decode_usage(payload)
            segment.events[leg_key(event)] = event
        elif kind == b"D":
            dropped.add(_decode_key(payload))
        else:
            request_id, leg, attempt, stream_id = _decode_confirmation(payload)
            confirmed[request_id, leg, attempt] = stream_id
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
