"""Journals of workers that do not run are settled by another worker of the same data directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from inference_worker.contract import claims, exits
from inference_worker.contract.journal import ExecutionKey, Journal, JournalBusyError, execution_key
from inference_worker.contract.messages import EXITS_KEY, USAGE_GROUP, USAGE_STREAM, InferenceJob, claim_key
from inference_worker.worker.orphaned_journals import OrphanedJournals
from tests.support.worker.jobs import make_job, make_usage
from tests.support.worker.publishing import usage_events

Queued = Callable[[InferenceJob], str]


@pytest.fixture
def orphaned(broker: redis.Redis, tmp_path: Path) -> Iterator[OrphanedJournals]:
    own = Journal(tmp_path / "m-own")
    orphaned = OrphanedJournals(os.environ["MILLRACE_VALKEY_URL"], tmp_path / "m-own", 50)
    yield orphaned
    orphaned.close()
    own.close()


def claim(broker: redis.Redis, queued: Queued, job: InferenceJob) -> None:
    broker.eval(claims.CLAIM, 1, queued(job), 1, "r")


def settle_all(broker: redis.Redis) -> None:
    """Acknowledge all usage events, as the settler does."""
    broker.xgroup_create(USAGE_STREAM, USAGE_GROUP, id="0", mkstream=True)
    found = broker.xreadgroup(USAGE_GROUP, "settler", {USAGE_STREAM: ">"})
    for _, entries in found:  # type: ignore[union-attr]
        broker.xack(USAGE_STREAM, USAGE_GROUP, *[entry_id for entry_id, _ in entries])


def segments(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.journal")]


def test_the_journal_of_a_renamed_worker_is_settled(
    orphaned: OrphanedJournals, broker: redis.Redis, queued: Queued, tmp_path: Path
) -> None:
    """One end was sent and lost by Valkey, another was never sent."""
    directory = tmp_path / "m-0"
    sent, unsent = make_job("req_1"), make_job("req_2")
    for job in (sent, unsent):
        claim(broker, queued, job)
    journal = Journal(directory)
    journal.append([make_usage(sent), make_usage(unsent)])
    journal.confirm(execution_key(make_usage(sent)), "1-1")
    exits.take_over(broker, directory, "m-0.aa")
    journal.close()
    orphaned.step()
    assert {usage.billing_context.request_id: usage.outcome for usage in usage_events(broker)} == {
        "req_1": "completed",
        "req_2": "failed",
    }
    assert broker.hget(claim_key("req_2", 0), "state") == b"failed"
    assert broker.zrange(EXITS_KEY, 0, -1) == [b"m-0.aa"]
    assert segments(directory)  # the events are not settled yet
    orphaned.step()
    assert len(usage_events(broker)) == 2  # they are not sent again
    settle_all(broker)
    orphaned.step()
    assert segments(directory) == []
    Journal(directory).close()  # a worker can return under the name


def test_a_locked_journal_is_left_alone(orphaned: OrphanedJournals, broker: redis.Redis, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "m-1")
    exits.take_over(broker, tmp_path / "m-1", "m-1.aa")
    journal.append([make_usage(make_job())])
    orphaned.step()
    assert usage_events(broker) == []
    assert broker.zrange(EXITS_KEY, 0, -1) == []
    assert len(journal.open_events()) == 1
    journal.close()


def test_a_worker_that_returns_gets_its_journal_between_two_steps(
    orphaned: OrphanedJournals, broker: redis.Redis, queued: Queued, tmp_path: Path
) -> None:
    job = make_job()
    claim(broker, queued, job)
    journal = Journal(tmp_path / "m-0")
    journal.append([make_usage(job)])
    journal.confirm(execution_key(make_usage(job)), "1-1")
    journal.close()
    orphaned.step()
    journal = Journal(tmp_path / "m-0", wait_seconds=60)
    assert [key for key, stream_id in journal.open_events() if stream_id] == [make_usage(job)]
    with pytest.raises(JournalBusyError):
        Journal(tmp_path / "m-0")
    orphaned.step()
    journal.close()


def test_a_damaged_journal_does_not_prevent_the_others(
    orphaned: OrphanedJournals, broker: redis.Redis, queued: Queued, tmp_path: Path
) -> None:
    damaged = Journal(tmp_path / "m-0")
    damaged._note(b"U", b"of another version")
    damaged.close()
    job = make_job()
    claim(broker, queued, job)
    journal = Journal(tmp_path / "m-1")
    journal.append([make_usage(job)])
    journal.close()
    orphaned.step()
    assert [usage.outcome for usage in usage_events(broker)] == ["failed"]
    assert segments(tmp_path / "m-0")
    assert segments(tmp_path / "m-1") == []


def test_a_disk_error_of_one_journal_does_not_prevent_the_others(
    orphaned: OrphanedJournals,
    broker: redis.Redis,
    queued: Queued,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("m-0", "m-1"):
        job = make_job(f"req_{name}")
        claim(broker, queued, job)
        journal = Journal(tmp_path / name)
        journal.append([make_usage(job)])
        journal.close()
    failures = iter([OSError("Input/output error")])
    drop = Journal.drop

    def drop_or_fail(journal: Journal, key: ExecutionKey) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        drop(journal, key)

    monkeypatch.setattr(Journal, "drop", drop_or_fail)
    orphaned.step()
    assert segments(tmp_path / "m-0") and segments(tmp_path / "m-1") == []
    orphaned.step()
    assert segments(tmp_path / "m-0") == []
    assert {usage.billing_context.request_id for usage in usage_events(broker)} == {"req_m-0", "req_m-1"}
