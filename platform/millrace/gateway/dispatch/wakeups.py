"""Wakeups: Celery tasks that name executions for a replica, as messages for the dispatcher's pipeline.

Celery's own `apply_async` blocks the event loop for 0.4 ms and needs a connection and a round trip. Therefore Celery
builds a message once, and only its IDs and arguments are filled in here. The format of a message in a Redis list is
defined by kombu's virtual transport. It is stable as long as workers of two releases can share a queue. A test lets a
real Celery worker read a message.
"""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from celery import Celery

from inference_worker.contract.messages import replica_queue, replica_queue_key

GENERATE = "millrace.generate"
WAKEUPS_PER_TASK = 16
Wakeup = tuple[str, int, int]  # request id, execution, attempt
_encode = msgspec.json.Encoder().encode


class WakeupBuilder:
    """Builds wakeup messages.

    A task that names several executions uses one thread of a worker until the last of them has ended. A worker has
    never more such threads than executions.
    """

    def __init__(self) -> None:
        app = Celery("gateway", set_as_current=False)
        message = app.amqp.as_task_v2("", GENERATE, args=(), kwargs={})
        self._headers: dict[str, Any] = {**message.headers, "argsrepr": "...", "kwargsrepr": "{}"}
        self._properties: dict[str, Any] = {
            **message.properties,
            "delivery_mode": 2,
            "priority": 0,
            "body_encoding": "base64",
        }
        self._embedded = message.body[2]
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    def make(self, replica_id: str, wakeups: Sequence[Wakeup]) -> tuple[str, list[bytes]]:
        """Return the key of the replica's queue, and messages that name all of the executions."""
        queue = replica_queue(replica_id)
        starts = range(0, len(wakeups), WAKEUPS_PER_TASK)
        messages = [self._message(queue, wakeups[start : start + WAKEUPS_PER_TASK]) for start in starts]
        return replica_queue_key(replica_id), messages

    def _message(self, queue: str, wakeups: Sequence[Wakeup]) -> bytes:
        task = f"{self._name}-{next(self._numbers)}"
        body = _encode([[wakeups], {}, self._embedded])
        return _encode(
            {
                "body": base64.b64encode(body).decode(),
                "content-encoding": "utf-8",
                "content-type": "application/json",
                "headers": {**self._headers, "id": task, "root_id": task},
                "properties": {
                    **self._properties,
                    "correlation_id": task,
                    "delivery_tag": task,
                    "delivery_info": {"exchange": "", "routing_key": queue},
                },
            }
        )
