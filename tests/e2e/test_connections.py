"""Limits of connections and wrong keys on a whole platform, as `make up` runs it."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.e2e.keys import make_key
from tests.support.gateway.live_server import read_all
from tests.support.stack import Stack

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


def test_wrong_keys_are_throttled_but_valid_keys_of_the_same_address_are_not(stack: Stack) -> None:
    fresh = make_key(stack, "behind a NAT")
    with httpx.Client(base_url=stack.url, transport=httpx.HTTPTransport(local_address=ELSEWHERE), timeout=60) as client:

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
