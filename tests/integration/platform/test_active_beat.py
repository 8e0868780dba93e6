"""Any number of beats may run: one is active, by a lease in PostgreSQL, and another one continues after it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import OperationalError, connection
from structlog.testing import CapturingLogger

from millrace.apps.health.models import BeatLease
from millrace.conf import active_beat
from millrace.conf.active_beat import LEASE_SECONDS, RENEW_SECONDS, ActiveBeat
from millrace.conf.celery import app
from millrace.conf.scheduler import WorkScheduler
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

pytestmark = pytest.mark.django_db
DAILY = "tenants-purge-deleted"  # an entry with a crontab


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_beat(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], ActiveBeat]]:
    """Return a function that starts a beat in a data directory."""
    made: list[ActiveBeat] = []

    def make(name: str) -> ActiveBeat:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(ActiveBeat(tmp_path / name, clock))
        return made[-1]

    yield make
    for beat in made:
        kill(beat)


def kill(beat: ActiveBeat) -> None:
    """Release what the system releases when a process is killed."""
    if beat._lock is not None:
        beat._lock.close()


def expire() -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        BeatLease.objects.update(expires_at=datetime.now(UTC) - timedelta(seconds=1))


def row() -> BeatLease:
    with all_tenants_scope(BypassReason.COMMAND):
        return BeatLease.objects.get()


def test_one_of_two_beats_is_active_and_the_other_follows(make_beat: Callable[[str], ActiveBeat], clock: Clock) -> None:
    first, second = make_beat("a"), make_beat("b")
    assert first.keep(dict) == {}
    assert second.keep(dict) is None
    assert (first.is_active, second.is_active) == (True, False)
    clock.now += RENEW_SECONDS
    assert first.keep(lambda: {DAILY: "2026-12-01T04:00:00+00:00"}) is None
    assert second.keep(dict) is None
    assert (first.is_active, second.is_active) == (True, False)

    expire()  # the first one is stopped for longer than the lease
    clock.now += RENEW_SECONDS
    assert second.keep(dict) == {DAILY: "2026-12-01T04:00:00+00:00"}
    assert (second.is_active, first.fencing_number, second.fencing_number) == (True, 1, 2)
    assert first.keep(lambda: {DAILY: "of a late holder"}) is None  # it finds that it has lost the lease
    assert not first.is_active
    assert (row().fencing_number, row().last_runs) == (2, {DAILY: "2026-12-01T04:00:00+00:00"})


def test_a_beat_that_was_stopped_for_longer_than_its_lease_reports_its_loss_once(
    make_beat: Callable[[str], ActiveBeat], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_beat("a"), make_beat("b")
    first.keep(dict)
    expire()
    second.keep(dict)
    logs = CapturingLogger()
    monkeypatch.setattr(active_beat, "log", logs)
    clock.now += LEASE_SECONDS
    for _ in range(3):
        assert first.keep(dict) is None
        clock.now += RENEW_SECONDS
    assert [call.args for call in logs.calls] == [("beat_lease_lost",)]


def test_a_beat_that_cannot_renew_stops_before_its_lease_ends(
    make_beat: Callable[[str], ActiveBeat], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = make_beat("a")
    beat.keep(dict)
    execute = active_beat._execute

    def fail(*_: Any) -> None:
        raise OperationalError("the server is starting")

    monkeypatch.setattr(active_beat, "_execute", fail)
    monkeypatch.setattr(connection, "close", lambda: None)  # it is in the test's transaction
    while clock.now < 1000 + LEASE_SECONDS - active_beat.MARGIN_SECONDS:
        assert beat.is_active
        beat.keep(dict)
        clock.now += 1
    assert not beat.is_active
    monkeypatch.setattr(active_beat, "_execute", execute)
    clock.now += RENEW_SECONDS
    assert beat.keep(dict) == {}  # no other beat has taken the lease
    assert (beat.is_active, beat.fencing_number) == (True, 2)


def test_a_restarted_beat_need_not_wait(make_beat: Callable[[str], ActiveBeat]) -> None:
    killed, second = make_beat("a"), make_beat("a")
    killed.keep(dict)
    assert second.keep(dict) is None  # the first one has the lock of their data directory
    kill(killed)
    following = make_beat("a")
    assert following.keep(dict) == {}
    assert (following.is_active, following.fencing_number) == (True, 2)


def test_a_copy_of_a_data_directory_is_another_place(make_beat: Callable[[str], ActiveBeat], tmp_path: Path) -> None:
    make_beat("a").keep(dict)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copied = make_beat("copy")
    assert copied.keep(dict) is None
    assert not copied.is_active


def test_a_stopped_beat_leaves_its_lease_to_another(make_beat: Callable[[str], ActiveBeat]) -> None:
    first, second = make_beat("a"), make_beat("b")
    first.keep(dict)
    first.release({DAILY: "2026-12-01T04:00:00+00:00"})
    assert second.keep(dict) == {DAILY: "2026-12-01T04:00:00+00:00"}
    first.release({DAILY: "again"})
    assert row().last_runs == {DAILY: "2026-12-01T04:00:00+00:00"}


@pytest.mark.django_db(transaction=True)
def test_concurrent_beats_get_one_lease(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def start(number: int) -> bool:
        (tmp_path / str(number)).mkdir()
        beat = ActiveBeat(tmp_path / str(number))
        together.wait()
        try:
            beat.keep(dict)
            return beat.is_active
        finally:
            kill(beat)
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(start, range(8))) == [False] * 7 + [True]
    assert row().fencing_number == 1


# The scheduler.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the entries that schedulers send."""
    app.loader.import_default_modules()
    sent: list[str] = []
    monkeypatch.setattr(WorkScheduler, "apply_async", lambda self, entry, **_: sent.append(entry.name))
    monkeypatch.setattr(WorkScheduler, "check_work", lambda self: 0.0)
    monkeypatch.setattr(WorkScheduler, "_wait", lambda self, seconds: None)
    monkeypatch.setattr(WorkScheduler, "producer", None)
    return sent


