"""Wakeups as a Celery worker reads them, equal to messages of `apply_async`."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Exchange, Queue

from inference_worker.contract.messages import (
    INFERENCE_KEY_PREFIX,
    Wakeup,
    decode_wakeup,
    replica_queue,
    replica_queue_key,
    wakeup_sent_key,
    wakeups_key,
)
from millrace.gateway.dispatch import wakeups
from millrace.gateway.dispatch.wakeups import GENERATE, WakeupBuilder
from tests.support.waiting import eventually

QUEUE = replica_queue("r1")


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        broker.flushdb()
        yield broker


@pytest.fixture
def received(broker: redis.Redis) -> Iterator[queue.SimpleQueue[Any]]:
    """Return the wakeups of the tasks that a Celery worker with the worker's settings receives."""
    app = Celery("test", broker=os.environ["MILLRACE_VALKEY_URL"], set_as_current=False)
    app.conf.update(accept_content=["json"], task_acks_late=True, worker_prefetch_multiplier=1)
    app.conf.broker_transport_options = {"global_keyprefix": INFERENCE_KEY_PREFIX, "ack_emulation": False}
    app.conf.task_queues = [Queue(QUEUE, Exchange(QUEUE), routing_key=QUEUE)]
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @app.task(name=GENERATE)
    def generate(wakeups: Any, replica_id: str) -> None:
        assert replica_id == "r1"
        tasks.put([tuple(wakeup) for wakeup in wakeups])

    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        yield tasks


def named(broker: redis.Redis) -> list[Wakeup]:
    return [decode_wakeup(wakeup) for wakeup in broker.lrange(wakeups_key("r1"), 0, -1)]


def test_a_celery_worker_receives_one_task_for_all_wakeups(
    broker: redis.Redis, received: queue.SimpleQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "TASK_LOST_MS", 60_000)  # the machine may be slow
    maker = WakeupBuilder()
    sent = [(f"req_{n}", 0, 1) for n in range(20)]
    for start in range(0, 20, 5):
        broker.execute_command(*maker.make("r1", sent[start : start + 5]))
    assert received.get(timeout=60) == sent[:5]
    assert named(broker) == sent[5:]
    assert 0 < broker.pttl(wakeups_key("r1")) <= 60_000
    # The worker stores nothing about the task, so it is not delivered again.
    assert not broker.llen(replica_queue_key("r1"))
    assert not broker.exists(f"{INFERENCE_KEY_PREFIX}unacked", f"{INFERENCE_KEY_PREFIX}unacked_index")
    assert all(key.startswith(b"millrace:") for key in broker.scan_iter())
    broker.delete(wakeup_sent_key("r1"))  # as the worker does when it takes the wakeups
    broker.execute_command(*maker.make("r1", sent[:1]))
    assert received.get(timeout=60) == sent[:1]
    assert received.empty()


def test_a_lost_task_is_sent_again(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "TASK_LOST_MS", 50)
    maker = WakeupBuilder()
    broker.execute_command(*maker.make("r1", [("req_1", 0, 1)]))
    assert broker.lpop(replica_queue_key("r1"))  # lost with a connection
    eventually(lambda: not broker.exists(wakeup_sent_key("r1")))
    broker.execute_command(*maker.make("r1", [("req_2", 0, 1)]))
    assert broker.llen(replica_queue_key("r1")) == 1
