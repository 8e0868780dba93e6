"""A request body that is received on demand. Until `pieces` is iterated, the server buffers only a few KB of it."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Mapping
from typing import Any

from millrace.gateway.core.errors import ApiError

# How much of a rejected request's body is read and dropped. Clients that send before they read get the response then.
DISCARD_BYTES = 16 * 2**20
DISCARD_SECONDS = 10.0
DISCARD_PAUSE_SECONDS = 0.01  # between two pieces of a body, to keep the event loop free
DISCARDED_PER_SECOND = 400  # pieces of all bodies
_discarding: set[RequestBody] = set()


async def without_mark(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a JSON body without a byte order mark at its start."""
    start: bytes | None = b""
    async for piece in pieces:
        if start is None:
            yield piece
        elif len(start := start + piece) >= len(BOM_UTF8):
            if rest := start.removeprefix(BOM_UTF8):
                yield rest
            start = None
    if start:
        yield start


class ClientGone(Exception):
    """The client has closed the connection."""


class RequestBody:
    """The body of one HTTP request."""

    def __init__(self, method: str, headers: Mapping[bytes, bytes], receive: Any) -> None:
        self._receive = receive
        length = headers.get(b"content-length", b"")
        self.declared = int(length) if length.isdigit() and len(length) < 20 else None
        self.received = 0  # bytes
        self.unread = method == "POST" or bool(self.declared) or b"transfer-encoding" in headers
        self.gone = False  # whether the client has disconnected
        self.over = asyncio.Event()  # set when nothing more is received, so the connection can be watched for its end
        if not self.unread:
            self.over.set()

    @property
    def must_close(self) -> bool:
        """Return whether the rest of the body is, or may be, too large to be discarded."""
        return self.unread and (self.declared is None or self.declared > DISCARD_BYTES)

    async def pieces(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive.

        Raises:
            ApiError: 413, the body has more than `max_bytes` bytes.
            ClientGone: the client has closed the connection.
        """
        if (self.declared or 0) > max_bytes:
            raise too_large(max_bytes)
        while self.unread:
            piece = await self._next()
            if self.received > max_bytes:
                raise too_large(max_bytes)
            yield piece

    async def discard(self) -> None:
        """Receive and drop the rest of the body, up to DISCARD_BYTES and DISCARD_SECONDS."""
        end = self.received + DISCARD_BYTES
        _discarding.add(self)
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while self.unread and self.received < end:
                    await self._next()
                    if self.unread:
                        await asyncio.sleep(max(DISCARD_PAUSE_SECONDS, len(_discarding) / DISCARDED_PER_SECOND))
        except (TimeoutError, ClientGone):
            pass
        finally:
            _discarding.discard(self)

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self.gone, self.unread = True, False
            raise ClientGone
        piece: bytes = message.get("body", b"")
        self.received += len(piece)
        self.unread = message.get("more_body", False)
        if not self.unread:
            self.over.set()
        return piece


def too_large(max_bytes: int) -> ApiError:
    return ApiError("request_too_large", f"The request body is larger than {max_bytes} bytes.")
