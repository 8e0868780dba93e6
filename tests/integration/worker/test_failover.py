"""A failover of PostgreSQL, which the settler announces in Valkey: workers send settled usage again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from inference_worker.contract import claims
from inference_worker.contract.journal import Journal, execution_key
from inference_worker.contract.messages import (
    TIMELINE_KEY,
    USAGE_GROUP,
    USAGE_STREAM,
    ExecutionUsage,
    InferenceJob,
)
from inference_worker.worker import journal_replay
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.journal_replay import JournalReplay
from inference_worker.worker.orphaned_journals import OrphanedJournals
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job, make_usage
from tests.support.worker.publishing import last, new_publisher, usage_events

Queued = Callable[[InferenceJob], str]
FIRST, SECOND, THIRD = "system:00000001", "system:00000002", "system:00000003"


@pytest.fixture(autouse=True)
def group(broker: redis.Redis) -> None:
    broker.xgroup_create(USAGE_STREAM, USAGE_GROUP, id="0", mkstream=True)


def settle_all(broker: redis.Redis) -> int:
    """Acknowledge and delete all usage events, as the settler does. Return their number."""
    found: Any = broker.xreadgroup(USAGE_GROUP, "settler", {USAGE_STREAM: ">"})
    ids = [entry_id for _, entries in found for entry_id, _ in entries]
    if ids:
        broker.xack(USAGE_STREAM, USAGE_GROUP, *ids)
        broker.xdel(USAGE_STREAM, *ids)
    return len(ids)


def settled_journal(directory: Path, number: int = 3) -> list[ExecutionUsage]:
    """Write the journal of a worker that has ended after its events were settled. Return the events."""
    journal = Journal(directory, retention_seconds=600)
    journal.note_timeline(FIRST)
    events = [make_usage(make_job(f"req_{n}")) for n in range(number)]
    journal.append(events)
    for event in events:
        journal.confirm(execution_key(event), "1-1")
    journal.settled_below((2, 0))
    assert journal.open_events() == []
    journal.close()
    return events


def replay_of(broker: redis.Redis, directory: Path) -> JournalReplay:
    replay = JournalReplay(broker, Journal(directory, retention_seconds=600), 50)
    replay.resend()
    return replay


def send_all(replay: JournalReplay) -> None:
    while replay.send_lost():
        pass


def test_settled_usage_is_sent_again_after_each_failover(
    broker: redis.Redis, queued: Queued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.worker.publisher.TRIM_SECONDS", 0.05)
    broker.set(TIMELINE_KEY, FIRST)
    journal = Journal(tmp_path / "journal", retention_seconds=600)
    publisher = new_publisher(broker, journal)
    eventually(lambda: journal.timeline == FIRST)
    job = make_job()
    broker.eval(claims.CLAIM, 1, queued(job), 1, "r")
    live = ActiveJob(job, 1, "r", 32)
    publisher.deliver([last(live, 1)])
    assert publisher.has_ended(live)
    sent = usage_events(broker)
    assert settle_all(broker) == len(sent) == 1
    eventually(lambda: not journal.open_events())
    for timeline in (SECOND, THIRD):
        broker.set(TIMELINE_KEY, timeline)
        eventually(lambda: journal.timeline == timeline)  # noqa: B023
        assert usage_events(broker) == sent
        assert settle_all(broker) == 1
        eventually(lambda: not journal.open_events())
    publisher.close()


def test_a_worker_that_was_down_at_the_failover_sends_its_usage_again(broker: redis.Redis, tmp_path: Path) -> None:
    events = settled_journal(tmp_path / "journal")
    broker.set(TIMELINE_KEY, SECOND)
    journal = Journal(tmp_path / "journal", retention_seconds=600)
    publisher = new_publisher(broker, journal)
    publisher.deliver([])
    eventually(lambda: journal.timeline == SECOND)
    assert usage_events(broker) == events
    publisher.close()


def test_a_new_worker_sends_nothing_again(broker: redis.Redis, tmp_path: Path) -> None:
    broker.set(TIMELINE_KEY, SECOND)
    replay = replay_of(broker, tmp_path)
    replay.remove_settled()
    assert not replay.send_lost()
    assert replay.journal.timeline == SECOND
    assert usage_events(broker) == []
    replay.journal.close()


def test_without_an_announcement_nothing_is_sent_again(broker: redis.Redis, tmp_path: Path) -> None:
    """Valkey lost the key, or no settler reaches PostgreSQL."""
    settled_journal(tmp_path)
    replay = replay_of(broker, tmp_path)
    replay.remove_settled()
    assert not replay.send_lost()
    assert (replay.journal.timeline, usage_events(broker)) == (FIRST, [])
    replay.journal.close()


def test_a_killed_worker_sends_all_usage_again(
    broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_replay, "RESEND_BATCH", 1)
    events = settled_journal(tmp_path)
    broker.set(TIMELINE_KEY, SECOND)
    first = replay_of(broker, tmp_path)
    first.remove_settled()
    assert first.send_lost()
    first.journal.close()
    assert usage_events(broker) == events[:1]
    second = replay_of(broker, tmp_path)
    assert second.journal.timeline == FIRST
    second.remove_settled()
    send_all(second)
    assert usage_events(broker)[-3:] == events
    assert second.journal.timeline == SECOND
    second.journal.close()


def test_a_failover_while_usage_is_sent_again(
    broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent and settled before the second failover may be lost again."""
    monkeypatch.setattr(journal_replay, "RESEND_BATCH", 1)
    events = settled_journal(tmp_path)
    broker.set(TIMELINE_KEY, SECOND)
    replay = replay_of(broker, tmp_path)
    replay.remove_settled()
    assert replay.send_lost()
    assert settle_all(broker) == 1
    replay.remove_settled()  # nothing is marked as settled before all is sent
    broker.set(TIMELINE_KEY, THIRD)
    replay.remove_settled()
    send_all(replay)
    assert usage_events(broker) == events
    assert replay.journal.timeline == THIRD
    assert settle_all(broker) == 3
    replay.remove_settled()
    assert replay.journal.open_events() == []
    replay.journal.close()


