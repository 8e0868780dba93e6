"""Offers to change the protocol, and clients of HTTP/1.0, over sockets to a uvicorn server."""

from __future__ import annotations

import hashlib
import http.client
import io
import socket
from typing import Any

import pytest
from websockets.sync.client import connect as websocket_connect

from tests.support.gateway.live_server import Served, read_all, serving
from tests.support.waiting import eventually

H2C = (
    "connection: Upgrade, HTTP2-Settings",
    "upgrade: h2c",
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
KEY = "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
OFFERS = {
    "h2c": H2C,
    "h2c in capitals": ("CONNECTION: UPGRADE,HTTP2-SETTINGS", "UPGRADE: H2C", "HTTP2-SETTINGS: AA"),
    "h2c last": ("connection: keep-alive, upgrade", "x-other: 1", "upgrade: h2c"),
    "TLS": ("connection: upgrade", "upgrade: TLS/1.0"),
    "unknown": ("connection: upgrade", "upgrade: foo"),
    "a list": ("connection: upgrade", "upgrade: h2c, websocket"),
    "two lines": ("connection: upgrade", "upgrade: h2c", "upgrade: websocket", KEY),
    "two connection fields": ("connection: upgrade", "connection: keep-alive", "upgrade: h2c"),
    "empty": ("connection: upgrade", "upgrade: "),
    "malformed": ("connection: upgrade,,;", 'upgrade: /1 ,,;\t"h2c'),
    "without connection": ("upgrade: h2c",),
    "without upgrade": ("connection: upgrade",),
    "WebSocket, not in a list": ("connection: upgrade", "upgrade: websocket/13", KEY),
}
LARGE = bytes(range(256)) * 3000
BODIES = {  # the fields of a request and its body
    "none": ((), b""),
    "empty": (("content-length: 0",), b""),
    "length": (("content-length: 9",), b"GET / HTT"),
    "chunks": (("transfer-encoding: chunked",), b"3;a=b\r\nabc\r\n4\r\nupgr\r\n0\r\nx-trailer: 1\r\n\r\n"),
    "expected": (("expect: 100-continue", "content-length: 5"), b"hello"),
    "large": ((f"content-length: {len(LARGE)}",), LARGE),
    "large chunk": (("transfer-encoding: chunked",), b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE)),
}


