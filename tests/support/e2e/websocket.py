"""WebSocket connections to a running platform."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.stack import MODEL, Stack

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def send_message(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def submit(self, name: str, **options: Any) -> None:
        self.send_message(id=name, **{"model": MODEL, "messages": FRANCE, "max_tokens": 8, "temperature": 0, **options})

    def receive(self) -> dict[str, Any]:
        return dict(json.loads(self.socket.recv(30)))

    def receive_all(self, name: str) -> list[dict[str, Any]]:
        """Receive the messages of one request until its end. All other requests must have ended."""
        messages = [self.receive()]
        while messages[-1]["type"] not in ("done", "error"):
            messages.append(self.receive())
        assert {message["id"] for message in messages} == {name}
        return messages


@contextmanager
def socket(stack: Stack, **options: Any) -> Iterator[Client]:
    with connect(f"{stack.url.replace('http', 'ws')}/v1/realtime/chat", **options) as opened:
        yield Client(opened)
