"""Wakeups as a Celery worker reads them, equal to messages of `apply_async`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Exchange, Queue

from inference_worker.contract.messages import INFERENCE_KEY_PREFIX, replica_queue, replica_queue_key
from millrace.gateway.dispatch.wakeups import GENERATE, WAKEUPS_PER_TASK, WakeupBuilder

QUEUE = replica_queue("r1")


@pytest.fixture
def rung() -> Iterator[tuple[list[Any], threading.Event]]:
    """Return the messages received by a Celery worker with the worker's settings."""
    url = os.environ["MILLRACE_VALKEY_URL"]
    redis.Redis.from_url(url).flushdb()
    app = Celery("test", broker=url, set_as_current=False)
    app.conf.update(accept_content=["json"], task_acks_late=True, worker_prefetch_multiplier=1)
    app.conf.broker_transport_options = {"global_keyprefix": INFERENCE_KEY_PREFIX, "ack_emulation": False}
    app.conf.task_queues = [Queue(QUEUE, Exchange(QUEUE), routing_key=QUEUE)]
    calls: list[Any] = []
    enough = threading.Event()

    @app.task(name=GENERATE)
    def generate(wakeups: list[Any]) -> None:
        calls.append(wakeups)
        if sum(map(len, calls)) >= 20:
            enough.set()

    with start_worker(app, pool="threads", perform_ping_check=False, shutdown_timeout=20):
        yield calls, enough


def test_a_celery_worker_reads_wakeups(rung: tuple[list[Any], threading.Event]) -> None:
    calls, enough = rung
    maker = WakeupBuilder()
    wakeups = [(f"req_{n}", 0, 1) for n in range(20)]
    queue, messages = maker.make("r1", wakeups)
    assert queue == replica_queue_key("r1")
    assert len(messages) == 2
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        broker.lpush(queue, *messages)
        assert enough.wait(60)
        # The worker stores nothing about them, so none is delivered again.
        assert not broker.llen(queue)
        assert not broker.exists(f"{INFERENCE_KEY_PREFIX}unacked", f"{INFERENCE_KEY_PREFIX}unacked_index")
        assert all(key.startswith(b"millrace:") for key in broker.scan_iter())
    assert sorted(len(call) for call in calls) == [20 - WAKEUPS_PER_TASK, WAKEUPS_PER_TASK]
    assert sorted(tuple(bell) for call in calls for bell in call) == sorted(wakeups)
