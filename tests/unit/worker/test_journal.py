"""The journal: on disk before publishing, replayed after a loss, and trimmed after settlement."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_worker.contract import journal as journal_module
from inference_worker.contract.journal import RECORD_BYTES, Journal, JournalBusyError, execution_key
from tests.support.worker.jobs import make_job, make_usage


def test_events_survive_a_restart(tmp_path: Path) -> None:
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal = Journal(tmp_path)
    journal.append([first, second])
    journal.confirm(execution_key(first), "5-1")
    journal.close()

    again = Journal(tmp_path)
    assert again.open_events() == [(first, "5-1"), (second, None)]
    again.close()


def test_a_torn_last_record_is_dropped_and_earlier_ones_are_kept(tmp_path: Path) -> None:
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal = Journal(tmp_path)
    journal.append([first])
    journal.append([second])
    journal.close()
    path = min(tmp_path.glob("*.journal"))
    whole = path.read_bytes()
    end = journal._position
    for cut in range(1, 40):
        path.write_bytes(whole[: end - cut] + b"\xff" * cut + whole[end:])
        again = Journal(tmp_path)
        assert again.open_events() == [(first, None)]
        again.close()
        path.write_bytes(whole[: end - cut])  # as written by a version that did not reserve space
        again = Journal(tmp_path)
        assert again.open_events() == [(first, None)]
        again.close()


def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_usage(make_job())])
    journal.close()
    path = min(tmp_path.glob("*.journal"))
    data = bytearray(path.read_bytes())
    data[journal._position // 2] ^= 1
    path.write_bytes(data)
    again = Journal(tmp_path)
    assert again.open_events() == []
    again.close()


def test_settled_events_are_removed_and_their_segments_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    journal = Journal(tmp_path)
    events = [make_usage(make_job(f"req_{n}")) for n in range(10)]
    for n, event in enumerate(events):
        journal.append([event])
        journal.confirm(execution_key(event), f"{n}-0")
    assert len(journal.segments) > 3
    journal.settled_below((9, 0))
    assert journal.open_events() == [(events[9], "9-0")]
    assert len(list(tmp_path.glob("*.journal"))) <= 2  # the last one, and possibly one in reserve
    journal.close()


def test_a_confirmation_in_a_later_segment_finds_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal = Journal(tmp_path)
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal.append([first, second])
    journal.confirm(execution_key(first), "1-0")  # fills the segment
    journal.confirm(execution_key(second), "2-0")  # it is in the next one
    journal.close()
    again = Journal(tmp_path)
    assert again.open_events() == [(first, "1-0"), (second, "2-0")]
    again.close()


def test_a_journal_that_is_opened_without_a_record_does_not_grow(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_usage(make_job())])
    journal.close()
    for _ in range(5):  # the first time, the segment in reserve becomes the current one
        again = Journal(tmp_path)
        assert len(again.open_events()) == 1 and again.is_reserved
        again.close()
    assert len(list(tmp_path.glob("*.journal"))) == 3
    again = Journal(tmp_path)
    again.append([make_usage(make_job("req_2"))])
    again.close()
    again = Journal(tmp_path)
    assert len(again.open_events()) == 2
    again.close()


def test_two_workers_cannot_share_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalBusyError, match="MILLRACE_WORKER_NAME"):
        Journal(tmp_path)
    journal.close()


def test_unsynced_records_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second one would be read after the record that replaces the first."""
    events = [make_usage(make_job(f"req_{n}")) for n in range(3)]
    journal = Journal(tmp_path)

    def fail(_: int) -> None:
        raise OSError("not synced")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="not synced"):
            journal.append(events[:2])
    assert journal.open_events() == []
    journal.append(events[2:])
    journal.close()
    again = Journal(tmp_path)
    assert again.open_events() == [(events[2], None)]
    again.close()


