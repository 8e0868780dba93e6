"""Limits of connections and wrong keys on a whole platform, as `make up` runs it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.e2e.keys import make_key
from tests.support.gateway.live_server import read_all
from tests.support.stack import MODEL, Stack

H2C = "connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
ELSEWHERE = "127.0.0.9"  # no trusted proxy, and no other test's address


def test_a_header_of_30_mb_is_rejected(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"x" * 30_000_000)
        assert b" 431 " in read_all(client).split(b"\r\n")[0]
    assert stack.metric("millrace_connection_rejections_total") >= 1


def test_a_console_body_without_a_session_is_limited(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST /login HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 40000000\r\n\r\n")
            client.sendall(b"x" * 40_000_000)
        assert b" 413 " in read_all(client).split(b"\r\n")[0]


@pytest.mark.parametrize("protocol", ["h2c", "HTTP/1.0"])
def test_other_clients_are_served(stack: Stack, protocol: str) -> None:
    """The API, the management API and the console receive the body of each client and end their responses."""

    def send(method: str, path: str, body: Any = None) -> tuple[int, bytes, bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        version, offer = ("HTTP/1.1", H2C) if protocol == "h2c" else ("HTTP/1.0", "connection: keep-alive\r\n")
        fields = (
            f"authorization: Bearer {stack.key}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        )
        with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as client:
            client.sendall(f"{method} {path} {version}\r\nhost: 127.0.0.1\r\n{offer}{fields}\r\n".encode() + content)
            head, _, received = read_all(client).partition(b"\r\n\r\n")
        if protocol == "HTTP/1.0":
            assert b"transfer-encoding" not in head.lower()
        return int(head.split()[1]), head.lower(), received

    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    status, _, received = send("POST", "/v1/chat/completions", chat)
    assert (status, json.loads(received)["usage"]["completion_tokens"]) == (200, 4)
    status, _, received = send("POST", "/v1/chat/completions", {**chat, "stream": True})
    assert status == 200
    assert b"data: [DONE]\n\n" in received
    if protocol == "HTTP/1.0":
        assert received.startswith(b"id: ")
        assert received.endswith(b"data: [DONE]\n\n")
    status, _, received = send("POST", "/api/keys", {"name": f"of {protocol}", "scopes": ["inference"]})
    assert (status, json.loads(received)["name"]) == (201, f"of {protocol}")
    for path in ("/login", "/v1/models", "/metrics", "/static/frontend/console.css", "/api/keys"):
        for method in ("GET", "HEAD"):
            status, head, received = send(method, path)
            assert (status < 400, received == b"") == (True, method == "HEAD"), (method, path, head)


def test_wrong_keys_are_throttled_but_valid_keys_of_the_same_address_are_not(stack: Stack) -> None:
    fresh = make_key(stack, "behind a NAT")
    with httpx2.Client(
        base_url=stack.url, transport=httpx2.HTTPTransport(local_address=ELSEWHERE), timeout=60
    ) as client:

        def models(key: str) -> int:
            return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        with ThreadPoolExecutor(8) as pool:
            found = Counter(pool.map(models, [f"sk-mr-wrong-{n}" for n in range(300)]))
        assert found.keys() == {401, 429}
        assert found[401] >= 60
        assert found[429] >= 100  # one attempt per second is allowed again
        assert models(stack.key) == models(fresh) == 200
        with ThreadPoolExecutor(8) as pool:
            wrong = {"x-api-key": "sk-mr-wrong"}
            managed = set(pool.map(lambda _: client.get("/api/usage", headers=wrong).status_code, range(60)))
        assert managed <= {401, 429}
        assert 429 in managed
        assert client.get("/api/usage", headers=stack.headers).status_code == 200
    assert stack.metric('millrace_wrong_api_keys_total{outcome="throttled"}') >= 100