class Echo:
    """An ASGI application that responds with the request's method, path, version and body's digest."""

    def __init__(self) -> None:
        self.heads: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
            return
        self.heads.append(scope["headers"])
        received, more = b"", True
        while more:
            message = await receive()
            received += message.get("body", b"")
            more = message.get("more_body", False)
        digest = hashlib.sha256(received).hexdigest()
        body = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} {len(received)} {digest}".encode()
        kind = scope["query_string"].decode()
        fields = {
            "length": [(b"content-length", str(len(body)).encode())],
            "chunks": [(b"Transfer-Encoding", b"chunked")],
            "closing": [(b"connection", b"close")],
        }
        status = {"no-content": 204, "not-modified": 304}.get(kind, 200)
        if kind == "failing":
            raise ValueError
        await send({"type": "http.response.start", "status": status, "headers": fields.get(kind, [])})
        if status == 200 and kind != "length":
            await send({"type": "http.response.body", "body": body[:5], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            body = body[5:]
        await send({"type": "http.response.body", "body": body if status == 200 else b""})


@pytest.fixture(scope="module")
def echo() -> Echo:
    return Echo()


@pytest.fixture(scope="module")
def served(echo: Echo) -> Any:
    with serving(echo) as server:
        yield server


def request(method: str, path: str, *fields: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: test", *fields, "", ""]).encode()


class Received(io.BytesIO):
    """What a server sent, as the socket of `http.client`. It stays open after a response."""

    def makefile(self, _mode: str) -> Received:
        return self

    def close(self) -> None:
        pass


def exchange(served: Served, packets: list[bytes], method: str) -> list[tuple[int, bytes, str]]:
    """Send the packets, and return status, body and `connection` of each response until the server closes."""
    with served.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            client.sendall(packet)
        return read_responses(read_all(client), method)


def read_responses(data: bytes, method: str) -> list[tuple[int, bytes, str]]:
    """Return status, body and `connection` of each response in the data that a server sent."""
    received = Received(data)
    responses = []
    while received.tell() < len(received.getvalue()):
        response = http.client.HTTPResponse(received, method=method)  # type: ignore[arg-type]
        response.begin()
        responses.append((response.status, response.read(), response.getheader("connection", "")))
    return responses


def splits(head: bytes, body: bytes) -> dict[str, list[bytes]]:
    """Return packets in which a request may arrive."""
    whole = head + body
    found = {
        "one packet": [whole],
        "head, body": [head, body],
        "in the blank line": [head[:-2], head[-2:] + body],
        "in the body": [head + body[:1], body[1:]],
    }
    if len(whole) < 1000:
        found["bytes"] = [whole[n : n + 1] for n in range(len(whole))]
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_of_another_protocol_is_ignored(served: Served, echo: Echo, offer: str, body: str) -> None:
    """Each request is followed by another one with the same offer, and by one that closes the connection."""
    fields, content = BODIES[body]
    method = "GET" if body == "none" else "POST"
    ends = request("GET", "/end", "connection: close")
    plain = request(method, "/v1/x", *fields) + content
    expected = exchange(served, [plain * 2 + ends], method)
    assert [status for status, *_ in expected] == [200] * 3
    plain_fields = echo.heads[-3]
    head = request(method, "/v1/x", *OFFERS[offer], *fields)
    for name, packets in splits(head, content).items():
        assert exchange(served, [*packets, *packets[:-1], packets[-1] + ends], method) == expected, name
        seen = [field for field in echo.heads[-3] if field in plain_fields]
        assert seen == plain_fields, name


def test_the_end_of_a_body_does_not_count_to_the_next_head(echo: Echo) -> None:
    """It may arrive together with the beginning of that head, and be larger than a head may be."""
    body, ends = b"x" * 5000, request("GET", "/end", "connection: close")
    with serving(echo, header_bytes=1024) as server, server.connect() as client:
        known = len(echo.heads)
        client.sendall(request("POST", "/v1/x", f"content-length: {len(body)}") + body[:1])
        eventually(lambda: len(echo.heads) > known)
        client.sendall(body[1:] + ends[:-2])
        received = client.recv(2**16)
        client.sendall(ends[-2:])
        received += read_all(client)
    first, last = read_responses(received, "POST")
    assert first[:2] == (200, f"POST /v1/x  5000 {hashlib.sha256(body).hexdigest()}".encode())
    assert last[0] == 200 and last[1].startswith(b"GET /end")


@pytest.mark.parametrize("fields", [(), ("sec-websocket-version: 13", KEY)])
@pytest.mark.parametrize(
    ("method", "version"), [("GET", "1.0"), ("POST", "1.0"), ("POST", "1.1"), ("PUT", "1.1"), ("OPTIONS", "1.1")]
)
def test_only_a_get_of_http_1_1_is_a_websocket_handshake(
    served: Served, method: str, version: str, fields: tuple[str, ...]
) -> None:
    offer = ("connection: upgrade, close", "upgrade: websocket", *fields)
    packets = [request(method, "/v1/x?length", *offer, "content-length: 2", version=version), b"hi"]
    [(status, body, _)] = exchange(served, packets, method)
    assert (status, body.split()[:4]) == (200, [method.encode(), b"/v1/x", b"length", b"2"])


def test_websocket_handshakes_are_accepted(served: Served) -> None:
    for _ in range(2):
        with websocket_connect(f"ws://127.0.0.1:{served.port}/socket", close_timeout=0.2) as client:
            client.send("hello")
    offer = ("connection: keep-alive, Upgrade", "upgrade: WebSocket", "sec-websocket-version: 13", KEY)
    with served.connect() as client:
        client.sendall(request("POST", "/v1/x?length", *H2C, "content-length: 2") + b"hi")
        assert b"POST /v1/x" in client.recv(2**16)
        client.sendall(request("GET", "/socket", *offer))
        assert client.recv(2**16).startswith(b"HTTP/1.1 101 ")


def test_an_invalid_handshake_is_rejected(served: Served) -> None:
    offer = ("connection: upgrade", "upgrade: websocket")
    assert served.exchange(request("GET", "/socket", *offer)).startswith(b"HTTP/1.1 400 ")
    old = ("sec-websocket-version: 7", KEY)
    assert served.exchange(request("GET", "/socket", *offer, *old)).startswith(b"HTTP/1.1 400 ")


def test_a_handshake_behind_a_request_without_a_response_is_ignored(served: Served) -> None:
    offer = ("connection: upgrade, close", "upgrade: websocket", "sec-websocket-version: 13", KEY)
    responses = exchange(served, [request("GET", "/first") + request("GET", "/second", *offer)], "GET")
    assert [body.split()[1] for _, body, _ in responses] == [b"/first", b"/second"]


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT test:443 HTTP/1.1\r\nhost: test\r\n\r\n",
        b"CONNECT test:443 HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc",
        b"GET / HTTP/2.0\r\nhost: test\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: test\r\nconnection: keep-alive\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: identity\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding:\r\ncontent-length: 1\r\n\r\na",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nx: a\r\n b\r\ncontent-length: 1\r\n\r\na",
    ],
)
def test_other_protocols_and_ambiguous_offers_are_rejected(served: Served, head: bytes) -> None:
    response = served.exchange(head)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert response.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["length", "stream", "chunks", "closing", "no-content", "not-modified", "failing"])
