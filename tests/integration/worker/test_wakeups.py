"""The executions in a replica's list, for which a task waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import redis

from inference_worker.contract import valkey
from inference_worker.contract.messages import encode, wakeups_key
from inference_worker.worker import wakeups
from inference_worker.worker.thread_commands import ThreadCommands
from inference_worker.worker.wakeups import wait_for_wakeup
from tests.support.waiting import eventually

LIST = wakeups_key("r1")


@pytest.fixture
def commands(broker: redis.Redis) -> Iterator[ThreadCommands]:
    with valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.WORKER) as client:
        connection = ThreadCommands(client)
        yield connection
        connection.close()


def test_a_wait_returns_the_first_execution(commands: ThreadCommands, broker: redis.Redis) -> None:
    assert wait_for_wakeup(commands, "r1") == []
    broker.rpush(LIST, encode(("req_1", 0, 1)), encode(("req_2", 0, 1)))
    assert wait_for_wakeup(commands, "r1") == [("req_1", 0, 1)]
    assert broker.lrange(LIST, 0, -1) == [encode(("req_2", 0, 1))]


def test_a_wait_ends_when_an_execution_is_sent(
    commands: ThreadCommands, broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "NEXT_WAKEUP_SECONDS", 2)
    received: list[object] = []

    def wait() -> None:
        while not received:
            received.extend(wait_for_wakeup(commands, "r1"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        eventually(lambda: any(client["cmd"] == "blpop" for client in broker.client_list()))
    finally:
        broker.rpush(LIST, encode(("req_1", 0, 1)))
        waiting.join()
    assert received == [("req_1", 0, 1)]


def test_a_wait_that_fails_ends(commands: ThreadCommands, broker: redis.Redis) -> None:
    broker.rpush(LIST, b"\xff")
    assert wait_for_wakeup(commands, "r1") == []
    broker.set(LIST, "not a list")
    assert wait_for_wakeup(commands, "r1") == []
    with valkey.connect("redis://127.0.0.1:1/0", valkey.WORKER._replace(retries=0)) as client:
        assert wait_for_wakeup(ThreadCommands(client), "r1") == []
