"""Compressed request bodies and responses (gzip). Limits of bodies apply to the decompressed bytes."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Mapping

from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_body import too_large

SLICE_BYTES = 2**16  # decompressed in one iteration of the event loop
MIN_COMPRESSED_BYTES = 1024  # smaller responses are not compressed
MAX_INLINE_BYTES = 2**16  # larger responses are compressed in a thread
LEVEL = 1  # further levels take several times as long for a few percent
_GZIP = 16 + zlib.MAX_WBITS
_ACCEPTS_GZIP = re.compile(rb"(?:^|,)\s*(?:x-)?(?:gzip|\*)\s*(?:;\s*q=(?!0(?:\.0*)?\s*(?:,|$))[\d.]+\s*)?(?=,|$)", re.I)


def decoded_pieces(
    headers: Mapping[bytes, bytes], pieces: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[bytes]:
    """Yield the decompressed pieces of a body with these headers.

    Raises:
        ApiError: 415, the content encoding is not supported; 413, the body has more than `max_bytes` bytes when
            decompressed; 400, it cannot be decompressed.
    """
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding in (b"identity", b""):
        return pieces
    if encoding not in (b"gzip", b"x-gzip"):
        raise ApiError(
            "unsupported_encoding",
            f"The content encoding {encoding[:40].decode('latin-1')!r} is not supported. Use gzip, or none.",
        )
    return _decompressed(pieces, max_bytes)


async def _decompressed(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    decoder, size = zlib.decompressobj(_GZIP), 0
    try:
        async for piece in pieces:
            while piece:
                part = decoder.decompress(piece, SLICE_BYTES)
                piece = decoder.unconsumed_tail
                if decoder.unused_data:
                    raise _damaged()
                size += len(part)
                if size > max_bytes:
                    raise too_large(max_bytes)
                if part:
                    yield part
                if piece:
                    await asyncio.sleep(0)
    except zlib.error:
        raise _damaged() from None
    if not decoder.eof:
        raise _damaged()


def accepts_gzip(headers: Mapping[bytes, bytes]) -> bool:
    return _ACCEPTS_GZIP.search(headers.get(b"accept-encoding", b"")) is not None


async def compressed(body: bytes) -> bytes:
    """Return the body compressed with gzip."""
    if len(body) <= MAX_INLINE_BYTES:
        return _compress(body)
    return await asyncio.to_thread(_compress, body)


def _compress(body: bytes) -> bytes:
    encoder = zlib.compressobj(LEVEL, wbits=_GZIP)
    return encoder.compress(body) + encoder.flush()


def _damaged() -> ApiError:
    return ApiError("invalid_encoding", "The request body is not one complete gzip stream. Compress it again.")