def test_unsettled_usage_is_sent_again_too(broker: redis.Redis, tmp_path: Path) -> None:
    """A settler that has read it may acknowledge it after a commit in the earlier timeline."""
    usage = make_usage(make_job())
    replay = replay_of(broker, tmp_path)
    replay.journal.note_timeline(FIRST)
    replay.journal.append([usage])
    stream_id: Any = broker.xadd(USAGE_STREAM, {"e": usage.encoded})
    replay.journal.confirm(execution_key(usage), stream_id.decode())
    broker.set(TIMELINE_KEY, SECOND)
    replay.remove_settled()
    send_all(replay)
    assert usage_events(broker) == [usage, usage]
    replay.journal.close()


def test_the_journal_of_a_worker_that_does_not_return_is_sent_again(broker: redis.Redis, tmp_path: Path) -> None:
    own = Journal(tmp_path / "m-own")
    url = os.environ["MILLRACE_VALKEY_URL"]
    orphaned = OrphanedJournals(url, tmp_path / "m-own", 50, journal_retention_seconds=600)
    events = settled_journal(tmp_path / "m-0")
    broker.set(TIMELINE_KEY, FIRST)
    orphaned.step()
    assert usage_events(broker) == []
    assert list((tmp_path / "m-0").glob("*.journal"))  # it is kept for the retention time
    broker.set(TIMELINE_KEY, SECOND)
    orphaned.step()
    assert usage_events(broker) == []  # it is not read each time
    orphaned._next_steps.clear()
    orphaned.step()
    assert usage_events(broker) == events
    orphaned.close()
    own.close()
