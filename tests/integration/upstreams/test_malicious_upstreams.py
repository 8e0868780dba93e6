"""Upstreams that send too much, too slowly or to nowhere: each request ends in time, with bounded memory."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inference_worker.contract import ip_addresses
from inference_worker.contract.request import RequestError
from inference_worker.worker.relay import relay, sse
from inference_worker.worker.relay.connections import ConnectionPool, Origin
from inference_worker.worker.relay.failures import UpstreamFailed
from tests.support.upstreams.protocol_server import Answer, ProtocolServer
from tests.support.upstreams.relay_harness import ANTHROPIC, OPENAI, SECRET, Harness

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Script = Callable[[], AsyncIterator[bytes]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode() + b"\n\n"


PAUSE_BYTES, PAUSE_SECONDS = 2**18, 0.04


class RawServer:
    """A server that answers each request with the bytes of a script, and counts what it sent.

    It sends a few megabytes per second. Otherwise the buffers of the connection, which can have 32 MiB, would be filled
    while a busy machine lets the relay wait.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.sent = 0
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            paused_at = 0
            async for data in self._script():
                writer.write(data)
                await writer.drain()
                self.sent += len(data)
                if self.sent - paused_at >= PAUSE_BYTES:
                    paused_at = self.sent
                    await asyncio.sleep(PAUSE_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
def attack() -> Iterator[Callable[..., tuple[RawServer, Harness]]]:
    """Return a function that starts a server and a relay to it."""
    started: list[Any] = []

    def start(script: Script, engine: Any = OPENAI, **fields: Any) -> tuple[RawServer, Harness]:
        server = RawServer(script)
        harness = Harness(server, engine, **fields)  # type: ignore[arg-type]
        started.extend((harness.relay, server))
        return server, harness

    yield start
    for each in started:
        each.close()


async def endless_text() -> AsyncIterator[bytes]:
    yield CHUNKED
    part = chunk(delta(content="x" * 60_000))
    while True:
        yield part


async def endless_signatures() -> AsyncIterator[bytes]:
    yield CHUNKED
    fields = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "signature_delta", "signature": "x" * 60_000},
    }
    part = chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")
    while True:
        yield part


async def endless_calls() -> AsyncIterator[bytes]:
    yield CHUNKED
    number = 0
    while True:
        number += 1
        block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        fields = {"type": "content_block_start", "index": number, "content_block": block}
        yield chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


async def giant_line() -> AsyncIterator[bytes]:
    yield CHUNKED
    yield chunk(b"data: ")
    while True:
        yield chunk(b"x" * 60_000)


async def giant_header() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"x-y: " + b"x" * 8000 + b"\r\n"


async def endless_interim_responses() -> AsyncIterator[bytes]:
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100


@pytest.mark.parametrize(
    ("script", "engine", "most"),
    [
        (endless_text, OPENAI, 16 * 2**20),
        (endless_signatures, ANTHROPIC, 16 * 2**20),
        (endless_calls, ANTHROPIC, 16 * 2**20),
        (giant_line, OPENAI, 16 * 2**20),
        (giant_header, OPENAI, 16 * 2**20),
        (endless_interim_responses, OPENAI, 16 * 2**20),
    ],
)
def test_endless_responses_are_cut(
    attack: Callable[..., tuple[RawServer, Harness]], script: Script, engine: Any, most: int
) -> None:
    server, harness = attack(script, engine)
    error = harness.run(seconds=30)[-1]
    assert isinstance(error, RequestError)
    assert error.code == "upstream_error"
    assert error.usage.prompt + error.usage.output < 2**20
    assert server.sent < most


async def bomb() -> AsyncIterator[bytes]:
    body = gzip.compress(b"data: " + b"x" * (64 * 2**20))
    yield b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def error_bomb() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 400 No\r\ntransfer-encoding: chunked\r\n\r\n"
    while True:
        yield chunk(b'{"error": {"message": "' + b"x" * 8000)


async def redirect() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 307 Moved\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("script", [bomb, error_bomb, redirect])
def test_bombs_and_redirects_are_errors(attack: Callable[..., tuple[RawServer, Harness]], script: Script) -> None:
    server, harness = attack(script)
    (error,) = harness.run(seconds=30)
    assert isinstance(error, RequestError)
    assert (error.code, server.connections) == ("upstream_error", 1)
    assert server.sent < 16 * 2**20


async def slow_drip() -> AsyncIterator[bytes]:
    yield CHUNKED
    yield chunk(delta(content="one"))
    while True:
        yield chunk(b":")
        await asyncio.sleep(0.01)


