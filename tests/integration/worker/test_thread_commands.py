"""A worker's connection for the commands of one thread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from inference_worker.contract import valkey
from inference_worker.worker.thread_commands import CHUNK_BYTES, PING, ThreadCommands


@pytest.fixture
def commands(broker: redis.Redis) -> Iterator[ThreadCommands]:
    with valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.WORKER) as client:
        connection = ThreadCommands(client)
        yield connection
        connection.close()


def test_commands_are_answered_in_order_and_errors_are_among_the_replies(commands: ThreadCommands) -> None:
    first, error, last = commands.exchange([("SET", "a", b"text"), ("INCR", "a"), ("GET", "a")])
    assert (first, last) == (b"OK", b"text")
    assert isinstance(error, redis.ResponseError)
    (missing,) = commands.exchange([("EVALSHA", "0" * 40, 0)])
    assert isinstance(missing, redis.exceptions.NoScriptError)
    assert commands.exchange([]) == []


def test_commands_and_replies_may_be_sent_in_several_parts(commands: ThreadCommands) -> None:
    text = "x" * (3 * CHUNK_BYTES)
    commands.exchange([("SET", "long", text), ("RPUSH", "list", 1, 2.5, b"\xff")])
    assert commands.exchange([("GET", "long"), ("LRANGE", "list", 0, -1)]) == [text.encode(), [b"1", b"2.5", b"\xff"]]


def test_a_lost_connection_is_opened_again(commands: ThreadCommands, broker: redis.Redis) -> None:
    assert commands.exchange([("PING",)]) == [b"PONG"]
    broker.client_kill_filter(_type="normal", skipme=True)
    assert commands.exchange([("ECHO", "again")]) == [b"again"]


def test_an_idle_connection_that_was_dropped_is_replaced_before_its_next_commands(commands: ThreadCommands) -> None:
    assert commands.exchange([("PING",)]) == [b"PONG"]
    dropped, device = socket.socketpair()  # as if a network device took the packets and sent none
    dropped.settimeout(0.05)
    commands._connection._sock.close()
    commands._connection._sock = dropped
    commands._check_at = 0.0
    with device:
        assert commands.exchange([("INCR", "a")]) == [1]
        assert device.recv(CHUNK_BYTES) == PING
        assert device.recv(CHUNK_BYTES) == b""


@pytest.mark.parametrize(("interval", "checks"), [(10, [True, False, False]), (0, [False, False])])
def test_only_an_idle_connection_is_checked(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch, interval: int, checks: list[bool]
) -> None:
    sent: list[bytes] = []
    options = valkey.WORKER._replace(health_check_interval=interval)
    with valkey.connect(os.environ["MILLRACE_VALKEY_URL"], options) as client:
        commands = ThreadCommands(client)
        send = commands._send

        def record(packed: bytes, count: int) -> list[Any]:
            sent.append(packed)
            return send(packed, count)

        monkeypatch.setattr(commands, "_send", record)
        for _ in range(2):
            commands.exchange([("INCR", "a")])
        assert len(sent) == 2 and PING not in sent
        commands._check_at = 0.0
        for _ in range(2):
            commands.exchange([("INCR", "a")])
        commands.close()
    assert [packed == PING for packed in sent[2:]] == checks
    assert broker.get("a") == b"4"


def test_an_overdue_reply_is_not_that_of_the_next_call(commands: ThreadCommands) -> None:
    assert commands.exchange([("PING",)]) == [b"PONG"]
    commands._connection._sock.settimeout(0.05)  # the next connection has the usual timeout
    with pytest.raises(redis.TimeoutError):
        commands.exchange([("BLPOP", "empty", 1)])
    assert commands.exchange([("ECHO", "own")]) == [b"own"]


def test_an_interrupted_handshake_leaves_no_connection(
    commands: ThreadCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # as the end of the process, in the main thread

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(commands._connection, "read_response", interrupt)
        commands.exchange([("PING",)])
    assert commands.exchange([("ECHO", "own")]) == [b"own"]


def test_a_command_that_cannot_be_sent_does_not_shift_the_replies(commands: ThreadCommands) -> None:
    with pytest.raises(TypeError):
        commands.exchange([("PING",), ("SET", "a", None)])
    assert commands.exchange([("ECHO", "own")]) == [b"own"]


def test_an_unreachable_broker_is_reported() -> None:
    with valkey.connect("redis://127.0.0.1:1/0", valkey.WORKER._replace(retries=0)) as client:
        commands = ThreadCommands(client)
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                commands.exchange([("PING",)])