def test_a_record_truncated_by_a_full_disk_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records after a torn record would never be read."""
    events = [make_usage(make_job(f"req_{n}")) for n in range(3)]
    journal = Journal(tmp_path)
    whole, calls = os.pwrite, []

    def half(descriptor: int, data: bytes, position: int) -> int:
        calls.append(position)
        return whole(descriptor, data[: len(data) // 2] if len(calls) == 1 else data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="no disk space"):
            journal.append(events[:2])
    assert journal.open_events() == []
    journal.append(events[2:])
    journal.close()
    again = Journal(tmp_path)
    assert again.open_events() == [(events[2], None)]
    again.close()


def test_final_counts_fit_into_reserved_space_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files cannot grow and none can be created, but the space that `room` reports is available."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 4 * RECORD_BYTES)
    journal = Journal(tmp_path)
    assert journal.room == 8 * RECORD_BYTES
    events = [make_usage(make_job(f"req_{n}")) for n in range(14)]
    with full_disk(tmp_path, monkeypatch):
        journal.append(events[:5])
        for n, event in enumerate(events[:5]):
            journal.confirm(execution_key(event), f"{n}-0")
        journal.append(events[5:])
        journal.reserve()
        assert journal.room < 4 * RECORD_BYTES  # its owner accepts no more executions than fit
        big = [make_usage(make_job("req_" + "x" * 5000))]
        with pytest.raises(OSError, match="No space"):
            journal.append(big)
    journal.reserve()
    assert journal.room >= 4 * RECORD_BYTES
    journal.append(big)  # the same again, now that there is space
    journal.close()
    again = Journal(tmp_path)
    assert [event for event, _ in again.open_events()] == events + big
    assert [stream_id for _, stream_id in again.open_events()][:5] == [f"{n}-0" for n in range(5)]
    again.close()


def test_a_worker_started_on_a_full_disk_has_no_room_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_usage(make_job("req_1"))
    with full_disk(tmp_path, monkeypatch):
        journal = Journal(tmp_path)
        assert journal.room == 0
        with pytest.raises(OSError, match="No space"):
            journal.append([first])
    journal.reserve()
    assert journal.room == 2 * journal_module.SEGMENT_BYTES
    journal.append([first])
    journal.close()
    with full_disk(tmp_path, monkeypatch):  # the previous worker's reserve exists
        again = Journal(tmp_path)
        assert again.room == journal_module.SEGMENT_BYTES
        again.append([make_usage(make_job("req_2"))])
        assert len(again.open_events()) == 2
        again.close()


@contextmanager
def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a full disk by a limit on the size of new files: the kernel rejects writes that need more space."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    grown = max((path.stat().st_size for path in folder.glob("*.journal")), default=0)
    real = Path.open

    def refuse_new(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" in mode and path.suffix == ".new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse_new)
        resource.setrlimit(resource.RLIMIT_FSIZE, (grown, limit[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, ignored)


class Clock:
    """A clock that a test sets, in the place of the module `time`."""

    now = 1_000_000

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(journal_module, "time", clock)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)  # each record has its own segment
    return clock


def settled_journal(directory: Path, number: int = 3) -> tuple[Journal, list[Any]]:
    """Return a journal with settled events, which are kept for 600 s."""
    journal = Journal(directory, retention_seconds=600)
    journal.note_timeline("s:00000001")
    events = [make_usage(make_job(f"req_{n}")) for n in range(number)]
    journal.append(events)
    for n, event in enumerate(events):
        journal.confirm(execution_key(event), f"{n}-0")
    journal.settled_below((number, 0))
    return journal, events


def reopened(journal: Journal) -> list[Any]:
    journal.reopen_settled()
    return [event for event, stream_id in journal.open_events() if stream_id is not None]


def test_settled_events_are_kept_for_the_retention_time(tmp_path: Path, clock: Clock) -> None:
    journal, _ = settled_journal(tmp_path)
    kept = len(journal.segments)
    assert kept > 3
    clock.now += 599
    journal.note_timeline("s:00000001")
    journal.settled_below((3, 0))
    assert len(journal.segments) == kept
    assert journal.has_retained_events
    clock.now += 1
    journal.note_timeline("s:00000001")
    journal.settled_below((3, 0))
    assert len(journal.segments) == 1
    assert not journal.has_retained_events
    journal.close()


def test_nothing_is_deleted_while_the_timeline_is_unknown(tmp_path: Path, clock: Clock) -> None:
    """The retention time counts until the timeline was last found unchanged, also for a worker that was down."""
    journal, events = settled_journal(tmp_path)
    clock.now += 100_000
    journal.settled_below((3, 0))
    journal.close()
    again = Journal(tmp_path, retention_seconds=600)
    assert (again.timeline, again.open_events()) == ("s:00000001", [])
    assert reopened(again) == events
    again.close()


def test_without_a_retention_time_settled_events_are_not_kept(tmp_path: Path, clock: Clock) -> None:
    settled_journal(tmp_path)[0].close()
    journal = Journal(tmp_path)
    journal.settled_below((3, 0))
    assert not journal.has_retained_events
    assert reopened(journal) == []
    journal.close()


def test_only_events_of_the_retention_time_are_read_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker's current segment may contain events of earlier months."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1 << 16)
    journal, _ = settled_journal(tmp_path, 1)
    clock.now += 600
    journal.note_timeline("s:00000001")
    second = make_usage(make_job("req_second"))
    journal.append([second])
    journal.confirm(execution_key(second), "7-0")
    journal.settled_below((8, 0))
    assert len(journal.segments) == 1
    assert reopened(journal) == [second]
    journal.close()


def test_events_that_are_read_again_keep_their_order(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1 << 16)
    journal, settled = settled_journal(tmp_path, 1)
    unsettled = make_usage(make_job("req_unsettled"))
    journal.append([unsettled])
    assert len(journal.segments) == 1
    journal.reopen_settled()
    assert [event for event, _ in journal.open_events()] == [*settled, unsettled]
    journal.close()


def test_an_event_that_was_sent_again_is_open_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    journal, events = settled_journal(tmp_path)
    assert reopened(journal) == events
    journal.confirm(execution_key(events[1]), "9-0")
    journal.close()
    again = Journal(tmp_path, retention_seconds=600)
    assert again.open_events() == [(events[1], "9-0")]
    again.settled_below((10, 0))
    assert again.open_events() == []
    again.close()


def test_a_segment_that_was_deleted_by_hand_is_skipped(tmp_path: Path, clock: Clock) -> None:
    journal, events = settled_journal(tmp_path)
    journal.segments[0].path.unlink()
    assert reopened(journal) == events[1:]
    journal.close()


def test_the_number_of_settled_segments_is_limited(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_RETAINED_SEGMENTS", 4)
    journal, events = settled_journal(tmp_path)  # three events, three confirmations
    assert len(journal.segments) == 5  # with the current one
    assert reopened(journal) == events[2:]
    journal.close()


def test_settled_segments_make_room_on_a_full_disk(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = settled_journal(tmp_path)
    before = len(journal.segments)
    journal._spare = None

    def fail(_: Journal) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_create_segment", fail)
        journal.reserve()
    assert len(journal.segments) == before - 1
    journal.reserve()
    assert journal.is_reserved
    journal.close()


def test_the_timeline_is_stored(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.timeline is None
    journal.note_timeline("s:00000001")
    journal.note_timeline("s:00000002")
    journal.close()
    again = Journal(tmp_path)
    assert again.timeline == "s:00000002"
    again.close()
    (tmp_path / journal_module.TIMELINE_NAME).write_bytes(b"\xff")
    again = Journal(tmp_path)
    assert again.timeline is None
    again.close()
