"""The journal: on disk before anybody is told, replayed after any loss, trimmed when settled."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_worker import journal as journal_module
from inference_worker.journal import Journal, JournalBusyError, leg_key
from tests.worker.conftest import make_job, make_usage


def test_it_remembers_over_a_restart(tmp_path: Path) -> None:
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal = Journal(tmp_path)
    journal.append([first, second])
    journal.confirm(leg_key(first), "5-1")
    journal.close()

    again = Journal(tmp_path)
    assert again.open_events() == [(first, "5-1"), (second, None)]
    again.close()


def test_a_torn_last_record_is_dropped_and_what_was_before_it_kept(tmp_path: Path) -> None:
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal = Journal(tmp_path)
    journal.append([first])
    journal.append([second])
    journal.close()
    path = max(tmp_path.glob("*.journal"))
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        again = Journal(tmp_path)
        assert again.open_events() == [(first, None)]
        again.close()
        for empty in sorted(tmp_path.glob("*.journal"))[1:]:
            empty.unlink()


def test_a_damaged_record_is_not_believed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_usage(make_job())])
    journal.close()
    path = max(tmp_path.glob("*.journal"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = Journal(tmp_path)
    assert again.open_events() == []
    again.close()


def test_what_is_settled_is_forgotten_and_its_segments_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    journal = Journal(tmp_path)
    events = [make_usage(make_job(f"req_{n}")) for n in range(10)]
    for n, event in enumerate(events):
        journal.append([event])
        journal.confirm(leg_key(event), f"{n}-0")
    assert len(journal.segments) > 3
    journal.settled_below((9, 0))
    assert journal.open_events() == [(events[9], "9-0")]
    assert len(list(tmp_path.glob("*.journal"))) <= 2
    journal.close()


def test_a_confirmation_in_a_later_segment_finds_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal = Journal(tmp_path)
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal.append([first, second])
    journal.confirm(leg_key(first), "1-0")  # fills the segment
    journal.confirm(leg_key(second), "2-0")  # stands in the next one
    journal.close()
    again = Journal(tmp_path)
    assert again.open_events() == [(first, "1-0"), (second, "2-0")]
    again.close()


def test_two_workers_cannot_share_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalBusyError, match="MILLRACE_WORKER_NAME"):
        Journal(tmp_path)
    journal.close()


def test_a_record_cut_short_by_a_full_disk_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a torn record nothing would ever be read."""
    first, second = make_usage(make_job("req_1")), make_usage(make_job("req_2"))
    journal = Journal(tmp_path)

    def half(_: Journal, kind: bytes, payload: bytes) -> None:
        journal._file.write(payload[: len(payload) // 2])
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write", half)
        with pytest.raises(OSError, match="no space"):
            journal.append([first])
    assert journal.open_events() == []
    journal.append([second])
    journal.close()
    again = Journal(tmp_path)
    assert again.open_events() == [(second, None)]
    again.close()
