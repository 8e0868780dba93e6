"""A uvicorn server on a free port, with the gateway's protocol classes and the test's limits."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from millrace.environment.configuration import platform_settings
from millrace.gateway.connections.guard import ConnectionGuard, ConnectionLimits
from millrace.gateway.connections.http import GatewayHttpProtocol
from millrace.gateway.connections.websocket import GatewayWebSocketProtocol
from tests.support.waiting import eventually


class Served:
    """A running server. `guard` counts the resources of its connections."""

    def __init__(self, port: int, guard: ConnectionGuard) -> None:
        self.port = port
        self.guard = guard

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(source, 0))

    def exchange(self, request: bytes, source: str = "127.0.0.1") -> bytes:
        """Send a request and return everything received until the server closed the connection."""
        with self.connect(source) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(request)
            return read_all(client)


@contextlib.contextmanager
def serving(application: Any, **limits: Any) -> Iterator[Served]:
    """Serve an ASGI application. `limits` override those of the settings; no address is a trusted proxy."""
    settings = ConnectionLimits.from_settings(platform_settings())
    guard = ConnectionGuard(replace(settings, **{"trusted_proxies": "", **limits}))
    config = uvicorn.Config(
        application,
        "127.0.0.1",
        0,
        loop="uvloop",
        http=partial(GatewayHttpProtocol, guard=guard),  # type: ignore[arg-type]
        ws=partial(GatewayWebSocketProtocol, guard=guard),  # type: ignore[arg-type]
        lifespan="off",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield Served(server.servers[0].sockets[0].getsockname()[1], guard)
    finally:
        server.should_exit = True
        thread.join()


def read_all(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(2**16):
            received += data
    return received


def read_response(client: socket.socket) -> bytes:
    """Read one response with a content-length, and no byte of the next one."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = client.recv(1)
        assert data, head
        head += data
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    body = b""
    while rest := int(lengths[0]) - len(body):
        data = client.recv(rest)
        assert data, head + body
        body += data
    return head + body
