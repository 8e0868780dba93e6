"""Calls of the gateway's HTTP endpoints without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from millrace.gateway.http.consumer import HttpConsumer


class Response:
    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.headers: dict[str, str] = {}

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def call(
    consumer: type[HttpConsumer], method: str, path: str = "/v1/models", query: str = "", **headers: str
) -> Response:
    response, over = Response(), asyncio.Event()
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent and method == "POST":
            is_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            response.body += message["body"]
            if not message["more_body"]:
                over.set()

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "client": ("127.0.0.1", 1), "headers": named}
    scope |= {"url_route": {"kwargs": {}}, "query_string": query.encode()}
    await asyncio.wait_for(consumer.as_asgi()(scope, receive, send), 60)
    return response
