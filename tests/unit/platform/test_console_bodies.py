"""Limits of request bodies of the console, enforced before Django."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.conf.console_bodies import BoundedBodies

PIECE = b"x" * 100


class Site:
    """A fake Django that reads the body, and responds with its length unless the client has disconnected."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            self.read += len(message["body"])
            if not message["more_body"]:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return


@pytest.mark.parametrize(
    ("size", "headers", "status", "read"),
    [
        (300, {b"content-length": b"300"}, 200, 300),
        (2000, {b"content-length": b"2000"}, 413, 0),
        (2000, {b"transfer-encoding": b"chunked"}, 413, 500),
    ],
)
async def test_a_body_is_read_up_to_its_limit(size: int, headers: dict[bytes, bytes], status: int, read: int) -> None:
    left, sent, site = size, [], Site()

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= len(PIECE)
        return {"type": "http.request", "body": PIECE, "more_body": left > 0}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await BoundedBodies(site, 500)({"type": "http", "method": "POST", "headers": list(headers.items())}, receive, send)
    assert (sent[0]["status"], site.read, left) == (status, read, 0)
    assert not sent[-1].get("more_body")