async def slow_header() -> AsyncIterator[bytes]:
    for byte in b"HTTP/1.1 200 OK\r\nx-header: " + b"x" * 10_000:
        yield bytes([byte])
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("script", [slow_drip, slow_header])
def test_a_slow_drip_ends_at_the_deadline(attack: Callable[..., tuple[RawServer, Harness]], script: Script) -> None:
    _, harness = attack(script)
    began = time.monotonic()
    error = harness.run(seconds=0.5)[-1]
    assert isinstance(error, RequestError)
    assert error.code == "timeout"
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("frozen_heap")
def test_a_long_line_in_small_parts_takes_linear_time() -> None:
    def seconds(parts: int) -> float:
        parser, began = sse.EventParser(), time.process_time()
        for _ in range(parts):
            parser.feed(b"x" * 16)
        return time.process_time() - began

    seconds(1000)
    assert seconds(200_000) < 200 * max(seconds(10_000), 0.001)  # quadratic: 400 times


def test_an_upstream_that_names_no_wait_is_not_flooded(attack: Callable[..., tuple[RawServer, Harness]]) -> None:
    async def busy() -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 429 Busy\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n{}"

    server, harness = attack(busy)
    (error,) = harness.run(seconds=1)
    assert isinstance(error, RequestError)
    assert error.code == "server_is_overloaded"
    assert 2 <= server.connections < 10


def test_vectors_are_no_larger_than_their_dimensions(attack: Callable[..., tuple[RawServer, Harness]]) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield CHUNKED
        while True:
            yield chunk(b'{"data": [' + b" " * 60_000)

    server, harness = attack(endless, task="embed", dimensions=3)
    (error,) = harness.run(operation="embeddings")
    assert isinstance(error, RequestError)
    assert (error.code, server.sent < 16 * 2**20) == ("upstream_error", True)


def test_a_rejection_that_quotes_the_secret_or_the_prompt_is_neither_passed_on_nor_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ProtocolServer()
    harness = Harness(server, OPENAI)
    message = f"Invalid key {SECRET} for the prompt 'my diagnosis'"
    server.answers.append(Answer(status=400, error={"message": message, "code": SECRET, "param": SECRET}))
    (error,) = harness.run()
    harness.relay.close()
    server.close()
    assert isinstance(error, RequestError)
    assert "my diagnosis" in error.message  # for the tenant, who sent it
    printed = capfd.readouterr()
    logs = caplog.text + printed.out + printed.err
    assert "upstream_failed" in logs
    assert SECRET not in repr((error.code, error.message, error.param, logs))
    assert "my diagnosis" not in logs


def test_a_name_server_that_changes_its_answer_leads_to_no_internal_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        ["93.184.216.34"],
        ["93.184.216.34", "10.0.0.1"],
        ["127.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
    ]

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in answers.pop(0)]

    resolver = SimpleNamespace(SOCK_STREAM=socket.SOCK_STREAM, getaddrinfo=getaddrinfo)
    monkeypatch.setattr(ip_addresses, "socket", resolver)

    async def main() -> list[object]:
        pool = ConnectionPool(Origin("https://rebinds.example.com/v1", allow_internal=False))
        found: list[object] = [await pool._resolve()]
        while answers:
            try:
                found.append(await pool._resolve())
            except UpstreamFailed as exc:
                found.append(exc.code)
        return found

    assert asyncio.run(main()) == [["93.184.216.34"], *["upstream_error"] * 4]


@pytest.mark.parametrize(
    "url",
    [
        "https://host/v1\r\nx-evil: 1",
        "https://host/v1 HTTP/1.1\r\nhost: other",
        "https://user@host/v1",
        "https://host/v1#x",
        "https://host/v1?x=1",
        "https://hôst/v1",
        "https://host:99999/v1",
        "gopher://host/v1",
        "https:///v1",
    ],
)
def test_base_urls_that_could_change_a_request_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        Origin(url, allow_internal=True)


def test_a_models_name_is_only_in_the_body() -> None:
    server = ProtocolServer()
    harness = Harness(server, OPENAI)
    name = 'm"}\r\nx-evil: 1\r\n\r\nGET / HTTP/1.1'
    harness.relay._encoder._upstream = relay.UpstreamSpec(OPENAI, server.url, name, "openai", 7)
    harness.run()
    harness.relay.close()
    server.close()
    (received,) = server.received
    assert received.body["model"] == name
    assert "x-evil" not in received.headers