def make_scheduler(beat: ActiveBeat) -> WorkScheduler:
    scheduler = WorkScheduler(app)
    scheduler._active_beat = beat
    return scheduler


def test_a_successor_sends_what_its_predecessor_has_not(
    make_beat: Callable[[str], ActiveBeat], clock: Clock, sent: list[str], broker: redis.Redis
) -> None:
    first, second = make_scheduler(make_beat("a")), make_scheduler(make_beat("b"))
    for scheduler in (first, second):
        scheduler.tick()
    assert sent == []
    now = datetime.now(UTC)
    runs = {name: now.isoformat() for name in first.schedule} | {DAILY: (now - timedelta(days=1)).isoformat()}
    first._active_beat.release(runs)
    clock.now += RENEW_SECONDS
    for _ in range(5):
        second.tick()
    assert sent.count(DAILY) == 1
    assert row().last_runs[DAILY] > now.isoformat()  # it is stored immediately
    for _ in range(5):
        first.tick()  # in standby
    assert sent.count(DAILY) == 1


def test_a_beat_that_loses_its_lease_stops_sending(
    make_beat: Callable[[str], ActiveBeat], clock: Clock, sent: list[str], broker: redis.Redis
) -> None:
    scheduler = make_scheduler(make_beat("a"))
    scheduler.tick()
    scheduler.apply_entry(scheduler.schedule[DAILY])
    assert sent == [DAILY]
    clock.now += LEASE_SECONDS
    scheduler.apply_entry(scheduler.schedule[DAILY])
    assert sent == [DAILY]


def test_a_signal_during_a_statement_starts_no_other_one(
    make_beat: Callable[[str], ActiveBeat], sent: list[str], broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is locked during a statement, and its thread would wait for itself."""
    scheduler, execute = make_scheduler(make_beat("a")), active_beat._execute
    statements: list[str] = []

    def execute_with_signal(statement: str, parameters: Any) -> Any:
        statements.append(statement)
        if len(statements) == 1:
            scheduler.close()  # as Celery's signal handler does
        return execute(statement, parameters)

    monkeypatch.setattr(active_beat, "_execute", execute_with_signal)
    scheduler.tick()
    assert statements == [active_beat._TAKE]
    scheduler.close()  # as Celery does after the tick
    assert statements == [active_beat._TAKE, active_beat._RENEW]
    assert make_beat("b").keep(dict) is not None
