"""The change feed: a reader misses no change, in whatever order transactions commit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from django.db import connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from tenants import actions
from tenants.isolation.db_roles import SYSTEM
from tenants.models import ChangeEventRow
from tenants.outbox import change_feed
from tenants.outbox.change_feed import ChangeEvent, Cursor
from tenants.tasks import purge_expired
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def follower(transactional_db) -> Iterator[Follower]:
    parameters = connection.get_connection_params()
    parameters.pop("cursor_factory", None)
    parameters.pop("context", None)
    parameters["options"] = f"-c role={SYSTEM}"
    with psycopg.connect(**parameters, autocommit=True) as raw:
        yield Follower(raw)


class Follower:
    """A reader that polls as a gateway does."""

    def __init__(self, raw: psycopg.Connection) -> None:
        self._raw = raw
        self.restart()

    def restart(self) -> None:
        self.cursor = Cursor(*self._raw.execute(change_feed.NOW).fetchone())

    def is_outdated(self) -> bool:
        rows = self._raw.execute(change_feed.POLL, [self.cursor.horizon]).fetchall()
        return self.cursor.is_outdated(rows)

    def poll(self) -> list[ChangeEvent]:
        return self.cursor.take(self._raw.execute(change_feed.POLL, [self.cursor.horizon]).fetchall())


def log(tenant_id: int) -> int:
    """Write one row in the open transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE millrace_system")
        cursor.execute(
            "INSERT INTO tenants_changeevent (change_type, tenant_id) VALUES ('tenant', %s) RETURNING id", [tenant_id]
        )
        return cursor.fetchone()[0]


def test_a_committed_row_is_read(follower):
    assert follower.poll() == []
    tenant = actions.do_create_tenant("acme", "Acme")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    (change,) = follower.poll()
    assert change[1:] == ("key", tenant.pk, key.pk)
    assert follower.poll() == []
    actions.do_suspend_tenant(tenant)
    assert [change[1:] for change in follower.poll()] == [("tenant", tenant.pk, None)]


def test_a_row_that_commits_after_a_later_one_is_not_missed(follower):
    early_wrote, may_end = threading.Event(), threading.Event()

    def early() -> None:
        with transaction.atomic():
            log(1)
            early_wrote.set()
            may_end.wait(10)
        connection.close()

    thread = threading.Thread(target=early)
    thread.start()
    early_wrote.wait(10)
    with transaction.atomic():
        log(2)
    # The later one is read immediately and once, though the earlier one is still open.
    assert [change.tenant_id for change in follower.poll()] == [2]
    assert follower.poll() == []
    may_end.set()
    thread.join()
    assert [change.tenant_id for change in follower.poll()] == [1]
    assert follower.poll() == []


def test_a_transaction_that_started_before_and_wrote_after_is_not_missed(follower):
    """It has its number long before its row, and rows with later numbers were read meanwhile."""
    numbered, may_write = threading.Event(), threading.Event()

    def slow() -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_current_xact_id()")
            numbered.set()
            may_write.wait(10)
            log(1)
        connection.close()

    thread = threading.Thread(target=slow)
    thread.start()
    numbered.wait(10)
    for _ in range(3):
        with transaction.atomic():
            log(2)
        assert len(follower.poll()) == 1
    may_write.set()
    thread.join()
    assert [change.tenant_id for change in follower.poll()] == [1]


def test_concurrent_writers(follower):
    stop, wrote = threading.Event(), [set() for _ in range(4)]

    def write(mine: set[int]) -> None:
        while not stop.is_set():
            with transaction.atomic():
                number = log(3)
                time.sleep(0.001 * (number % 7))
                if number % 5:
                    mine.add(number)
                else:
                    transaction.set_rollback(True)
        connection.close()

    threads = [threading.Thread(target=write, args=(mine,)) for mine in wrote]
    for thread in threads:
        thread.start()
    found: list[int] = []
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        found += [change.id for change in follower.poll()]
    stop.set()
    for thread in threads:
        thread.join()
    found += [change.id for change in follower.poll()]
    assert len(found) == len(set(found))
    assert set(found) == set().union(*wrote)
    assert len(found) > 20


@given(st.data())
def test_the_cursor_returns_each_row_once(data):
    """Compare with a model: transactions start in order and end in any order, and a poll sees the ended ones."""
    running, ended, given_out, number = set(), {}, [], 10
    cursor = Cursor(number)
    for _ in range(data.draw(st.integers(0, 40))):
        act = data.draw(st.sampled_from(["begin", "end", "poll"]))
        if act == "begin":
            running.add(number)
            number += 1
        elif act == "end" and running:
            xid = data.draw(st.sampled_from(sorted(running)))
            running.discard(xid)
            ended[xid] = 1000 - xid  # IDs are not in the order of transactions
        elif act == "poll":
            rows = [(row, xid, "key", 1, None) for xid, row in ended.items() if xid >= cursor.horizon]
            given_out += cursor.take([*rows, (None, min(running, default=number), None, None, None)])
            assert {change.id for change in given_out} == set(ended.values())
    assert len({change.id for change in given_out}) == len(given_out)


def test_a_failover_is_recognized_by_the_timeline(follower, promote):
    """The role of gateways can read the timeline."""
    assert re.fullmatch(r"\d+:[0-9A-F]{8}", follower.cursor.timeline)
    assert not follower.is_outdated()
    promote("system:00000002")
    assert follower.is_outdated()
    follower.restart()
    assert (follower.cursor.timeline, follower.is_outdated()) == ("system:00000002", False)


def test_old_rows_are_deleted(follower):
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_suspend_tenant(tenant)
    actions.do_resume_tenant(tenant)
    old = datetime.now(UTC) - timedelta(seconds=change_feed.RETENTION_SECONDS + 5)
    first = unscoped(ChangeEventRow).order_by("id")[0]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE millrace_system")
        cursor.execute("UPDATE tenants_changeevent SET created_at = %s WHERE id = %s", [old, first.pk])
    purge_expired()
    assert unscoped(ChangeEventRow).count() == 1


def test_a_push_triggers_a_poll(broker):
    listener = broker.pubsub()
    listener.subscribe(change_feed.CHANNEL)
    assert listener.get_message(timeout=60)["type"] == "subscribe"
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_suspend_tenant(tenant)
    assert listener.get_message(timeout=60)["data"] == str(tenant.pk).encode()
