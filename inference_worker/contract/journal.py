"""The worker's journal: the final counts of each execution are on disk before its end is sent.

A journal is a directory of segments. Each segment is created with its full size, and one more is kept in reserve, so
that the final counts of running executions fit even if the disk is full. Zeros follow a segment's last record.

A record is a usage event (`U`), a note that the broker has an event (`C`, with the event's key), a note that an event
must not be settled (`D`), or a note that all events below a stream id are settled (`S`, with the time). The remaining
segments are replayed when a worker starts. An incomplete last record, from a power failure, is dropped, because its end
was not sent.

A segment whose events are all settled is kept for the retention time: a failover of PostgreSQL to a standby can lose
their settlement. The file `timeline` contains the timeline of PostgreSQL that has the settled events. It is touched
whenever this timeline is found unchanged. The retention time counts until then, so nothing is deleted while it is
unknown whether a failover has happened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import msgspec

from inference_worker.contract.lock_files import LockFile
from inference_worker.contract.messages import ExecutionUsage, decode_usage, encode

SEGMENT_BYTES = 1 << 20
LOCK_NAME = "lock"
TIMELINE_NAME = "timeline"
SETTLED_STREAM_ID = "0-0"  # instead of the ID of an event that was settled and is sent again
MAX_RETAINED_SEGMENTS = 256  # with settled events only; the oldest are deleted first, and before the disk is full
RECORD_BYTES = 1024  # reserved for each running execution: its usage event and the note that the broker has it
_HEADER = struct.Struct("<IIc")  # length, CRC-32 of type and payload, record type

ExecutionKey = tuple[str, int, int]  # request id, execution, attempt
_decode_key = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
_decode_confirmation = msgspec.msgpack.Decoder(tuple[str, int, int, str]).decode


class JournalBusyError(Exception):
    """An error: another worker uses this journal, because two workers have the same name."""


def is_free(directory: Path, wait_seconds: float = 0.0) -> bool:
    """Return whether no process has the journal's lock. Wait up to `wait_seconds` for its release."""
    path = directory / LOCK_NAME
    if not path.exists():  # a journal was never opened here
        return True
    try:
        with contextlib.closing(LockFile(path)) as lock:
            return lock.lock(wait_seconds)
    except OSError:
        return True


def execution_key(event: ExecutionUsage) -> ExecutionKey:
    return (event.billing_context.request_id, event.billing_context.execution, event.attempt)


@dataclass
class Segment:
    """One file of the journal, with the events in it that are not settled, and the times of the settled ones."""

    path: Path
    events: dict[ExecutionKey, ExecutionUsage] = field(default_factory=dict)
    stream_ids: dict[ExecutionKey, str] = field(default_factory=dict)  # ids of the events that the broker has
    settled: dict[ExecutionKey, int] = field(default_factory=dict)  # Unix times
    settled_at: int = 0  # the last of them

    def settle(self, key: ExecutionKey, at: int) -> None:
        self.events.pop(key, None)
        self.stream_ids.pop(key, None)
        self.settled[key] = at
        self.settled_at = max(self.settled_at, at)

    def reopen(self, key: ExecutionKey, event: ExecutionUsage) -> None:
        self.settled.pop(key, None)
        self.events[key] = event
        self.stream_ids[key] = SETTLED_STREAM_ID


@dataclass
class _Notes:
    """The records about events, in the order in which they were written."""

    stream_ids: dict[ExecutionKey, str] = field(default_factory=dict)
    settled: dict[ExecutionKey, int] = field(default_factory=dict)
    dropped: set[ExecutionKey] = field(default_factory=set)

    def confirm(self, key: ExecutionKey, stream_id: str) -> None:
        self.stream_ids[key] = stream_id
        self.settled.pop(key, None)  # it was sent again

    def settle(self, watermark: tuple[int, int], at: int) -> None:
        for key in _keys_below(self.stream_ids, watermark):
            del self.stream_ids[key]
            self.settled[key] = at


