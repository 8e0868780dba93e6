"""A failover of PostgreSQL to a standby that lacks the last transactions: the settler and the workers' journals."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connection

from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.metering.settler import Settler
from billing.metering.timeline import ANNOUNCEMENT_SECONDS, OutdatedDatabaseError, TimelineWatch
from billing.models import UsageEvent
from inference_worker.contract.journal import Journal, execution_key
from inference_worker.contract.messages import TIMELINE_KEY, USAGE_GROUP, USAGE_STREAM
from inference_worker.worker.journal_replay import JournalReplay
from tests.support.billing.settlers import pending, quarantined
from tests.support.rows import unscoped

pytestmark = pytest.mark.usefixtures("table")
FIRST, SECOND, THIRD = "system:00000001", "system:00000002", "system:00000003"
Promote = Callable[[str], None]


@pytest.fixture
def settler(broker: redis.Redis) -> Settler:
    return Settler(broker, consumer="a", stopping=threading.Event())


@pytest.fixture
def lose_usage(as_owner: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Return a function that removes all usage events, as a standby that lacks their transactions."""

    def lose() -> None:
        with as_owner(), connection.cursor() as cursor:
            cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER, NO FORCE ROW LEVEL SECURITY")
            cursor.execute("DELETE FROM billing_usageevent")
            cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER, FORCE ROW LEVEL SECURITY")
        assert unscoped(UsageEvent).count() == 0

    return lose


def test_the_timeline_is_announced_for_a_short_time(settler: Settler, broker: redis.Redis) -> None:
    settler.drain()
    announced: Any = broker.get(TIMELINE_KEY)
    assert re.fullmatch(rb"\d+:[0-9A-F]{8}", announced)
    assert 0 < broker.ttl(TIMELINE_KEY) <= ANNOUNCEMENT_SECONDS


def test_an_idle_settler_announces_the_timeline(
    settler: Settler, broker: redis.Redis, promote: Promote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.metering.settler.BLOCK_MS", 1)
    promote(FIRST)
    settler._resume()
    promote(SECOND)
    settler._round()
    assert broker.get(TIMELINE_KEY) == SECOND.encode()


def test_a_batch_that_was_committed_before_a_failover_is_settled_again(
    settler: Settler,
    broker: redis.Redis,
    send: Any,
    event: Any,
    promote: Promote,
    lose_usage: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit succeeds, but only the replaced server has it."""
    calls = 0

    def settle_and_fail_over(messages: Sequence[UsageMessage]) -> SettleResult:
        nonlocal calls
        calls += 1
        result = settle(messages)
        if calls == 1:
            lose_usage()
            promote(SECOND)
        return result

    monkeypatch.setattr("billing.metering.settler.settle", settle_and_fail_over)
    promote(FIRST)
    send(event(), event())
    assert settler.drain() == 2
    assert (calls, unscoped(UsageEvent).count()) == (2, 2)
    assert (pending(broker), broker.xlen(USAGE_STREAM)) == (0, 0)
    assert broker.get(TIMELINE_KEY) == SECOND.encode()


def test_a_settler_of_a_replaced_server_acknowledges_nothing(
    settler: Settler, broker: redis.Redis, send: Any, event: Any, promote: Promote
) -> None:
    promote(FIRST)
    settler._resume()
    send(event())
    broker.set(TIMELINE_KEY, SECOND)  # by a settler of the promoted standby
    messages = settler._read(">", block_ms=None)
    with pytest.raises(OutdatedDatabaseError, match=f"timeline {FIRST}, but {SECOND} was announced"):
        settler._settle(messages)
    assert pending(broker) == 1
    assert broker.get(TIMELINE_KEY) == SECOND.encode()
    promote(SECOND)  # the settler has reconnected
    assert settler.drain() == 1
    assert (pending(broker), unscoped(UsageEvent).count()) == (0, 1)


@pytest.mark.parametrize("announced", [None, "another:00000009", "unknown", FIRST])
def test_a_timeline_that_is_not_earlier_is_announced(
    broker: redis.Redis, promote: Promote, announced: str | None
) -> None:
    """The announcement expires, so an earlier timeline of a restored backup is refused for a minute only."""
    if announced is not None:
        broker.set(TIMELINE_KEY, announced)
    promote(SECOND)
    watch = TimelineWatch(broker)
    assert not watch.observe()
    assert broker.get(TIMELINE_KEY) == SECOND.encode()
    promote(THIRD)
    assert watch.observe()
    assert not watch.observe()


def test_usage_that_a_failover_lost_is_settled_again_from_a_journal(
    settler: Settler,
    broker: redis.Redis,
    event: Any,
    promote: Promote,
    lose_usage: Callable[[], None],
    tmp_path: Path,
) -> None:
    """Nothing is counted twice if the failover has lost nothing."""
    promote(FIRST)
    settler.drain()
    journal = Journal(tmp_path, retention_seconds=600)
    replay = JournalReplay(broker, journal, 50)
    replay.resend()
    replay.remove_settled()
    events = [event() for _ in range(3)]
    journal.append(events)
    for each in events:
        stream_id: Any = broker.xadd(USAGE_STREAM, {"e": each.encoded})
        journal.confirm(execution_key(each), stream_id.decode())
    assert settler.drain() == 3
    replay.remove_settled()
    assert journal.open_events() == []
    for timeline, is_lossy in ((SECOND, True), (THIRD, False)):
        if is_lossy:
            lose_usage()
        promote(timeline)
        settler.drain()  # it announces the timeline
        replay.remove_settled()
        assert not replay.send_lost()
        assert settler.drain() == 3
        assert unscoped(UsageEvent).count() == 3
        replay.remove_settled()
        assert journal.open_events() == []
    assert quarantined() == []
    groups: Any = broker.xinfo_groups(USAGE_STREAM)
    assert [group["name"] for group in groups] == [USAGE_GROUP.encode()]
    journal.close()
