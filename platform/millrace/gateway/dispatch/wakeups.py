"""The Celery tasks that tell a replica of its executions, as messages to be pushed with whatever else goes to the
broker.

Celery's own `apply_async` blocks the event loop for 0.4 ms and takes a connection and a round trip of its own. So
Celery makes the message once, and what differs from one to the next is filled in here: the ids and the arguments. How a
message stands in a Redis list is the business of kombu's virtual transport, and stable for as long as workers of two
releases can share a queue; a test has a real Celery worker read one.
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
    """Writes wakeups. A task that names several executions keeps a worker's thread until the last of them has ended;
    there are never more such threads than executions, and a replica is sent no more executions than it has credits."""

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
        """Return the key of the queue, and messages for it that name all the executions."""
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