class Journal:
    """The journal of one worker. Not thread-safe: only the publisher's thread uses it."""

    def __init__(self, directory: Path, wait_seconds: float = 0.0, *, retention_seconds: int = 0) -> None:
        """Open the journal, and wait up to `wait_seconds` for its lock.

        Args:
            retention_seconds: how long settled events are kept.

        Raises:
            JournalBusyError: another process has the lock.
            ValueError, msgspec.MsgspecError: another version wrote the journal, or it is damaged.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._retention_seconds = retention_seconds
        self._lock = LockFile(directory / LOCK_NAME)
        if not self._lock.lock(wait_seconds):
            self._lock.close()
            raise JournalBusyError(f"{directory} is in use: give each worker its own MILLRACE_WORKER_NAME")
        self.segments: list[Segment] = []
        self._file: FileIO | None = None  # the last segment; None: the disk had no space for it
        self._position = 0  # in the file, after the last record
        paths = sorted(directory.glob("*.journal"))
        self._next = int(paths[-1].stem) + 1 if paths else 1
        self._spare = paths.pop() if paths and _is_empty(paths[-1]) else None  # segment of full size without records
        unused = paths.pop() if self._spare and paths and _is_empty(paths[-1]) else None  # its process wrote no record
        self._read_segments(paths)
        self._timeline, self._timeline_seen_at = self._read_timeline()
        if unused is not None:
            spare, self._spare = self._spare, unused
            with contextlib.suppress(OSError):
                self._open_segment()
            self._spare = spare
        self.reserve()

    @property
    def id(self) -> str:
        """Return the identity of the journal. A copy of its directory has another one."""
        return self._lock.identify()

    @property
    def room(self) -> int:
        """Return how many bytes of records fit without more disk space."""
        left = 0 if self._file is None else max(0, SEGMENT_BYTES - self._position)
        return left + (SEGMENT_BYTES if self._spare is not None else 0)

    @property
    def is_reserved(self) -> bool:
        """Return whether the current and the next segment exist."""
        return self._file is not None and self._spare is not None

    def reserve(self) -> None:
        """Create the current and the next segment, if the disk has space for them.

        Otherwise delete a segment with settled events, so that a later call finds space.
        """
        try:
            if self._file is None:
                self._open_segment()
            if self._spare is None:
                self._spare = self._create_segment()
        except OSError:
            self._delete(self._settled_segments()[:1])

    def append(self, events: Iterable[ExecutionUsage]) -> None:
        """Write the events and wait until they are on disk.

        Raises:
            OSError: the disk is full or failed. A retry with the same events skips those that were written.
        """
        waiting = [event for event in events if not any(execution_key(event) in s.events for s in self.segments)]
        records = [_record(b"U", event.encoded) for event in waiting]
        done = 0
        while done < len(waiting):
            number = self._fitting(records[done:])
            self._write(b"".join(records[done : done + number]), durable=True)
            self.segments[-1].events.update((execution_key(event), event) for event in waiting[done : done + number])
            done += number

    def confirm(self, key: ExecutionKey, stream_id: str) -> None:
        """Record that the broker has the event. Not synced: after a loss of this record the event is only checked
        again."""
        for segment in reversed(self.segments):
            if key in segment.events:
                segment.stream_ids[key] = stream_id
                break
        self._note(b"C", encode((*key, stream_id)))

    def drop(self, key: ExecutionKey) -> None:
        """Forget an event that must not be settled: its execution failed, or another attempt ended it."""
        self._note(b"D", encode(key))
        for segment in self.segments:
            segment.events.pop(key, None)
            segment.stream_ids.pop(key, None)

    def settled_below(self, watermark: tuple[int, int]) -> None:
        """Record that events whose stream ids are below the watermark are settled, and delete segments whose retention
        time is over."""
        now, has_settled = int(time.time()), False
        for segment in self.segments:
            for key in _keys_below(segment.stream_ids, watermark):
                segment.settle(key, now)
                has_settled = True
        if has_settled:
            # In the form of a `C`, as which earlier versions read it, of an execution that does not exist.
            self._note(b"S", encode(("", *watermark, str(now))))
        settled = self._settled_segments()
        excess = max(0, len(settled) - MAX_RETAINED_SEGMENTS)
        self._delete(settled[:excess])
        self._delete(itertools.takewhile(lambda s: not self._is_retained(s.settled_at), settled[excess:]))

    def reopen_settled(self) -> None:
        """Read the settled events of the retention time again, as events that are not known to be settled."""
        for segment in self.segments:
            keys = {key for key, at in segment.settled.items() if self._is_retained(at)}
            if not keys:
                continue
            with contextlib.suppress(FileNotFoundError):  # it was deleted by hand
                data = segment.path.read_bytes()
                for event in (decode_usage(payload) for record_type, payload in _records(data) if record_type == b"U"):
                    key = execution_key(event)
                    if key in keys:
                        segment.reopen(key, event)
                    elif key in segment.events:
                        segment.events[key] = segment.events.pop(key)  # keeps the order of the file

    def open_events(self) -> list[tuple[ExecutionUsage, str | None]]:
        """Return the events that are not known to be settled, oldest first, with their stream ids if the broker has
        them."""
        return [(event, s.stream_ids.get(key)) for s in self.segments for key, event in s.events.items()]

    @property
    def timeline(self) -> str | None:
        """Return the timeline of PostgreSQL that has the settled events; None: unknown."""
        return self._timeline

    def note_timeline(self, timeline: str) -> None:
        """Record that PostgreSQL has this timeline now, and that it has the settled events."""
        path, now = self._directory / TIMELINE_NAME, int(time.time())
        with contextlib.suppress(OSError):  # after a restart the events are sent again
            if timeline != self._timeline:
                part = path.with_suffix(".new")
                part.write_text(timeline, encoding="utf-8")
                part.replace(path)
            os.utime(path, (now, now))
        self._timeline, self._timeline_seen_at = timeline, now

    @property
    def has_retained_events(self) -> bool:
        """Return whether events are not settled, or settled within the retention time."""
        return any(s.events or (s.settled and self._is_retained(s.settled_at)) for s in self.segments)

    def delete_segments(self) -> None:
        """Delete all segments, of a journal whose events are all settled. Only `close` may follow."""
        if self.open_events():
            raise ValueError("the journal has unsettled events")
        self.segments.clear()
        for path in self._directory.glob("*.journal"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _read_segments(self, paths: Iterable[Path]) -> None:
        notes = _Notes()
        self.segments += [_read_segment(path, notes) for path in paths]
        for segment in self.segments:
            for key in segment.events.keys() & notes.dropped:
                del segment.events[key]
            segment.stream_ids = {key: notes.stream_ids[key] for key in segment.events if key in notes.stream_ids}
            for key in segment.events.keys() & notes.settled.keys():
                segment.settle(key, notes.settled[key])

    def _read_timeline(self) -> tuple[str | None, int]:
        """Return the stored timeline, and when it was last found unchanged."""
        path = self._directory / TIMELINE_NAME
        try:
            return path.read_text(encoding="utf-8"), int(path.stat().st_mtime)
        except (OSError, UnicodeDecodeError):
            return None, 0

    def _is_retained(self, settled_at: int) -> bool:
        return self._retention_seconds > 0 and settled_at > self._timeline_seen_at - self._retention_seconds

    def _settled_segments(self) -> list[Segment]:
        """Return the segments that can be deleted, oldest first: those before the first with an unsettled event.

        A later segment may have the notes about events of an earlier one.
        """
        full = self.segments if self._file is None else self.segments[:-1]
        return list(itertools.takewhile(lambda segment: not segment.events, full))

    def _delete(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            segment.path.unlink(missing_ok=True)
            self.segments.remove(segment)

    def _open_segment(self) -> None:
        path, self._spare = self._spare or self._create_segment(), None
        if self._file is not None:
            self._file.close()
        self._file = path.open("r+b", buffering=0)
        self._position = 0
        self.segments.append(Segment(path))

    def _create_segment(self) -> Path:
        """Create the next segment, full of zeros. A partial one is removed."""
        path = self._directory / f"{self._next:010d}.journal"
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
        _sync_directory(self._directory)
        self._next += 1
        return path

    def _fitting(self, records: Sequence[bytes]) -> int:
        """Make room for the first record, in the next segment if necessary. Return how many records fit."""
        if self._file is None or (self._position and self._position + len(records[0]) > SEGMENT_BYTES):
            self._open_segment()
        ends = itertools.accumulate(map(len, records), initial=self._position)
        return max(1, sum(end <= SEGMENT_BYTES for end in ends) - 1)

    def _note(self, record_type: bytes, payload: bytes) -> None:
        """Write a record that may be lost, because a replay of the event finds out the same."""
        record = _record(record_type, payload)
        with contextlib.suppress(OSError):
            self._fitting([record])
            self._write(record)

    def _write(self, data: bytes, *, durable: bool = False) -> None:
        """Write records at the current position: all of them or none."""
        file = self._file
        if file is None:
            raise OSError(errno.ENOSPC, "no segment to write to")
        try:
            if os.pwrite(file.fileno(), data, self._position) < len(data):  # a full disk writes a part
                raise OSError(errno.ENOSPC, "no disk space for a record of the journal")
            if durable:
                os.fdatasync(file.fileno())
        except OSError:
            os.pwrite(file.fileno(), bytes(len(data)), self._position)
            raise
        self._position += len(data)


def _record(record_type: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(record_type + payload), record_type) + payload


def _is_empty(path: Path) -> bool:
    """Return whether a segment has no records."""
    data = path.read_bytes()
    return len(data) == SEGMENT_BYTES and not any(data)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_journal(directory: Path) -> list[tuple[ExecutionUsage, bytes]]:
    """Return the events in a worker's journal as they are sent. The worker may write meanwhile.

    Raises:
        OSError: the journal cannot be read.
        msgspec.MsgspecError, ValueError: another version wrote the journal, or it is damaged.
    """
    found: dict[ExecutionKey, tuple[ExecutionUsage, bytes]] = {}
    for path in sorted(directory.glob("*.journal")):
        with contextlib.suppress(FileNotFoundError):  # it was settled and deleted meanwhile
            for record_type, payload in _records(path.read_bytes()):
                if record_type == b"U":
                    event = decode_usage(payload)
                    found[execution_key(event)] = (event, payload)
                elif record_type == b"D":
                    found.pop(_decode_key(payload), None)
    return list(found.values())


def parse_stream_id(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)


def _keys_below(stream_ids: Mapping[ExecutionKey, str], watermark: tuple[int, int]) -> list[ExecutionKey]:
    return [key for key, stream_id in stream_ids.items() if parse_stream_id(stream_id) < watermark]


def _read_segment(path: Path, notes: _Notes) -> Segment:
    """Read a segment's events. Records about events, also of earlier segments, go to `notes`."""
    segment = Segment(path)
    for record_type, payload in _records(path.read_bytes()):
        if record_type == b"U":
            event = decode_usage(payload)
            segment.events[execution_key(event)] = event
        elif record_type == b"D":
            notes.dropped.add(_decode_key(payload))
        elif record_type == b"S":
            _, milliseconds, sequence, at = _decode_confirmation(payload)
            notes.settle((milliseconds, sequence), int(at))
        else:
            request_id, execution, attempt, stream_id = _decode_confirmation(payload)
            notes.confirm((request_id, execution, attempt), stream_id)
    return segment


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + _HEADER.size <= len(data):
        length, checksum, record_type = _HEADER.unpack_from(data, position)
        payload = data[position + _HEADER.size : position + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(record_type + payload) != checksum:
            return
        yield record_type, payload
        position += _HEADER.size + length
