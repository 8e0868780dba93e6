"""A worker's control loop: heartbeats, cancels and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from inference_worker.contract.compute_support import describe_support
from inference_worker.contract.messages import (
    CORDONS_KEY,
    REPLICAS_KEY,
    SUPPORT_KEY,
    Heartbeat,
    WorkerSupport,
    beat_key,
    control_channel,
    decode_heartbeat,
    decode_worker_support,
    encode,
)
from inference_worker.contract.request import RequestError
from inference_worker.contract.unsettled_usage import (
    UNSETTLED_KEY,
    UnsettledUsage,
    decode_unsettled,
    describe_unsettled,
)
from inference_worker.worker.control import Control
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.replica import ReplicaRecord
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job, make_usage

SUPPORT = WorkerSupport(("default",), describe_support("cpu", "avx2", None))


class RecordingEngine:
    """A fake engine that stores executions and records its calls."""

    def __init__(self) -> None:
        self.executions: list[ActiveJob] = []
        self.cancelled: list[tuple[ActiveJob, RequestError | None]] = []

    def submit(self, live: ActiveJob) -> None:
        self.executions.append(live)

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        self.cancelled.append((live, failure))
        self.executions.remove(live)

    def requeue(self, live: ActiveJob) -> None:
        self.executions.remove(live)

    def live(self) -> list[ActiveJob]:
        return list(self.executions)

    def stats(self) -> None: ...

    def close(self) -> None: ...


def heartbeats(beat: int) -> dict[str, Heartbeat]:
    return {"r": Heartbeat(beat, "m", True, False, 0, 0, 8, 10, 0)}


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def control(broker: redis.Redis, engine: RecordingEngine) -> Iterator[Control]:
    control = Control(broker, "r", engine, heartbeats, SUPPORT)  # type: ignore[arg-type]
    yield control
    control.close()


def beat_of(broker: redis.Redis) -> int:
    payload = broker.hget(REPLICAS_KEY, "r")
    return decode_heartbeat(payload).beat if payload else 0


def test_heartbeats_are_sent_until_the_end(broker: redis.Redis, engine: RecordingEngine) -> None:
    control = Control(broker, "r", engine, heartbeats, SUPPORT)  # type: ignore[arg-type]
    eventually(lambda: beat_of(broker))
    first = beat_of(broker)
    eventually(lambda: beat_of(broker) > first)
    control.close()
    assert not broker.hexists(REPLICAS_KEY, "r")


def test_a_process_without_replicas_sends_what_it_can_compute_with(
    broker: redis.Redis, engine: RecordingEngine
) -> None:
    control = Control(broker, "m-0.1f", engine, lambda _: {}, SUPPORT)
    eventually(lambda: broker.exists(beat_key("m-0.1f")))
    payload = broker.hget(SUPPORT_KEY, "m-0.1f")
    assert decode_worker_support(payload) == SUPPORT  # type: ignore[arg-type]
    control.close()
    assert not broker.exists(SUPPORT_KEY, beat_key("m-0.1f"))


def test_a_blocked_heartbeat_does_not_delay_the_end(
    broker: redis.Redis, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.worker.control.CLOSING_SECONDS", 0.2)
    is_called, is_released = threading.Event(), threading.Event()

    def block(_: int) -> dict[str, Heartbeat]:
        is_called.set()
        is_released.wait(60)
        return {}

    control = Control(broker, "m-0.1f", engine, block, SUPPORT)
    assert is_called.wait(60)
    began = time.monotonic()
    control.close()
    assert time.monotonic() - began < 30
    is_released.set()
    for thread in control._threads:
        thread.join(60)


@pytest.mark.usefixtures("control")
def test_a_cancel_applies_to_its_execution_and_attempt(broker: redis.Redis, engine: RecordingEngine) -> None:
    wanted, other, newer = (
        ActiveJob(make_job("req_1"), 1),
        ActiveJob(make_job("req_2"), 1),
        ActiveJob(make_job("req_3"), 2),
    )
    for live in (wanted, other, newer):
        engine.submit(live)
    channel = control_channel("r")
    eventually(lambda: broker.publish(channel, encode(("req_3", 0, 1))))
    broker.publish(channel, b"\xc1 not msgpack")
    broker.publish(channel, encode(("req_1", 0, 1)))
    eventually(lambda: engine.cancelled)
    assert engine.cancelled == [(wanted, None)]


def test_a_cancel_that_precedes_its_execution_is_stored(broker: redis.Redis, control: Control) -> None:
    """The execution is claimed but not yet submitted to the engine."""
    early, other = ActiveJob(make_job("req_1"), 1), ActiveJob(make_job("req_1"), 2)
    eventually(lambda: broker.publish(control_channel("r"), encode(("req_1", 0, 1))))
    eventually(lambda: control.was_cancelled(early))
    assert not control.was_cancelled(other)


@pytest.mark.usefixtures("control")
def test_a_cancel_missed_during_an_outage_is_read_from_the_claim(
    broker: redis.Redis, engine: RecordingEngine, queued: Callable[..., str]
) -> None:
    eventually(lambda: broker.pubsub_numsub(control_channel("r"))[0][1])
    live, superseded, failed, running = (ActiveJob(make_job(f"req_{number}"), 1) for number in range(1, 5))
    broker.hset(queued(live.job), mapping={"state": "running", "cancel": 1})
    broker.hset(queued(superseded.job), mapping={"state": "queued", "attempt": 2})
    broker.hset(queued(failed.job), mapping={"state": "failed"})  # its replica was lost by silence
    broker.hset(queued(running.job), mapping={"state": "running"})
    for each in (live, superseded, failed, running):
        engine.submit(each)
    broker.client_kill_filter(_type="pubsub")
    eventually(lambda: len(engine.cancelled) == 3)
    assert [cancelled for cancelled, _ in engine.cancelled] == [live, superseded, failed]
    assert engine.executions == [running]


@pytest.mark.usefixtures("control")
def test_an_execution_past_its_deadline_is_ended(engine: RecordingEngine) -> None:
    late, on_time = ActiveJob(make_job("req_1", deadline=time.time() + 0.2), 1), ActiveJob(make_job("req_2"), 1)
    engine.submit(late)
    engine.submit(on_time)
    eventually(lambda: engine.cancelled)
    ((cancelled, failure),) = engine.cancelled
    assert cancelled is late
    assert failure is not None
    assert failure.code == "timeout"


def test_a_drained_worker_requeues_its_executions_and_a_cordoned_one_keeps_them(
    broker: redis.Redis, engine: RecordingEngine
) -> None:
    control = Control(broker, "m-0.1f", engine, heartbeats, SUPPORT)  # type: ignore[arg-type]
    engine.submit(ActiveJob(make_job("req_1"), 1))
    broker.hset(CORDONS_KEY, "m-0", "cordon")
    time.sleep(1.2)
    assert engine.executions
    broker.hset(CORDONS_KEY, "m-0", "drain")
    eventually(lambda: not engine.executions)
    assert not engine.cancelled
    control.close()


def test_records_are_written_before_the_heartbeats_that_name_them(broker: redis.Redis, engine: RecordingEngine) -> None:
    """Otherwise a gateway could read an older digest for the version of a heartbeat."""
    calls: list[str] = []

    def records() -> list[ReplicaRecord]:
        calls.append("records")
        return [ReplicaRecord("millrace:test:record", b"value", 60)]

    def beat_last(beat: int) -> dict[str, Heartbeat]:
        calls.append("heartbeats")
        return heartbeats(beat)

    control = Control(broker, "r", engine, beat_last, SUPPORT, records)
    eventually(lambda: beat_of(broker))
    control.close()
    assert calls[:2] == ["records", "heartbeats"]
    assert broker.get("millrace:test:record") == b"value"
    assert 0 < int(broker.ttl("millrace:test:record")) <= 60


def test_unsettled_usage_is_reported_and_remains_after_the_process(
    broker: redis.Redis, engine: RecordingEngine
) -> None:
    events = [make_usage(make_job("req_1")), make_usage(make_job("req_2"))]

    def unsettled() -> UnsettledUsage | None:
        return describe_unsettled(tuple(events), "m-0", "far", "m-0.1f")

    control = Control(broker, "m-0.1f", engine, heartbeats, SUPPORT, unsettled=unsettled, journal_id="journal")
    eventually(lambda: broker.hexists(UNSETTLED_KEY, "journal"))
    payload: Any = broker.hget(UNSETTLED_KEY, "journal")
    report = decode_unsettled(payload)
    assert (report.worker, report.host, report.process_id, report.executions) == ("m-0", "far", "m-0.1f", 2)
    assert (report.oldest.request_id, report.newest.request_id) == ("req_1", "req_2")
    events.clear()
    eventually(lambda: not broker.hexists(UNSETTLED_KEY, "journal"))
    events.append(make_usage(make_job("req_3")))
    eventually(lambda: broker.hexists(UNSETTLED_KEY, "journal"))
    control.close()
    assert broker.hexists(UNSETTLED_KEY, "journal")
