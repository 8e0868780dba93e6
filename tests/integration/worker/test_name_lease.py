"""Leases of workers' names in Valkey: one process at a time has a name, and successors get it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from inference_worker.contract import clocks
from inference_worker.contract.clocks import MAX_CLOCK_SECONDS, check_clock
from inference_worker.contract.journal import Journal
from inference_worker.worker import name_lease
from inference_worker.worker.name_lease import NameLease, lease_key
from tests.support.waiting import eventually

NAME = "m-3f9a1c2b"
Take = Callable[..., NameLease]


@pytest.fixture
def take(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Take]:
    """Return a function that takes the lease as a process of a host."""
    taken: list[NameLease] = []

    def take(process: str, journal: str, host: str = "", on_lost: Callable[[], None] = lambda: None) -> NameLease:
        monkeypatch.setattr(name_lease, "host_name", lambda: host or f"host-of-{process}")
        lease = NameLease(broker, NAME, process)
        lease.take(journal, on_lost)
        taken.append(lease)
        return lease

    yield take
    for lease in taken:
        lease.release()


def holder(broker: redis.Redis) -> str | None:
    process = broker.hget(lease_key(NAME), "process")
    assert process is None or isinstance(process, bytes)
    return None if process is None else process.decode()


def test_a_second_process_is_refused_with_the_other_host(take: Take, broker: redis.Redis) -> None:
    take(f"{NAME}.aa", "journal-a", "alpha")
    with pytest.raises(SystemExit) as refused:
        take(f"{NAME}.bb", "journal-b", "beta")
    text = str(refused.value)
    assert text.startswith("MILLRACE_WORKER_NAME: ") and "\n" not in text
    assert NAME in text and "host alpha" in text and "set a name that no other worker has" in text
    assert holder(broker) == f"{NAME}.aa"


def test_the_process_with_the_lock_of_the_journal_takes_the_name_at_once(take: Take, broker: redis.Redis) -> None:
    """The holder was killed: its journal's lock is free, and its lease has not expired yet."""
    lost: list[str] = []
    killed = take(f"{NAME}.aa", "journal-a", on_lost=lambda: lost.append("aa"))
    killed._thread.stop()
    killed._thread.join()
    take(f"{NAME}.bb", "journal-a")
    assert holder(broker) == f"{NAME}.bb"
    assert lost == []


def test_a_planned_successor_takes_the_name_while_the_old_process_finishes(take: Take, broker: redis.Redis) -> None:
    lost: list[str] = []
    old = take(f"{NAME}.aa", "journal-a", on_lost=lambda: lost.append("aa"))
    old.leave()
    take(f"{NAME}.bb", "journal-b")
    assert holder(broker) == f"{NAME}.bb"
    eventually(lambda: not old._thread.is_alive())
    assert lost == []
    old.release()  # it does not end its successor's lease
    assert holder(broker) == f"{NAME}.bb"


def test_the_name_of_a_lost_host_is_free_after_its_lease(
    take: Take, broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_lease, "LEASE_SECONDS", 2.0)
    lost = take(f"{NAME}.aa", "journal-a")
    lost._thread.stop()
    lost._thread.join()
    assert holder(broker) == f"{NAME}.aa"
    take(f"{NAME}.bb", "journal-b")  # waits for the end of the lease
    assert holder(broker) == f"{NAME}.bb"


def test_a_process_that_was_stopped_for_long_learns_that_it_lost_its_name(take: Take, broker: redis.Redis) -> None:
    lost = threading.Event()
    take(f"{NAME}.aa", "journal-a", on_lost=lost.set)
    broker.delete(lease_key(NAME))
    broker.hset(lease_key(NAME), mapping={"process": "other", "host": "beta", "journal": "b", "renewals": 0})
    assert lost.wait(60)
    assert holder(broker) == "other"


def test_a_lease_that_valkey_lost_is_taken_again(take: Take, broker: redis.Redis) -> None:
    take(f"{NAME}.aa", "journal-a")
    broker.flushdb()
    eventually(lambda: holder(broker) == f"{NAME}.aa")


def test_a_released_name_is_free_at_once(take: Take, broker: redis.Redis) -> None:
    take(f"{NAME}.aa", "journal-a").release()
    assert holder(broker) is None
    take(f"{NAME}.bb", "journal-b")
    assert holder(broker) == f"{NAME}.bb"


def test_without_valkey_a_worker_starts() -> None:
    away = redis.Redis.from_url("redis://127.0.0.1:1/0")
    lease = NameLease(away, NAME, f"{NAME}.aa")
    lease.take("journal-a", lambda: None)
    assert lease.find_host() == name_lease.host_name()
    lease.release()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(MAX_CLOCK_SECONDS + 2, "ahead of"), (-MAX_CLOCK_SECONDS - 2, "behind"), (2.0, None), (-2.0, None)],
)
def test_a_clock_that_differs_from_valkeys_is_refused(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch, seconds: float, text: str | None
) -> None:
    now = time.time
    monkeypatch.setattr(clocks.time, "time", lambda: now() + seconds)
    if text is None:
        check_clock(broker)
        return
    with pytest.raises(SystemExit) as refused:
        check_clock(broker)
    message = str(refused.value)
    assert message.startswith("MILLRACE_VALKEY_URL: ") and "\n" not in message
    assert f"s {text} the clock of Valkey's host" in message and "(NTP)" in message


def test_a_worker_with_a_taken_name_exits_with_status_1_and_one_line(
    take: Take, broker: redis.Redis, tmp_path: Path
) -> None:
    """A real process with a data directory of its own, as on a second host."""
    take(f"{NAME}.aa", "journal-a", "alpha")
    environ = os.environ | {"MILLRACE_DATA_DIR": str(tmp_path), "MILLRACE_WORKER_NAME": NAME}
    environ |= {"MILLRACE_WORKER_MODEL": "none", "MILLRACE_MIN_FREE_DISK": "0", "MILLRACE_LOG_LEVEL": "error"}
    process = subprocess.run(
        [sys.executable, "-m", "inference_worker"], env=environ, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 1
    lines = [line for line in (process.stdout + process.stderr).splitlines() if "MILLRACE_" in line]
    assert len(lines) == 1 and "host alpha" in lines[0] and "Traceback" not in process.stderr
    Journal(tmp_path / "journal" / NAME).close()  # its lock is free
