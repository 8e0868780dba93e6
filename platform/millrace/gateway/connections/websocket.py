"""WebSockets below ASGI: uvicorn's protocol class with deadlines and limits.

Until it is authenticated, a connection may send messages of up to 64 KiB. After the first message nothing is read until
it is authenticated or closed. The headers of the handshake were read, and limited, by the HTTP protocol.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode
from websockets.http11 import Request

from millrace.gateway.connections import AUTHENTICATED, guard
from millrace.gateway.connections.guard import ConnectionGuard, process_guard
from millrace.gateway.connections.http import CLOSING_SECONDS, STALLED_SECONDS

MAX_UNAUTHENTICATED_MESSAGE_BYTES = 2**16
MAX_UNAUTHENTICATED_MESSAGES = 16
MAX_FRAGMENTS = 4096  # fragments of one message
GRACE_SECONDS = 5.0  # so that the application's own deadline closes the connection first


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket connection.

    Start uvicorn with `--ws millrace.gateway.connections.websocket:GatewayWebSocketProtocol`.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        guard: ConnectionGuard | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = guard or process_guard()
        self._limits = self._guard.limits
        self.conn.max_message_size = MAX_UNAUTHENTICATED_MESSAGE_BYTES
        self._is_authenticated = False
        self._buffered_bytes = 0  # unauthenticated bytes that the guard counts
        self._message_started_at: float | None = None  # since when a message is incomplete
        self._message_bytes = 0
        self._write_paused_at: float | None = None
        self._closing_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        # Never rejected: the HTTP protocol has just closed its connection.
        self._peer, _ = self._guard.open(self, self._address)
        self._auth_deadline = self.loop.time() + self._limits.websocket_auth_seconds + GRACE_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._release()
        self._guard.close(self)
        self._forget_extension()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if (scope := self._scope()) is not None:
            scope["extensions"][AUTHENTICATED] = self._mark_authenticated

    def _scope(self) -> Any:
        return getattr(self, "scope", None)  # missing after a rejected handshake

    def _forget_extension(self) -> None:
        if (scope := self._scope()) is not None:
            scope["extensions"].pop(AUTHENTICATED, None)  # refers to this object

    def _mark_authenticated(self) -> None:
        if self._is_authenticated:
            return
        self._is_authenticated = True
        self.conn.max_message_size = self.config.ws_max_size
        self._release()
        if self.read_paused and self.queue.empty() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def _release(self) -> None:
        buffered_bytes, self._buffered_bytes = self._buffered_bytes, 0
        self._guard.release(self._peer, buffered_bytes)

    def check(self, now: float, elapsed: float) -> None:
        """Enforce the deadlines."""
        if self.transport.is_closing():
            if self._closing_at is None:
                self._closing_at = now
            elif now - self._closing_at > CLOSING_SECONDS:
                self._abort(guard.NOT_READING)
        elif self._write_paused_at is not None and now - self._write_paused_at > STALLED_SECONDS:
            self._abort(guard.NOT_READING)
        elif not self._is_authenticated:
            if now > self._auth_deadline:
                self._abort(guard.WEBSOCKET_AUTH_TIMEOUT)
        elif self._message_started_at is not None:
            if self.read_paused:
                self._message_started_at += elapsed
            allowed = self._limits.body_seconds + self._message_bytes / self._limits.body_bytes_per_second
            if now - self._message_started_at > allowed:
                self._close(guard.BODY_TIMEOUT, "the message arrived too slowly")

    def resume_reading(self) -> None:
        """Do nothing. Never called, since the messages of an unauthenticated connection are small."""

    def data_received(self, data: bytes) -> None:
        size = len(data)
        if not self._is_authenticated:
            self._buffered_bytes += size
            self._guard.count_bytes(self._peer, size)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # uvicorn would leave it open
            self._guard.reject(guard.INVALID_HTTP, self._address)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
            return
        if self.frames or self.conn.reader.buffer:
            if self._message_started_at is None:
                self._message_started_at, self._message_bytes = self.loop.time(), 0
            self._message_bytes += size
        else:
            self._message_started_at = None
        if len(self.frames) > MAX_FRAGMENTS:
            self._close(guard.WEBSOCKET_MESSAGES, "the message has too many fragments")
        elif not self._is_authenticated:
            if self.queue.qsize() > MAX_UNAUTHENTICATED_MESSAGES:
                self._close(guard.WEBSOCKET_MESSAGES, "too many messages before authentication")
            elif (reason := self._guard.excess(self._peer, large=False)) is not None:
                self._abort(reason)

    async def receive(self) -> ASGIReceiveEvent:
        """Receive a message like uvicorn. Before authentication, reading is not resumed."""
        if self._is_authenticated:
            return await super().receive()
        return await self.queue.get()

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read and the answers would accumulate."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_paused_at = None

    def _close(self, reason: str, text: str) -> None:
        self._guard.reject(reason, self._address)
        self.conn.fail(CloseCode.POLICY_VIOLATION, text)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    def _abort(self, reason: str) -> None:
        self._guard.reject(reason, self._address)
        self.transport.abort()
