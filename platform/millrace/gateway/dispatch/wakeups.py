"""Wakeups: executions that a replica may claim, and the Celery task that makes it claim them.

A task names executions. While it is on its way, or serves executions, no other task is sent, and further executions
are added to a list in Valkey, which the task reads. So a busy replica receives few tasks.

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
from pathlib import Path
from typing import Any

import msgspec
from celery import Celery

from inference_worker.contract.command_connection import Command
from inference_worker.contract.messages import (
    TASK_LOST_MS,
    Wakeup,
    encode,
    replica_queue,
    replica_queue_key,
    wakeup_sent_key,
    wakeups_key,
)
from inference_worker.contract.script_files import read_script

GENERATE = "millrace.generate"
_LIST_MS = 60_000  # a list that a lost replica leaves behind expires
_WAKE = read_script(Path(__file__).parent / "lua" / "wake.lua")
_encode_json = msgspec.json.Encoder().encode


class WakeupBuilder:
    """Builds the commands that send wakeups."""

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

    def make(self, replica_id: str, wakeups: Sequence[Wakeup]) -> Command:
        """Return the command that sends these wakeups to the replica."""
        keys = wakeups_key(replica_id), wakeup_sent_key(replica_id), replica_queue_key(replica_id)
        message = self._message(replica_id, wakeups)
        return "EVAL", _WAKE, len(keys), *keys, TASK_LOST_MS, _LIST_MS, message, *map(encode, wakeups)

    def _message(self, replica_id: str, wakeups: Sequence[Wakeup]) -> bytes:
        task = f"{self._name}-{next(self._numbers)}"
        body = _encode_json([[wakeups, replica_id], {}, self._embedded])
        return _encode_json(
            {
                "body": base64.b64encode(body).decode(),
                "content-encoding": "utf-8",
                "content-type": "application/json",
                "headers": {**self._headers, "id": task, "root_id": task},
                "properties": {
                    **self._properties,
                    "correlation_id": task,
                    "delivery_tag": task,
                    "delivery_info": {"exchange": "", "routing_key": replica_queue(replica_id)},
                },
            }
        )
