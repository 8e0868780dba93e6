"""The tests' live server waits for the requests of a test's pages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from tests.support.frontend.live_server import LiveServer

WAIT_SECONDS = 60


class SlowView:
    """Django's handler with a view whose duration is set by the test."""

    def __init__(self) -> None:
        from django.core.asgi import get_asgi_application  # here: imported before Django is set up

        self.begun, self.allowed, self.done = threading.Event(), threading.Event(), threading.Event()
        self.application = get_asgi_application()
        self.application._middleware_chain = self._answer  # type: ignore[assignment]

    async def _answer(self, request: Any) -> Any:
        from django.http import HttpResponse

        await sync_to_async(self._work)()
        return HttpResponse()

    def _work(self) -> None:
        self.begun.set()
        assert self.allowed.wait(WAIT_SECONDS)
        self.done.set()


@pytest.fixture
def slow() -> Iterator[SlowView]:
    slow = SlowView()
    yield slow
    slow.allowed.set()


def test_the_server_waits_for_a_cancelled_request(slow: SlowView) -> None:
    server = LiveServer(slow.application)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert slow.begun.wait(WAIT_SECONDS)
    # The client has disconnected, and the view still runs.
    waiting = threading.Thread(target=server.wait_until_idle)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    slow.allowed.set()
    waiting.join(WAIT_SECONDS)
    assert slow.done.is_set() and not waiting.is_alive()
    server.wait_until_idle()  # with no request in flight, it returns
    server.stop()


def test_the_server_waits_for_a_request_that_was_just_sent(slow: SlowView) -> None:
    slow.allowed.set()
    server = LiveServer(slow.application)
    server.start()
    for _ in range(20):
        slow.done.clear()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            server.wait_until_idle()
            assert slow.done.is_set()
    server.stop()
