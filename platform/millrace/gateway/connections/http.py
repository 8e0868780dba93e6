"""HTTP/1.1 below ASGI: uvicorn's protocol class with deadlines and limits.

A connection is in one of five phases. HEAD: waits for a request's headers, or reads them. BODY: reads a request's body.
RECEIVED: has the whole request, and waits for its response or the next request. DRAIN: the response is complete and the
body is not; received data is dropped. REJECTED: a rejection was sent; received data is dropped, so that the client can
read the rejection. The guard checks each connection's deadline twice a second.

An offer to change the protocol, such as `upgrade: h2c`, is ignored unless it is a WebSocket handshake (RFC 9110, 7.8).
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from millrace.gateway.connections import AUTHENTICATED, compatibility, guard
from millrace.gateway.connections.batched_writes import BatchedTransport
from millrace.gateway.connections.guard import ConnectionGuard, process_guard
from millrace.gateway.core.errors import OVERLOADED, ApiError

HEAD, BODY, RECEIVED, DRAIN, REJECTED = range(5)  # phases; not an Enum, since this is on the hot path
MAX_HEADERS = 100
MAX_REQUEST_LINE_BYTES = 2**13
MAX_PIPELINED = 32  # received requests that are not handled yet
DRAIN_SECONDS = 5.0
REJECTED_SECONDS = 2.0
CLOSING_SECONDS = 30.0  # for the client to read the last bytes of a response
STALLED_SECONDS = 75.0  # without progress in sending; the gateway's endpoints give up after 60 s


class RequestFlow(FlowControl):
    """uvicorn's flow control, extended so that the guard can also pause reading."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_paused = False  # by the application, which has not received the data yet
        self.is_blocked = False  # by the guard

    def pause_reading(self) -> None:
        self.is_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self.is_paused = False
        if not self.is_blocked:
            super().resume_reading()

    def block(self) -> None:
        self.is_blocked = True
        super().pause_reading()

    def unblock(self) -> None:
        self.is_blocked = False
        if not self.is_paused:
            super().resume_reading()


