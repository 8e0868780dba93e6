"""The connection for the commands of many requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.contract import valkey
from inference_worker.contract.command_connection import CommandConnection


@pytest_asyncio.fixture
async def commands(broker: redis.Redis) -> AsyncIterator[CommandConnection]:
    client = valkey.connect_async(os.environ["MILLRACE_VALKEY_URL"], valkey.REQUEST_PATH)
    connection = CommandConnection(client)
    yield connection
    connection.close()
    await client.aclose()


async def count_clients(broker: redis.Redis) -> int:
    clients = await broker.client_list()
    return sum(client["name"] == "millrace-gateway" for client in clients)


async def test_concurrent_calls_share_a_connection_and_get_their_replies(
    commands: CommandConnection, broker: redis.Redis
) -> None:
    await asyncio.gather(*(commands.execute([("SET", f"k{n}", n), ("EXPIRE", f"k{n}", 60)]) for n in range(50)))
    replies = await asyncio.gather(*(commands.execute([("GET", f"k{n}"), ("STRLEN", f"k{n}")]) for n in range(50)))
    assert replies == [[b"%d" % n, len(str(n))] for n in range(50)]
    assert await count_clients(broker) == 1


async def test_a_failed_command_raises_and_the_others_run(commands: CommandConnection, broker: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError):
        await commands.execute([("SET", "a", "text"), ("INCR", "a"), ("SET", "b", b"2")])
    assert await broker.mget("a", "b") == [b"text", b"2"]
    assert await commands.execute([("GET", "b")]) == [b"2"]
    error, last = await commands.exchange([("INCR", "a"), ("GET", "b")])
    assert isinstance(error, redis.ResponseError)
    assert last == b"2"


async def test_a_command_that_cannot_be_sent_does_not_shift_the_replies_of_others(commands: CommandConnection) -> None:
    await commands.execute([("PING",)])
    with pytest.raises(TypeError):
        await commands.execute([("SET", "a", None)])  # type: ignore[list-item]
    assert await commands.execute([]) == []
    assert await commands.execute([("ECHO", "own")]) == [b"own"]


async def test_a_script_that_the_broker_has_forgotten_is_loaded(
    commands: CommandConnection, broker: redis.Redis
) -> None:
    script = broker.register_script("return {KEYS[1], ARGV[1]}")
    for _ in range(2):
        await broker.script_flush()
        assert await commands.run(script, ["key"], [7]) == [b"key", b"7"]
    failing = broker.register_script("return redis.call('INCR', KEYS[1], 'x')")
    with pytest.raises(redis.ResponseError):
        await commands.run(failing, ["key"], [])


async def test_a_cancelled_call_runs_and_its_reply_is_dropped(commands: CommandConnection, broker: redis.Redis) -> None:
    await commands.execute([("PING",)])
    cancelled = asyncio.create_task(commands.execute([("SET", "a", "1")]))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await commands.execute([("GET", "a")]) == [b"1"]
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_the_result_of_a_cancelled_script_is_passed_on(commands: CommandConnection, broker: redis.Redis) -> None:
    script, late = broker.register_script("return ARGV[1]"), list[bytes]()
    assert await commands.run(script, [], ["first"], late.append) == b"first"
    call = asyncio.create_task(commands.run(script, [], ["second"], late.append))
    await asyncio.sleep(0)
    call.cancel()
    await commands.execute([("PING",)])
    assert late == [b"second"]


async def test_a_lost_connection_is_reported_and_opened_again(commands: CommandConnection, broker: redis.Redis) -> None:
    await commands.execute([("PING",)])
    waiting = asyncio.create_task(commands.execute([("BLPOP", "empty", 0)]))
    await asyncio.sleep(0)
    await broker.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(redis.ConnectionError):
        await waiting
    assert await commands.execute([("PING",)]) == [b"PONG"]


async def test_an_overdue_reply_is_a_timeout(commands: CommandConnection) -> None:
    await commands.execute([("PING",)])
    with pytest.raises(redis.TimeoutError):
        await asyncio.gather(*(commands.execute([("BLPOP", "empty", 0)]) for _ in range(2)))
    assert await commands.execute([("PING",)]) == [b"PONG"]


async def test_an_unreachable_broker_is_reported() -> None:
    commands = CommandConnection(valkey.connect_async("redis://127.0.0.1:1/0", valkey.REQUEST_PATH))
    results = await asyncio.gather(*(commands.execute([("PING",)]) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, redis.ConnectionError) for result in results)
