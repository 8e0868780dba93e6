"""The pooled HTTP/1.1 connections of a relay to its upstream.

A base URL may lead only to public IP addresses, unless the operator allows internal ones. The host is resolved and
checked whenever a connection is opened. Certificates are verified against the host name.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import cast
from urllib.parse import urlsplit

import httptools

from inference_worker.contract.ip_addresses import InternalHost, UnresolvedHost, checked_addresses
from inference_worker.worker.relay.failures import UPSTREAM_ERROR, UpstreamFailed

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 20.0  # shorter than the idle time of common servers
STALE_SECONDS = 2.0  # after which a server that sent nothing may have begun to work on a request
MAX_HEADER_BYTES = 64 * 2**10
MAX_PENDING_BYTES = 2**20  # bytes of a body above which the connection is not read


class UpstreamUnreachable(Exception):
    """Raised if a connection cannot be opened."""


class ConnectionLost(Exception):
    """Raised if a connection ended before its response.

    `is_stale`: it was kept open after an earlier request, and the server closed it immediately: the request can be sent
    again without paying for it twice.
    """

    def __init__(self, *, is_stale: bool) -> None:
        super().__init__("the connection was lost")
        self.is_stale = is_stale


class Origin:
    """The host of a base URL.

    Raises:
        ValueError: it is no https URL of a host; http is possible only with `allow_internal`.
    """

    def __init__(self, base_url: str, *, allow_internal: bool) -> None:
        advice = "use https, a host and a path, without a user, a query or a fragment: https://api.example.com/v1"
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ValueError(f"base_url: {advice}") from None
        is_plain = parts.scheme == "http"
        if (parts.scheme != "https" and not is_plain) or not host or "@" in parts.netloc or not base_url.isascii():
            raise ValueError(f"base_url: {advice}")
        if parts.query or parts.fragment or any(char <= " " for char in base_url):
            raise ValueError(f"base_url: {advice}")
        if is_plain and not allow_internal:
            raise ValueError("base_url: credentials need https. Use an https URL, or set allow_internal")
        self.host = host
        self.port = port or (80 if is_plain else 443)
        self.has_tls = not is_plain
        self.authority = parts.netloc
        self.path = parts.path.rstrip("/")
        self.allow_internal = allow_internal


class UpstreamConnection(asyncio.Protocol):
    """One connection. It carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_closed = False
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._requests = 0
        self._sent_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status, self.headers = 0, {}
        self._parser = httptools.HttpResponseParser(self)
        self._header_bytes = 0
        self._body: deque[bytes] = deque()
        self._pending = 0
        self._has_head = self._is_complete = self._is_reusable = self._is_paused = False
        self._has_data = False  # data of this response has arrived
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def send(self, request: bytes) -> None:
        """Send a request, and wait for the response's status and headers.

        Raises:
            ConnectionLost: the connection ended before.
        """
        self._begin()
        self._requests += 1
        self._sent_at = time.monotonic()
        if self.is_closed or self.transport is None or self.transport.is_closing():
            raise ConnectionLost(is_stale=self._requests > 1)
        self.transport.write(request)
        while not self._has_head:
            await self._wait()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            ConnectionLost: the connection ended before the body.
        """
        while True:
            if self._body:
                data = b"".join(self._body) if len(self._body) > 1 else self._body[0]
                self._body.clear()
                self._pending = 0
                if self._is_paused and self.transport is not None:
                    self._is_paused = False
                    self.transport.resume_reading()
                yield data
            elif self._is_complete:
                return
            else:
                await self._wait()

    @property
    def is_reusable(self) -> bool:
        """Return whether the response has ended and the connection can carry another request."""
        return self._is_complete and self._is_reusable and not self.is_closed

    def close(self) -> None:
        self.is_closed = True
        if self.transport is not None:
            self.transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._body:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Methods of `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._is_complete:  # it belongs to no request
            self.close()
            return
        self._has_data = True
        if not self._has_head:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail()
        if not self._has_head and self._header_bytes > MAX_HEADER_BYTES:
            self._fail()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if exc is None and self._has_head and not self._is_complete and self._ends_with_connection():
            self._is_complete = True
        elif not self._is_complete:
            is_early = not self._has_data and time.monotonic() - self._sent_at <= STALE_SECONDS
            self._error = self._error or ConnectionLost(is_stale=self._requests > 1 and is_early)
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Return whether the body has no length, so that the end of the connection is its end."""
        return (
            "content-length" not in self.headers and "chunked" not in self.headers.get("transfer-encoding", "").lower()
        )

    def _fail(self) -> None:
        self._error = ConnectionLost(is_stale=False)
        self.close()

    # Methods that the parser calls.

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._is_reusable = False  # more than one response was sent

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer, or of a surplus response
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._has_head:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response
            self.headers = {}
            return
        self._is_reusable = self._parser.should_keep_alive()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        if self._is_complete:
            return
        self._body.append(body)
        self._pending += len(body)
        if self._pending > MAX_PENDING_BYTES and not self._is_paused and self.transport is not None:
            self._is_paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self._is_complete = True


class ConnectionPool:
    """The connections to one origin. The number of concurrent requests is limited by the caller."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._tls = ssl.create_default_context() if origin.has_tls else None
        self._idle: list[UpstreamConnection] = []  # the last one was used last

    async def take(self, *, is_new: bool = False) -> UpstreamConnection:
        """Return a connection, an idle one unless `is_new`.

        Raises:
            UpstreamUnreachable: it cannot be opened.
            UpstreamFailed: the host's address is internal, and the deployment does not allow that.
        """
        while self._idle and not is_new:
            connection = self._idle.pop()
            if not connection.is_closed and time.monotonic() - connection.idle_since < KEEP_ALIVE_SECONDS:
                return connection
            connection.close()
        return await self._open()

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep the connection for another request, or close it if its response has not ended."""
        if not connection.is_reusable:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        while self._idle[0].is_closed or connection.idle_since - self._idle[0].idle_since > KEEP_ALIVE_SECONDS:
            self._idle.pop(0).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _open(self) -> UpstreamConnection:
        loop, origin = asyncio.get_running_loop(), self._origin
        failure: Exception | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                for address in await self._resolve():
                    try:
                        _, connection = await loop.create_connection(
                            UpstreamConnection,
                            address,
                            origin.port,
                            ssl=self._tls,
                            server_hostname=origin.host if origin.has_tls else None,
                        )
                    except (OSError, ssl.SSLError) as exc:
                        failure = exc
                    else:
                        return connection
        except TimeoutError as exc:
            failure = exc
        raise UpstreamUnreachable(str(failure)) from failure

    async def _resolve(self) -> list[str]:
        origin = self._origin
        try:
            return await asyncio.to_thread(
                checked_addresses, origin.host, origin.port, allow_internal=origin.allow_internal
            )
        except UnresolvedHost as exc:
            raise UpstreamUnreachable("the host's name has no address") from exc
        except InternalHost as exc:
            message = "The address of the model's provider is internal. An operator can allow it with allow_internal."
            raise UpstreamFailed(UPSTREAM_ERROR, message) from exc
