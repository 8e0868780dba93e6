"""A request's body, received on demand: until `pieces` is iterated, the server holds a few KB of it at most."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from millrace.gateway.core.errors import ApiError

# What is discarded of a body after its request was refused, so that clients that send before they read get the answer.
DISCARD_BYTES = 16 * 2**20
DISCARD_SECONDS = 10.0
DISCARD_PAUSE_SECONDS = 0.01  # between two pieces of a body: discarding must not keep the event loop busy
DISCARDED_PER_SECOND = 400  # pieces of all bodies together
_discarding: set[RequestBody] = set()


class ClientGone(Exception):
    """The client has closed the connection."""


class RequestBody:
    """The body of one HTTP request."""

    def __init__(self, method: str, headers: Mapping[bytes, bytes], receive: Any) -> None:
        self._receive = receive
        length = headers.get(b"content-length", b"")
        self.declared = int(length) if length.isdigit() and len(length) < 20 else None
        self.received = 0  # bytes that were taken from the server
        self.unread = method == "POST" or bool(self.declared) or b"transfer-encoding" in headers
        self.gone = False  # the client is
        self.over = asyncio.Event()  # nothing more is received here: the connection may be watched for its end
        if not self.unread:
            self.over.set()

    @property
    def must_close(self) -> bool:
        """Whether what is left of the body is too much to be discarded, or may be."""
        return self.unread and (self.declared is None or self.declared > DISCARD_BYTES)

    async def pieces(self, most: int) -> AsyncIterator[bytes]:
        """Receive the body, piece by piece.

        Raises:
            ApiError: 413, it has more than `most` bytes.
            ClientGone
        """
        if (self.declared or 0) > most:
            raise too_large(most)
        while self.unread:
            piece = await self._next()
            if self.received > most:
                raise too_large(most)
            yield piece

    async def discard(self) -> None:
        """Receive what is left, and keep none of it: for a few seconds, and not without bound."""
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


def too_large(most: int) -> ApiError:
    return ApiError("request_too_large", f"The request body is larger than {most} bytes.")
