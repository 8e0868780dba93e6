"""Timeouts and limits below ASGI, over sockets to a uvicorn server."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

import pytest
import websockets
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket_connect

from millrace.gateway.connections import guard, mark_authenticated
from millrace.gateway.connections.guard import READ_BYTES
from tests.support.gateway.live_server import Served, read_all, read_response, serving
from tests.support.waiting import eventually

LARGE_BYTES = 2**26
GET = b"GET /hello HTTP/1.1\r\nhost: test\r\n\r\n"


def post(path: str, size: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {size}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


class Application:
    """An ASGI application that responds by path and counts what it receives."""

    def __init__(self) -> None:
        self.received = 0
        self.held = self.peak_held = 0  # of active requests
        self.disconnects = 0
        self.sent = 0
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            return await self.socket(scope, receive, send)
        if scope["path"] == "/authenticated":
            mark_authenticated(scope)
        size = 0
        if scope["path"] not in ("/hello", "/early"):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.disconnects += 1
                    self.held -= size
                    return None
                size += len(message["body"])
                self.received += len(message["body"])
                self.held += len(message["body"])
                self.peak_held = max(self.peak_held, self.held)
                more = message["more_body"]
        self.held -= size
        body = f"{scope['method']} {scope['path']} {size}".encode()
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while self.sent < LARGE_BYTES:
                await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
                self.sent += 2**14
            return await send({"type": "http.response.body", "body": b""})
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnects += 1
            return None
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/early":
            return await self.discard(receive, send)
        await send({"type": "http.response.body", "body": body})
        return None

    async def discard(self, receive: Any, send: Any) -> None:
        """Send a response as the gateway's rejections are sent: before the body, which is dropped."""
        await send({"type": "http.response.body", "body": b"POST /early 0", "more_body": True})
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            self.received += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b""})

    async def socket(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            text = message["text"]
            self.received += len(text)
            if text == "key":
                mark_authenticated(scope)
            await send({"type": "websocket.send", "text": str(len(text))})
        self.disconnects += 1


@pytest.fixture
def application() -> Application:
    return Application()


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def error(response: bytes) -> str:
    return str(json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"])


def rejections(served: Served) -> dict[str, int]:
    return dict(served.guard.rejections)


# Headers.


def test_a_header_of_30_mb_is_rejected_and_not_buffered(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        sent = 0
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /hello HTTP/1.1\r\nhost: test\r\nx-large: ")
            while sent < 30_000_000 and not served.guard.rejections:
                client.sendall(b"x" * 10_000)
                sent += 10_000
        response = read_all(client)
        assert (status(response), error(response)) == (431, "headers_too_large")
        assert b"connection: close" in response
        assert served.guard.peak_buffered_bytes <= served.guard.limits.header_bytes + READ_BYTES
        assert served.guard.buffered_bytes == 0
        assert rejections(served) == {guard.HEADER_SIZE: 1}
        assert application.scopes == []


@pytest.mark.parametrize(
    ("request_head", "expected"),
    [
        (b"GET /hello HTTP/1.1\r\nx: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /hello HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /" + b"x" * 9000, 414),
        (b"GET /hello HTTP/1.1\r\n" + b"x: y\r\n" * 200, 431),
        (b"\r\n" * 20_000, 431),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_heads_that_are_too_large_are_rejected(application: Application, request_head: bytes, expected: int) -> None:
    with serving(application) as served:
        assert status(served.exchange(request_head)) == expected
        assert application.scopes == []
        assert served.guard.buffered_bytes == 0


def test_a_pipelined_head_that_is_too_large_is_rejected(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        client.sendall(GET + b"GET /hello HTTP/1.1\r\nx: " + b"x" * 40_000)
        eventually(lambda: application.scopes)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"\r\n\r\n")
        read_all(client)
        assert rejections(served) == {guard.HEADER_SIZE: 1}
        assert len(application.scopes) == 1


def test_large_headers_within_the_limit_are_accepted(application: Application) -> None:
    with serving(application) as served:
        head = b"GET /hello HTTP/1.1\r\nconnection: close\r\n" + b"x: " + b"x" * 20_000 + b"\r\n" + b"y: z\r\n" * 90
        assert status(served.exchange(head + b"\r\n")) == 200


@pytest.mark.parametrize("dribble", [b"x", b"\r\n"])
def test_slow_headers_end_with_408(application: Application, dribble: bytes) -> None:
    with serving(application, header_seconds=1) as served, served.connect() as client:
        started = time.monotonic()
        client.settimeout(0.1)
        response = b""
        if dribble == b"x":
            client.sendall(b"GET /hello HTTP/1.1\r\nx: ")
        while not response and time.monotonic() - started < 20:
            client.sendall(dribble)
            with contextlib.suppress(TimeoutError):
                response = client.recv(2**16)
        assert (status(response), error(response)) == (408, "request_timeout")
        assert rejections(served) == {guard.HEADER_TIMEOUT: 1}


def test_a_connection_without_a_byte_is_closed(application: Application) -> None:
    with serving(application, header_seconds=1) as served, served.connect() as client:
        assert read_all(client) == b""
        assert rejections(served) == {guard.HEADER_TIMEOUT: 1}


def test_slow_headers_of_a_second_request_end_with_408(application: Application) -> None:
    with serving(application, header_seconds=1) as served, served.connect() as client:
        client.sendall(GET)
        assert status(read_response(client)) == 200
        client.sendall(b"GET /hel")
        assert status(read_all(client)) == 408


# Keep-alive and pipelining.


def test_an_idle_connection_is_closed(application: Application) -> None:
    with serving(application, keepalive_seconds=1) as served, served.connect() as client:
        for _ in range(2):
            client.sendall(GET)
            assert status(read_response(client)) == 200
        assert read_all(client) == b""
        assert rejections(served) == {}


def test_pipelined_requests_are_answered_in_order(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        bodies = [b"x" * size for size in (0, 5, 200_000, 3)]
        requests = b"".join(post(f"/echo{n}", len(body)) + body for n, body in enumerate(bodies))
        client.sendall(requests + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        answers = read_all(client)
        wanted = [b"POST /echo%d %d" % (n, len(body)) for n, body in enumerate(bodies)] + [b"GET /hello 0"]
        found = [answers.find(each) for each in wanted]
        assert -1 not in found, answers
        assert found == sorted(found)
        eventually(lambda: served.guard.buffered_bytes == 0)


def test_a_large_body_that_starts_in_the_previous_requests_data_is_read(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        requests = [post("/echo", size) + b"x" * size for size in (1000, 200_000, 150_000)]
        client.sendall(requests[0][:-1])
        eventually(lambda: application.received == 999)
        client.sendall(requests[0][-1:] + b"".join(requests[1:]))
        for size in (1000, 200_000, 150_000):
            assert read_response(client).endswith(b"POST /echo %d" % size)
        assert rejections(served) == {}


def test_a_connection_that_ends_disconnects_the_request_before_a_pipelined_one(application: Application) -> None:
    with serving(application) as served:
        with served.connect() as client:
            client.sendall(post("/endless", 1) + b"x" + post("/echo", 9) + b"x")
            eventually(lambda: application.received == 1)
            assert status(client.recv(2**16)) == 200
        eventually(lambda: served.guard.connections == 0 and application.disconnects == 1)
        assert [scope["path"] for scope in application.scopes] == ["/endless"]


def test_a_flood_of_pipelined_requests_closes_the_connection(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(post("/echo", 1) + b"x" + b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        read_all(client)
        assert rejections(served) == {guard.PIPELINING: 1}
        assert len(application.scopes) <= 33
        eventually(lambda: served.guard.connections == 0)


def test_an_empty_line_after_a_body_does_not_end_a_long_response(application: Application) -> None:
    with serving(application, header_seconds=1) as served, served.connect() as client:
        client.sendall(post("/endless", 1) + b"x")
        eventually(lambda: application.received)
        client.sendall(b"\r\n")
        client.settimeout(3)
        head = client.recv(2**16)
        assert status(head) == 200
        with pytest.raises(TimeoutError):
            client.recv(2**16)  # no data and no end
        assert rejections(served) == {}


def test_a_response_is_paused_when_its_client_does_not_read(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        client.sendall(b"GET /large HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        client.recv(1)
        sent = -1
        while sent != application.sent:  # until it waits
            sent = application.sent
            time.sleep(0.2)
        assert sent < LARGE_BYTES / 2
        while client.recv(2**20):
            pass
        assert application.sent == LARGE_BYTES


def test_a_response_is_written_before_a_half_closed_connection_is_closed(application: Application) -> None:
    with serving(application) as served:
        for _ in range(20):
            with served.connect() as client:
                client.sendall(GET)
                client.shutdown(socket.SHUT_WR)
                assert read_all(client).endswith(b"GET /hello 0")


# Bodies.


def test_a_slow_body_ends_with_408(application: Application) -> None:
    with serving(application, body_seconds=1, body_bytes_per_second=1000) as served, served.connect() as client:
        started = time.monotonic()
        client.settimeout(0.1)
        client.sendall(post("/authenticated", 10_000))
        response = b""
        while not response and time.monotonic() - started < 20:
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                response = client.recv(2**16)
        assert (status(response), error(response)) == (408, "request_timeout")
        assert rejections(served) == {guard.BODY_TIMEOUT: 1}
        eventually(lambda: application.disconnects == 1)


def test_a_body_at_the_minimum_rate_is_accepted(application: Application) -> None:
    with serving(application, body_seconds=1, body_bytes_per_second=1000) as served, served.connect() as client:
        client.sendall(post("/echo", 8000))
        for _ in range(8):
            client.sendall(b"x" * 1000)
            time.sleep(0.25)
        assert read_response(client).endswith(b"POST /echo 8000")


def test_a_body_that_the_application_does_not_read_is_not_slow(application: Application) -> None:
    taken = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        mark_authenticated(scope)
        await asyncio.sleep(3)
        taken.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with serving(late, body_seconds=1) as served, served.connect() as client:
        client.sendall(post("/", 4_000_000) + b"x" * 100_000)  # more than the server buffers
        assert status(read_response(client)) == 200
        assert rejections(served) == {}


def test_a_body_without_a_key_is_limited(application: Application) -> None:
    with serving(application, body_bytes=300_000) as served:
        response = served.exchange(post("/echo", 2_000_000) + b"x" * 2_000_000)
        assert (status(response), error(response)) == (413, "request_too_large")
        assert application.received <= 300_000 + 3 * READ_BYTES
        with served.connect() as client:
            client.sendall(post("/authenticated", 2_000_000) + b"x" * 2_000_000)
            assert read_response(client).endswith(b"POST /authenticated 2000000")


@pytest.mark.parametrize(
    "junk", [b"1;" + b"x" * 400_000, b"0\r\nx: " + b"x" * 400_000, b"0\r\n" + b"x: y\r\n" * 60_000]
)
def test_chunk_extensions_and_trailers_are_limited(application: Application, junk: bytes) -> None:
    head = b"POST /authenticated HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    with serving(application) as served, served.connect() as client:
        client.sendall(head + b"1\r\nx\r\n")
        eventually(lambda: application.received)
        with contextlib.suppress(ConnectionError):
            client.sendall(junk)
        assert status(read_all(client)) == 400
        assert rejections(served) == {guard.BODY_SIZE: 1}


def test_trailers_are_not_headers(application: Application) -> None:
    head = b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
    with serving(application) as served, served.connect() as client:
        client.sendall(head)
        eventually(lambda: application.received)
        client.sendall(b"0\r\nx-forwarded-proto: https\r\n\r\n")
        assert status(read_response(client)) == 200
        assert [name for name, _ in application.scopes[0]["headers"]] == [b"transfer-encoding"]


def test_the_rest_of_a_rejected_body_is_dropped_and_the_connection_kept(application: Application) -> None:
    with serving(application, body_bytes=1_000_000) as served, served.connect() as client:
        client.sendall(post("/hello", 3_000_000))
        assert status(read_response(client)) == 200
        client.sendall(b"x" * 3_000_000 + GET)
        assert status(read_response(client)) == 200
        assert rejections(served) == {}
        assert served.guard.buffered_bytes == 0


def test_a_rejected_body_larger_than_the_limits_does_not_reset_the_connection(application: Application) -> None:
    """The application discards it, so neither the maximum body size nor the limit of unauthenticated bytes applies."""
    limits = {"body_bytes": 300_000, "unauthenticated_bytes": 1_000_000}
    with serving(application, **limits) as served, served.connect() as client:
        client.sendall(post("/early", 6_000_000))
        response = read_response(client)
        assert status(response) == 200
        for _ in range(60):
            client.sendall(b"x" * 100_000)
        client.sendall(GET)
        assert read_response(client).endswith(b"GET /hello 0")
        assert application.received == 6_000_000
        assert rejections(served) == {}
        eventually(lambda: served.guard.buffered_bytes == 0)


@pytest.mark.parametrize("path", ["/hello", "/echo"])
def test_a_client_that_requests_a_close_gets_the_response_first(application: Application, path: str) -> None:
    with serving(application, body_bytes=4_000_000) as served, served.connect() as client:
        client.sendall(post(path, 3_000_000, "connection: close"))
        if path == "/hello":
            eventually(lambda: application.scopes)
            time.sleep(0.2)
        client.sendall(b"x" * 3_000_000)
        response = read_all(client)
        assert status(response) == 200
        assert rejections(served) == {}


# Unauthenticated bytes.


def test_bodies_without_a_key_buffer_at_most_the_shared_limit(application: Application) -> None:
    bound = 4 * 2**20
    with (
        serving(application, unauthenticated_bytes=bound, body_bytes=8 * 2**20) as served,
        contextlib.ExitStack() as open_,
    ):
        clients = [open_.enter_context(served.connect(f"127.0.0.{1 + n % 8}")) for n in range(40)]
        for client in clients:
            client.setblocking(False)
            client.sendall(post("/echo", 8 * 2**20))
        sent = [0] * len(clients)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for n, client in enumerate(clients):
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent[n] += client.send(b"x" * min(2**16, 8 * 2**20 - sent[n]))
        assert served.guard.peak_buffered_bytes <= bound + READ_BYTES
        assert application.peak_held <= bound + len(clients) * READ_BYTES
        # Small requests are accepted meanwhile, also from the same addresses.
        small = b"x" * 1000
        with served.connect() as client:
            client.sendall(post("/echo", len(small)) + small)
            assert read_response(client).endswith(b"POST /echo 1000")
    eventually(lambda: served.guard.buffered_bytes == 0)


def test_bodies_that_waited_for_memory_are_read_eventually(application: Application) -> None:
    size = 2**20
    with serving(application, unauthenticated_bytes=3 * size) as served, contextlib.ExitStack() as open_:
        clients = [open_.enter_context(served.connect(f"127.0.0.{1 + n}")) for n in range(6)]
        for client in clients:
            client.setblocking(False)
            client.sendall(post("/echo", size))
        sent = [0] * len(clients)
        while any(each < size for each in sent):
            for n, client in enumerate(clients):
                with contextlib.suppress(BlockingIOError):
                    sent[n] += client.send(b"x" * min(2**14, size - sent[n]))
            time.sleep(0.001)
        for client in clients:
            client.settimeout(20)
            assert status(read_response(client)) == 200
        assert served.guard.buffered_bytes == 0


def test_one_address_cannot_use_the_whole_limit(application: Application) -> None:
    bound = 2**20
    with (
        serving(application, unauthenticated_bytes=bound, header_bytes=2**18) as served,
        contextlib.ExitStack() as open_,
    ):
        responses = []
        for _ in range(8):  # headers that never end
            client = open_.enter_context(served.connect("127.0.0.2"))
            client.sendall(b"GET / HTTP/1.1\r\nx: " + b"x" * 200_000)
            responses.append(client)
        eventually(lambda: served.guard.rejections[guard.ADDRESS_BYTES])
        assert served.guard.buffered_bytes <= bound // 2 + READ_BYTES
        assert status(served.exchange(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))) == 200


# Connections.


def test_an_address_has_a_limit_of_connections(application: Application) -> None:
    with serving(application, connections_per_address=3) as served, contextlib.ExitStack() as open_:
        clients = [open_.enter_context(served.connect()) for _ in range(3)]
        for client in clients:
            client.sendall(GET)
            assert status(read_response(client)) == 200
        response = served.exchange(GET)
        assert (status(response), error(response)) == (429, "too_many_connections")
        assert b"retry-after: 1\r\n" in response
        with served.connect("127.0.0.2") as other:
            other.sendall(GET)
            assert status(read_response(other)) == 200
        clients[0].close()
        eventually(lambda: served.guard.connections == 2)
        with served.connect() as again:
            again.sendall(GET)
            assert status(read_response(again)) == 200
        assert rejections(served) == {guard.ADDRESS_CONNECTIONS: 1}


def test_a_trusted_proxy_has_no_limit_per_address(application: Application) -> None:
    limits: dict[str, Any] = {"connections_per_address": 1, "trusted_proxies": "10.0.0.0/8, 127.0.0.2"}
    with serving(application, **limits) as served, contextlib.ExitStack() as open_:
        for _ in range(5):
            client = open_.enter_context(served.connect("127.0.0.2"))
            client.sendall(GET)
            assert status(read_response(client)) == 200


def test_the_number_of_all_connections_is_limited(application: Application) -> None:
    with serving(application, connections=2) as served, contextlib.ExitStack() as open_:
        for source in ("127.0.0.1", "127.0.0.2"):
            client = open_.enter_context(served.connect(source))
            client.sendall(GET)
            assert status(read_response(client)) == 200
        with served.connect("127.0.0.3") as third:
            response = read_all(third)
        assert status(response) == 503
        assert rejections(served) == {guard.ALL_CONNECTIONS: 1}


# WebSockets.


def connect(served: Served, **options: Any) -> ClientConnection:
    return websocket_connect(f"ws://127.0.0.1:{served.port}/socket", close_timeout=0.2, **options)


def test_websockets_are_accepted(application: Application) -> None:
    with serving(application) as served:
        with connect(served) as client:
            client.send("key")
            assert client.recv(10) == "3"
            for size in (10, 1_000_000, 0):
                client.send("x" * size)
                assert client.recv(10) == str(size)
            assert served.guard.connections == 1
            assert served.guard.buffered_bytes == 0
        eventually(lambda: served.guard.connections == 0)
        assert rejections(served) == {}


def test_an_upgrade_with_a_body_is_rejected(application: Application) -> None:
    with serving(application) as served, served.connect() as client:
        client.sendall(post("/socket", 9, "upgrade: websocket", "connection: upgrade").replace(b"POST", b"GET") + b"x")
        assert status(read_all(client)) == 400
        assert rejections(served) == {guard.INVALID_HTTP: 1}


def test_a_websocket_without_a_key_can_send_only_small_messages(application: Application) -> None:
    with serving(application) as served, connect(served) as client:
        with contextlib.suppress(websockets.ConnectionClosed):
            client.send("x" * 1_000_000)
        with pytest.raises(websockets.ConnectionClosed) as exc_info:
            client.recv(10)
        assert exc_info.value.rcvd is not None
        assert exc_info.value.rcvd.code == 1009
        assert application.received == 0
        eventually(lambda: served.guard.connections == 0)


def test_nothing_is_read_between_the_first_message_and_authentication(application: Application) -> None:
    with serving(application) as served, connect(served) as client:
        client.send("not the key")
        assert client.recv(10) == "11"
        client.send("x")
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_websocket_that_is_never_authenticated_is_closed(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.gateway.connections.websocket.GRACE_SECONDS", 0)
    with serving(application, websocket_auth_seconds=1) as served, connect(served) as client:
        with pytest.raises(websockets.ConnectionClosed):
            client.recv(20)
        assert rejections(served) == {guard.WEBSOCKET_AUTH_TIMEOUT: 1}
        eventually(lambda: application.disconnects == 1)


def test_a_slow_message_closes_a_websocket_and_idle_time_does_not(application: Application) -> None:
    with serving(application, body_seconds=1, body_bytes_per_second=1000) as served:
        with connect(served) as idle, connect(served) as slow:
            for client in (idle, slow):
                client.send("key")
                assert client.recv(10) == "3"
            slow.socket.sendall(b"\x81\xfe\x10\x00mask" + b"x" * 10)  # the start of a frame of 4096 bytes
            with pytest.raises(websockets.ConnectionClosed):
                slow.recv(20)
            idle.send("still here")
            assert idle.recv(10) == "10"
        assert rejections(served) == {guard.BODY_TIMEOUT: 1}


def test_the_number_of_empty_fragments_is_limited(application: Application) -> None:
    with serving(application) as served, connect(served) as client:
        client.send("key")
        assert client.recv(10) == "3"
        with contextlib.suppress(ConnectionError):
            client.socket.sendall(b"\x01\x80mask" + b"\x00\x80mask" * 20_000)
        with pytest.raises(websockets.ConnectionClosed):
            client.recv(20)
        assert rejections(served) == {guard.WEBSOCKET_MESSAGES: 1}


def test_pings_of_a_client_that_does_not_read_are_not_answered(application: Application) -> None:
    with serving(application) as served, connect(served, compression=None) as client:
        client.send("key")
        assert client.recv(10) == "3"
        client.socket.settimeout(3)
        sent, flood = 0, b"\x89\xfdmask" + b"x" * 125
        with contextlib.suppress(TimeoutError, socket.timeout, ConnectionError):
            while sent < 40_000_000:
                client.socket.sendall(flood * 500)
                sent += len(flood) * 500
        (connection,) = served.guard._connections
        assert connection.transport.get_write_buffer_size() < 2**20


def test_log_lines_are_limited(application: Application, caplog: pytest.LogCaptureFixture) -> None:
    with serving(application) as served:
        for _ in range(20):
            assert status(served.exchange(b"nonsense\r\n\r\n")) == 400
        assert rejections(served) == {guard.INVALID_HTTP: 20}
    assert len(served.guard._logged) == 1