@pytest.mark.parametrize("connection", [None, "keep-alive", "close", "upgrade"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "EXPECT"])
def test_a_client_of_http_1_0_gets_a_length_or_a_close(
    served: Served, method: str, connection: str | None, kind: str, split: bool
) -> None:
    fields = [f"connection: {connection}"] if connection else []
    fields += ["upgrade: h2c"] if connection == "upgrade" else []
    body = b"hello" if method in ("POST", "EXPECT") else b""
    fields += [f"content-length: {len(body)}"] if body else []
    if method == "EXPECT":
        method = "POST"
        fields.append("expect: 100-continue")
    head = request(method, f"/v1/x?{kind}", *fields, version="1.0")
    with served.connect() as client:
        for packet in (head, body) if split else (head + body,):
            client.sendall(packet)
        response_head, _, received = read_all(client).partition(b"\r\n\r\n")
    digest = hashlib.sha256(body).hexdigest()
    expected = f"{method} /v1/x {kind} {len(body)} {digest}".encode()
    statuses = {"no-content": 204, "not-modified": 304, "failing": 500}
    lines = response_head.lower().split(b"\r\n")
    assert int(lines[0].split()[1]) == statuses.get(kind, 200)
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert b"connection: keep-alive" not in lines
    if kind == "length":
        assert f"content-length: {len(expected)}".encode() in lines
    if method == "HEAD" or kind in ("no-content", "not-modified"):
        assert received in (b"", b"Internal Server Error"[: 0 if kind != "failing" else None])
    elif kind != "failing":
        assert received == expected


def test_a_stream_to_a_client_of_http_1_0_arrives_piece_by_piece() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for n in range(3):
            await receive()
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % n, "more_body": n < 2})

    with serving(stream) as served, served.connect() as client:
        client.sendall(request("POST", "/v1/x", "content-length: 3", version="1.0") + b"a")
        received = b""
        for n, more in enumerate((b"b", b"c", b"")):
            while not received.endswith(b"data: %d\n\n" % n):
                received += client.recv(2**16)
            client.sendall(more)
        assert not client.recv(1)
        assert received.partition(b"\r\n\r\n")[2] == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        eventually(lambda: served.guard.connections == 0)


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("http://test", "/ "),
        ("http://test?limit=1", "/ limit=1"),
        ("http://test/?limit=1", "/ limit=1"),
        ("http://test/v1/models?limit=1", "/v1/models limit=1"),
        ("HTTPS://test:443", "/ "),
        ("*", "/ "),
        ("/?limit=1", "/ limit=1"),
        ("/http://x", "/http://x "),
        ("//v1/models", "//v1/models "),
    ],
)
def test_a_target_without_a_path_is_the_root(served: Served, target: str, seen: str) -> None:
    responses = exchange(served, [request("OPTIONS", target, "connection: close")], "OPTIONS")
    (status, body, _) = responses[0]
    assert status == 200
    assert body.startswith(f"OPTIONS {seen} 0 ".encode())