class GatewayHttpProtocol(HttpToolsProtocol):
    """One client connection. Start uvicorn with `--http millrace.gateway.connections.http:GatewayHttpProtocol`."""

    flow: RequestFlow

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
        self.url, self.headers = b"", []
        self.timeout_keep_alive = self._limits.keepalive_seconds
        self._phase = HEAD
        self._deadline = math.inf
        self._is_authenticated = False  # the current or last request
        self._is_handshake = False  # whether a WebSocket is being opened
        self._requests = 0
        self._buffered_bytes = 0  # unauthenticated bytes that the guard counts
        self._is_waiting = False  # queued at the guard with a large body
        self._closes = False  # close after the response and the body: the client sent `connection: close`
        self._head_bytes = self._fed_bytes = 0
        self._is_pipelined = False
        self._body_bytes = 0
        self._framing_bytes = 0  # received since the last byte of a body: chunk extensions, trailers
        self._rejection: tuple[str, ApiError] | None = None  # set by the parser's callbacks
        self._write_paused_at: float | None = None
        self._closing_at: float | None = None
        self._running: RequestResponseCycle | None = None  # the request that the application handles

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        batched: Any = BatchedTransport(transport, self.loop)
        super().connection_made(batched)
        self.flow = RequestFlow(batched)
        self._address = self.client[0] if self.client else ""
        self._deadline = self.loop.time() + self._limits.header_seconds
        self._peer, reason = self._guard.open(self, self._address)
        if reason == guard.ALL_CONNECTIONS:
            self._reject(reason, ApiError(OVERLOADED, "The gateway has too many connections. Retry later."))
            self.transport.close()
        elif reason is not None:
            message = f"Too many connections from your IP address. The limit is {self._limits.connections_per_address}."
            self._reject(reason, ApiError("too_many_connections", message, retry_after=1))
            if self._peer.connections > 2 * self._limits.connections_per_address:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None:  # uvicorn ends only the request that was received last
            self._disconnect(self._running)
        self._leave()

    def eof_received(self) -> None:
        batched: Any = self.transport
        batched.flush()  # the transport is closed next

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = partial(compatibility.respond_without_chunks, cycle, app)
        super()._start_asgi_task(cycle, app)

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Report to the application that the client has disconnected, unless the response is complete."""
        if not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _leave(self) -> None:
        self._release()
        self._guard.close(self)
        if self.scope is not None and "extensions" in self.scope:
            self.scope["extensions"].pop(AUTHENTICATED, None)  # refers to this object

    def check(self, now: float, elapsed: float) -> None:
        """Enforce the deadlines."""
        if self._is_discarding():
            self._release()  # also if the guard has blocked the connection
        if self.transport.is_closing():
            if self._closing_at is None:
                self._closing_at = now
            elif now - self._closing_at > CLOSING_SECONDS:
                self._abort(guard.NOT_READING)
        elif self._write_paused_at is not None and now - self._write_paused_at > STALLED_SECONDS:
            self._abort(guard.NOT_READING)
        elif self._phase == BODY:
            if self.flow.is_paused:
                self._deadline += elapsed
            elif now > self._deadline + self._body_bytes / self._limits.body_bytes_per_second:
                self._reject_slow_body()
        elif self._phase == HEAD and self._is_responding():
            self._deadline += elapsed
        elif now > self._deadline:
            if self._phase == HEAD and self._head_bytes:
                message = f"The request's headers were not complete after {self._limits.header_seconds:g} s."
                self._reject(guard.HEADER_TIMEOUT, ApiError("request_timeout", message))
            else:
                if self._phase == HEAD:
                    self._guard.reject(guard.HEADER_TIMEOUT, self._address)
                self.transport.close()

    def _reject_slow_body(self) -> None:
        if self.flow.is_blocked:
            self._reject(
                guard.ALL_BYTES, ApiError(OVERLOADED, "The gateway has too many unauthenticated requests. Retry later.")
            )
        else:
            rate = self._limits.body_bytes_per_second
            message = f"The request's body arrived too slowly. The minimum is {rate} bytes per second."
            self._reject(guard.BODY_TIMEOUT, ApiError("request_timeout", message))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_paused_at = None

    # Bytes.

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        phase, requests, size, body_bytes = self._phase, self._requests, len(data), self._body_bytes
        if phase == REJECTED:
            return
        if phase == RECEIVED:
            self._begin_head()
        if self._is_discarding():
            self._release()
        elif phase != DRAIN and not (phase == BODY and self._is_authenticated):
            self._buffered_bytes += size
            self._guard.count_bytes(self._peer, size)
        self._fed_bytes = self._head_bytes + size
        self._parse(data)
        if self._is_handshake and self._rejection is None:
            self.handle_websocket_upgrade()
            return
        if self._phase == HEAD and self._requests == requests:
            if phase in (HEAD, RECEIVED):  # otherwise the data is mostly the end of a body
                self._head_bytes += size
        elif phase in (BODY, DRAIN) and self._requests == requests:
            self._framing_bytes = 0 if self._body_bytes > body_bytes else self._framing_bytes + size
        if self._rejection is None:
            self._check_sizes()
            self._keep_open_for_body()
        if self._rejection is not None:
            self._reject(*self._rejection)

    def _parse(self, data: bytes) -> None:
        """Parse the data. After an offer that is ignored, parse the request's head again without the offer.

        The parser stops at an offer and does not read the body.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if self._rejection is None and not self._is_handshake:
                    data = compatibility.head_without_offer(self.parser, self.url, self.headers) + data[exc.args[0] :]
                    self.parser = compatibility.create_parser(self)
                    continue
            except httptools.HttpParserError:
                if self._rejection is None:
                    self._rejection = (guard.INVALID_HTTP, ApiError("invalid_http", "The request is not valid HTTP."))
            return

    def _keep_open_for_body(self) -> None:
        """If the client sent `connection: close`, close the connection only after the whole body has arrived.

        uvicorn closes it with the response. If bytes of the body are unread then, the system resets the connection, and
        the client may not receive the response.
        """
        cycle = self.cycle
        if self._phase == BODY and cycle is not None and not cycle.keep_alive and not cycle.response_started:
            cycle.keep_alive, self._closes = True, True

    def _begin_head(self) -> None:
        self._phase = HEAD
        self._deadline = self.loop.time() + self._limits.header_seconds
        self._head_bytes = 0
        self._is_pipelined = False  # began in the same data as the end of another request
        self._is_authenticated = False

    def _check_sizes(self) -> None:
        """Check the limits of an incomplete request, and the limits that all connections share."""
        if self._phase == HEAD:
            self._check_head(self._head_bytes)
        elif self._phase in (BODY, DRAIN):
            if self._framing_bytes > self._limits.header_bytes or len(self.headers) > MAX_HEADERS:
                self._rejection = (
                    guard.BODY_SIZE,
                    ApiError("invalid_http", "The body has too large chunk extensions or trailers."),
                )
            elif self._phase == BODY and self._is_unauthenticated_body_too_large():
                message = f"The request body is larger than {self._limits.body_bytes} bytes."
                self._rejection = (guard.BODY_SIZE, ApiError("request_too_large", message))
        if not self._buffered_bytes or self._rejection is not None:
            return
        if (reason := self._guard.excess(self._peer, large=False)) is not None:
            error = ApiError(OVERLOADED, "The gateway has too many unauthenticated requests. Retry later.")
            if reason == guard.ADDRESS_BYTES:
                error = ApiError(
                    "too_many_connections",
                    "Too many unauthenticated requests from your IP address. Retry later.",
                    retry_after=1,
                )
            self._rejection = (reason, error)
        elif self._is_large() and self._guard.excess(self._peer, large=True) is not None:
            self._is_waiting = True
            if self._guard.wait(self):
                self.flow.block()

    def _is_unauthenticated_body_too_large(self) -> bool:
        max_bytes = self._limits.body_bytes + 2 * guard.READ_BYTES  # the application rejects the body earlier
        return not self._is_authenticated and self._body_bytes > max_bytes and not self._is_discarding()

    def _is_discarding(self) -> bool:
        """Return whether the response was sent before the whole body arrived. The application drops the rest then.

        The application limits the rest itself. If the connection is reset, the client may not receive the response.
        """
        cycle = self.cycle
        return self._phase == BODY and cycle is not None and cycle.response_started and not self.pipeline

    def _is_large(self) -> bool:
        return self._phase == BODY and self._body_bytes > guard.SMALL_BODY_BYTES

    def _check_head(self, size: int) -> None:
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            message = f"The request line is longer than {MAX_REQUEST_LINE_BYTES} bytes."
            self._rejection = (guard.HEADER_SIZE, ApiError("uri_too_long", message))
        elif size > self._limits.header_bytes or len(self.headers) > MAX_HEADERS:
            message = f"The headers have more than {self._limits.header_bytes} bytes or more than {MAX_HEADERS} fields."
            self._rejection = (guard.HEADER_SIZE, ApiError("headers_too_large", message))

    def resume_reading(self) -> None:
        """Resume reading, since there is capacity for a large body again."""
        self.flow.unblock()

    def _release(self) -> None:
        """Release the unauthenticated bytes and the place in the guard's queue."""
        if self._buffered_bytes:
            buffered_bytes, self._buffered_bytes = self._buffered_bytes, 0
            self._guard.release(self._peer, buffered_bytes)
        if self._is_waiting:
            self._is_waiting = False
            self._guard.stop_waiting(self)
            self.flow.unblock()

    # Callbacks of the parser. They must not raise: the parser would turn exceptions into a 400.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase != HEAD:  # it follows another request in the same data
            self._begin_head()
            self._is_pipelined = True

    def on_headers_complete(self) -> None:
        if self._rejection is not None:
            return
        size = self._fed_bytes  # at least the size of the head, unless it began after another request
        if size > self._limits.header_bytes or self._is_pipelined:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._check_head(size)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._rejection = (guard.PIPELINING, ApiError("invalid_http", "Too many pipelined requests."))
        if not compatibility.is_supported(self.parser):
            error = ApiError("invalid_http", "CONNECT and HTTP versions other than 1.0 and 1.1 are not supported.")
            self._rejection = (guard.INVALID_HTTP, error)
        if self._rejection is not None:
            return
        if self.parser.should_upgrade():
            self._is_handshake = (
                compatibility.is_websocket_handshake(self.parser, self.headers) and not self._is_responding()
            )
            if not self._is_handshake:
                return
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        self._requests += 1
        self._is_authenticated = False
        scope: Any = self.scope
        scope["extensions"] = {AUTHENTICATED: partial(self._mark_authenticated, self._requests)}
        self.url = compatibility.add_path(self.url)
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            self.headers = []  # uvicorn would append trailers to the scope's list
        self._phase = BODY
        self._body_bytes = self._framing_bytes = 0
        self._deadline = self.loop.time() + self._limits.body_seconds

    def _mark_authenticated(self, request: int) -> None:
        if request == self._requests and self._phase in (BODY, RECEIVED):
            self._is_authenticated = True
            self._release()

    def on_body(self, body: bytes) -> None:
        if self._rejection is None:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._rejection is not None or self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._phase = RECEIVED
        if self.cycle is None or not self.cycle.response_complete:
            self._deadline = math.inf
        elif self._closes:
            self.transport.close()
        else:
            self._deadline = self.loop.time() + self._limits.keepalive_seconds

    def _should_upgrade(self) -> bool:
        return self._is_handshake

    # Responses.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:
            return  # a pipelined request follows
        self._release()
        if self._phase == RECEIVED and self._closes:
            self.transport.close()
        elif self._phase == RECEIVED:
            self._deadline = self.loop.time() + self._limits.keepalive_seconds
        elif self._phase == BODY:
            self._phase = DRAIN
            self._deadline = self.loop.time() + DRAIN_SECONDS

    def handle_websocket_upgrade(self) -> None:
        self._leave()
        batched: Any = self.transport
        batched.flush()
        self.transport = batched.wrapped
        super().handle_websocket_upgrade()

    def _reject(self, reason: str, error: ApiError) -> None:
        """Send a rejection and close the connection. If a response is being sent, abort it."""
        if self._phase == DRAIN or self._is_responding():
            self._abort(reason)
            return
        self._guard.reject(reason, self._address)
        self._release()
        self._phase = REJECTED
        self._deadline = self.loop.time() + REJECTED_SECONDS
        if self.cycle is not None:
            self._disconnect(self.cycle)
        body = msgspec.json.encode(error.body())
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *error.headers(),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % field for field in fields)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _is_responding(self) -> bool:
        """Return whether a response is being sent, or an earlier request waits for one."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._phase != BODY or bool(self.pipeline) or self.cycle.response_started

    def _abort(self, reason: str) -> None:
        self._guard.reject(reason, self._address)
        self._phase = REJECTED
        self.transport.abort()
