"""The settler settles each execution once, also with duplicates, invalid messages and failures."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from django.db import ProgrammingError, connection, connections

from billing.management.commands import run_settler
from billing.metering import status
from billing.metering.settler import REPORT_SECONDS, Settler, Turns
from billing.models import UsageEvent, UsageQuarantine
from inference_worker.contract.messages import USAGE_GROUP, USAGE_STREAM, encode
from tests.support.billing.books import rate_card
from tests.support.billing.settlers import pending, quarantined
from tests.support.rows import unscoped
from tests.support.waiting import eventually

Reason = UsageQuarantine.Reason


@pytest.fixture
def settler(broker, table):
    def make(consumer: str = "a", **options: object) -> Settler:
        return Settler(broker, consumer=consumer, stopping=threading.Event(), **options)

    return make


def test_one_of_the_settlers_of_a_process_reports_in_each_period(settler, monkeypatch):
    reported, reclaimed, turns = [], [], Turns()
    monkeypatch.setattr("billing.metering.settler.BLOCK_MS", 1)
    monkeypatch.setattr(Settler, "_report", lambda self: reported.append(self._consumer) or 0)
    monkeypatch.setattr(Settler, "_reclaim", lambda self, until: reclaimed.append(self._consumer))
    settlers = [settler("a", turns=turns), settler("b", turns=turns)]
    for each in settlers:
        each._resume()
        each._round()
    assert (reported, reclaimed) == (["a"], ["a"])
    turns._next_at -= REPORT_SECONDS
    for each in reversed(settlers):
        each._round()
    assert (reported, reclaimed) == (["a", "b"], ["a", "b"])


def test_a_row_contains_all_fields_of_its_event(settler, send, event):
    at, version = datetime.now(UTC), rate_card()
    sent = event(
        at=at,
        execution=1,
        price_version=version,
        lease_id=5,
        fencing_token=6,
        reserved_nano=400_000,
        reserved_tokens=100,
        cache_write_5m=8,
        queue_us=1,
        ttft_us=2,
        duration_us=3,
    )
    send(sent)
    assert settler().drain() == 1
    row = unscoped(UsageEvent).get()
    assert (row.admitted_at, row.request_id, row.execution) == (at, sent.billing_context.request_id, 1)
    assert (row.tenant_id, row.project_id, row.key_id, row.model) == (1, 2, 3, "smollm2-135m")
    assert (row.uncached, row.cache_read, row.cache_write_5m, row.cache_write_1h, row.output) == (10, 64, 8, 0, 7)
    assert (row.price_version, row.lease_id, row.fencing_token, row.reserved_nano) == (version, 5, 6, 400_000)
    assert row.cost_femto == 10 * 3 * 10**9 + 64 * 3 * 10**8 + 8 * 3_750_000_000 + 7 * 15 * 10**9
    assert [price is not None for price in row.price_ids] == [True, True, True, False, True, False, False, False]
    assert row.invoice_period is not None
    assert (row.queue_us, row.ttft_us, row.duration_us, row.block_size) == (1, 2, 3, 32)
    assert (row.attempt, row.outcome, row.finish_reason) == (1, "completed", "stop")
    assert abs(row.settled_at - at) < timedelta(minutes=1)


def test_settled_events_leave_the_stream(settler, send, event, broker):
    send(*(event() for _ in range(5)))
    settler(batch=2).drain()
    assert broker.xlen(USAGE_STREAM) == 0
    assert pending(broker) == 0


def test_events_sent_three_times_in_random_order_are_settled_once(settler, send, event):
    events = [event() for _ in range(400)] * 3
    random.Random(7).shuffle(events)
    send(*events)
    settler(batch=170).drain()
    assert unscoped(UsageEvent).count() == 400
    assert quarantined() == []


def test_two_executions_of_a_request_are_two_rows(settler, send, event):
    send(event(request_id="r", execution=0), event(request_id="r", execution=1))
    settler().drain()
    assert unscoped(UsageEvent).count() == 2


def test_a_crash_between_commit_and_acknowledgement(settler, send, event, broker, monkeypatch):
    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    send(*(event() for _ in range(10)))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Settler, "_acknowledge", crash)
        settler().drain()
    assert unscoped(UsageEvent).count() == 10
    assert pending(broker) == 10  # so no worker has trimmed its journal
    send(event())
    settler().drain()
    assert unscoped(UsageEvent).count() == 11
    assert pending(broker) == 0


def test_nothing_is_acknowledged_before_it_is_committed(settler, send, event, broker, as_owner):
    send(event())
    one = settler()
    one._resume()
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent RENAME TO hidden")
    try:
        with pytest.raises(ProgrammingError, match="does not exist"):
            one._round()
        assert pending(broker) == 1
    finally:
        with as_owner(), connection.cursor() as cursor:
            cursor.execute("ALTER TABLE hidden RENAME TO billing_usageevent")
    settler().drain()
    assert unscoped(UsageEvent).count() == 1


@pytest.mark.parametrize(
    ("poison", "reason"),
    [
        (b"\xc1 not msgpack", Reason.UNDECODABLE),
        (encode({"envelope": 1}), Reason.UNDECODABLE),
        (b"\x81\xa3\xed\xa0\x80\x01", Reason.UNDECODABLE),  # a name that is not UTF-8
        (b"\x91" * 5000, Reason.UNDECODABLE),  # deeply nested
        ({"uncached": -1}, Reason.REFUSED),
        ({"output": 10**12}, Reason.REFUSED),
        ({"output": 2**63 + 1}, Reason.REFUSED),
        ({"outcome": "splendid"}, Reason.REFUSED),
        ({"reserved_nano": -5}, Reason.REFUSED),
        ({"tenant_id": 0}, Reason.REFUSED),
        ({"request_id": "r" * 65}, Reason.REFUSED),
        ({"request_id": "nul\x00"}, Reason.REFUSED),
        ({"execution": 40_000}, Reason.REFUSED),
        ({"admitted_at": 2**62}, Reason.REFUSED),
        ({"at": datetime(2031, 1, 1, tzinfo=UTC)}, Reason.REFUSED),
        ({"at": datetime(2019, 1, 1, tzinfo=UTC)}, Reason.UNPLACEABLE),
    ],
    ids=lambda value: str(value)[:24],
)
def test_only_invalid_messages_are_quarantined(settler, send, event, broker, poison, reason):
    payload = poison if isinstance(poison, bytes) else encode(event(**poison))
    before, after = [event() for _ in range(20)], [event() for _ in range(20)]
    send(*before, payload, *after)
    settler().drain()
    assert unscoped(UsageEvent).count() == 40
    assert quarantined() == [(reason, payload)]
    assert broker.xlen(USAGE_STREAM) == 0


@pytest.mark.parametrize(
    ("over", "detail"),
    [({"reserved_nano": 154_199}, "costs 154200000000 femto-USD"), ({"reserved_tokens": 80}, "used 81 tokens")],
)
@pytest.mark.parametrize("lease", [{"lease_id": 5, "fencing_token": 1}, {}], ids=["of a lease", "without budgets"])
def test_an_execution_over_its_reservation_is_not_settled(settler, send, event, over, detail, lease):
    """Admission prevents this. Otherwise a budget could be exceeded."""
    given = {**lease, "reserved_nano": 154_200, "reserved_tokens": 81, "price_version": rate_card()}
    exact = event(**given)
    send(exact, event(**(given | over)))
    settler().drain()
    (row,) = unscoped(UsageEvent).all()
    assert (row.request_id, row.cost_femto) == (exact.billing_context.request_id, 154_200 * 10**6)
    (refused,) = unscoped(UsageQuarantine).all()
    assert refused.reason == Reason.REFUSED
    assert detail in refused.detail


def test_a_message_without_an_event_is_kept(settler, broker):
    broker.xadd(USAGE_STREAM, {"x": "y"})
    settler().drain()
    assert quarantined() == [(Reason.UNDECODABLE, encode({b"x": b"y"}))]


def test_a_repeated_invalid_message_is_quarantined_once(settler, send):
    for _ in range(2):
        send(b"poison")
        settler().drain()
    assert unscoped(UsageQuarantine).get().payload_hash == hashlib.sha256(b"poison").digest()


def test_a_conflicting_earlier_settlement_is_recorded(settler, send, event):
    at = datetime.now(UTC)
    send(event(at=at, request_id="r", output=7))
    settler().drain()
    other = event(at=at, request_id="r", output=8)
    send(other, event(at=at, request_id="r", output=7))
    settler().drain()
    assert unscoped(UsageEvent).get().output == 7
    assert quarantined() == [(Reason.CONFLICT, encode(other))]


def test_a_failure_in_the_same_batch_takes_precedence(settler, send, event):
    at = datetime.now(UTC)
    send(
        event(at=at, request_id="r"), event(at=at, request_id="r", outcome="failed", uncached=0, cache_read=0, output=0)
    )
    settler().drain()
    assert unscoped(UsageEvent).get().outcome == "failed"


def test_a_lost_stream_is_created_again(broker, table, send, event):
    stopping = threading.Event()
    settler = Settler(broker, consumer="a", stopping=stopping)
    thread = threading.Thread(target=settler.run)
    thread.start()
    try:
        send(event())
        eventually(lambda: unscoped(UsageEvent).count() == 1)
        broker.flushdb()
        send(event(), event())  # a stream again, with no group
        eventually(lambda: unscoped(UsageEvent).count() == 3)
        eventually(lambda: broker.xlen(USAGE_STREAM) == 0)
    finally:
        stopping.set()
        thread.join()


def test_pending_messages_of_a_dead_settler_are_taken_over(broker, settler, send, event):
    send(event(), event())
    settler("dead")._make_group()
    broker.xreadgroup(USAGE_GROUP, "dead", {USAGE_STREAM: ">"})
    time.sleep(0.05)
    living = settler("living", claim_idle_ms=20)
    living._take_over()
    assert unscoped(UsageEvent).count() == 2
    assert pending(broker) == 0


def test_a_message_deleted_while_pending_is_only_acknowledged(broker, settler, send, event):
    send(event(), event())
    settler()._make_group()
    ids = [entry for entry, _ in broker.xreadgroup(USAGE_GROUP, "a", {USAGE_STREAM: ">"})[0][1]]
    broker.xdel(USAGE_STREAM, ids[0])
    settler().drain()
    assert unscoped(UsageEvent).count() == 1
    assert quarantined() == []
    assert pending(broker) == 0


def test_settling_resumes_after_a_database_outage(broker, table, send, event, as_owner):
    stopping = threading.Event()
    thread = threading.Thread(target=Settler(broker, consumer="a", stopping=stopping).run)
    thread.start()
    try:
        send(event())
        eventually(lambda: unscoped(UsageEvent).count() == 1)
        with as_owner(), connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        send(event())
        eventually(lambda: unscoped(UsageEvent).count() == 2)
    finally:
        stopping.set()
        thread.join()
        for alias in connections:  # other tests' connections were closed too
            connections[alias].close()
        connection.close_pool()


def test_the_status_is_reported(settler, send, event, broker):
    one = settler()
    send(event(), b"poison")
    one.drain()
    seconds, microseconds = broker.time()
    began = seconds * 10**6 + microseconds
    send(event())
    time.sleep(0.01)
    one._report()
    report = status.decode(broker.get(status.STATUS_KEY))
    assert (report.settled, report.repeated, report.quarantined, report.backlog) == (1, 0, 1, 1)
    assert report.lag_ms >= 10
    seconds, microseconds = broker.time()
    assert began <= report.at <= seconds * 10**6 + microseconds
    assert report.consumer == "a"


def test_an_error_in_a_thread_stops_the_others_and_is_raised(broker, table, send, event, monkeypatch):
    """The supervisor restarts the process, and its messages are read again."""
    real = Settler._settle

    def fall_over(self, messages):
        if self._consumer == "two":
            raise RuntimeError("an unexpected error")
        real(self, messages)

    monkeypatch.setattr(Settler, "_settle", fall_over)
    stopping = threading.Event()
    settlers = [Settler(broker, consumer=name, stopping=stopping, batch=10) for name in ("one", "two")]
    events = [event() for _ in range(200)]
    send(*events)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_settler._run, settlers, stopping)
        with pytest.raises(RuntimeError, match="an unexpected error"):
            running.result(timeout=60)
    assert stopping.is_set()
    monkeypatch.setattr(Settler, "_settle", real)
    stopping.clear()
    for again in settlers:
        again.drain()
    assert unscoped(UsageEvent).count() == 200
    assert (pending(broker), broker.xlen(USAGE_STREAM)) == (0, 0)
