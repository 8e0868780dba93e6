"""Connections to upstreams that break or send more than a response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from inference_worker.worker.relay import connections
from inference_worker.worker.relay.connections import ConnectionLost, ConnectionPool, Origin

REQUEST = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"


async def exchange(responses: Sequence[bytes]) -> list[bytes | bool | None]:
    """Send a request for each response over a pool. Return the bodies; of a lost connection, whether it is stale."""
    left = list(responses)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.CancelledError):
                break
            writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(Origin(f"http://127.0.0.1:{port}/v1", allow_internal=True))
    found: list[bytes | bool | None] = []
    for _ in responses:
        connection = await pool.take()
        try:
            await connection.send(REQUEST)
            found.append(b"".join([chunk async for chunk in connection.chunks()]))
            assert connection.headers.keys() <= {"content-length", "transfer-encoding"}
        except ConnectionLost as exc:
            found.append(exc.is_stale)
        pool.give_back(connection)
    pool.close()
    server.close()
    return found


def test_data_after_a_response_belongs_to_no_answer() -> None:
    smuggled = OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    assert asyncio.run(exchange([smuggled, OK, OK])) == [b"ab", b"ab", b"ab"]


def test_interim_responses_and_trailers_are_not_the_response() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nlink: y\r\n\r\n"
    assert asyncio.run(exchange([interim, chunked, OK])) == [b"ab", b"ab", b"ab"]


def test_a_request_that_the_server_had_for_long_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(exchange([OK, b""])) == [b"ab", True]
    monkeypatch.setattr(connections, "STALE_SECONDS", -1.0)
    assert asyncio.run(exchange([OK, b""])) == [b"ab", False]
