"""Compressed request bodies and responses (gzip, zstd). Limits of bodies apply to the decompressed bytes."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Protocol

import zstandard

from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_body import too_large

SLICE_BYTES = 2**16  # decompressed in one iteration of the event loop
MAX_MEMBERS = 10_000  # members of a gzip body, or frames of a zstd body
_MEMBER_COST = 2**10  # bytes that take about as long to decompress as the start of a member
MIN_COMPRESSED_BYTES = 1024  # smaller responses are not compressed
MAX_INLINE_BYTES = 2**16  # larger responses are compressed in a thread
LEVEL = 1  # further levels take several times as long for a few percent
_GZIP = 16 + zlib.MAX_WBITS
# A zstd decompressor has no limit of its output. Each block of up to 128 KiB has a header of 3 bytes and at least one
# byte, so an input of this size becomes at most 8 MiB.
_ZSTD_INPUT_BYTES = 256
_ZSTD_WINDOW_BYTES = 2**23  # the largest window of HTTP bodies (RFC 9659)
_QUALITY = re.compile(r"q=([01](?:\.\d{0,3})?)")


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
    if encoding in (b"gzip", b"x-gzip"):
        return _decompress_pieces(pieces, max_bytes, _GzipDecoder())
    if encoding == b"zstd":
        return _decompress_pieces(pieces, max_bytes, _ZstdDecoder())
    raise ApiError(
        "unsupported_encoding",
        f"The content encoding {encoding[:40].decode('latin-1')!r} is not supported. Use gzip or zstd, or none.",
    )


class _Decoder(Protocol):
    """A decompressor of one body, as it arrives. A body has one or more members, called frames in zstd.

    members: how many have begun.
    """

    members: int

    def parts(self, piece: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of the next piece, in parts of at most `SLICE_BYTES`."""

    @property
    def is_complete(self) -> bool:
        """Return whether the last member has ended."""


class _GzipDecoder:
    def __init__(self) -> None:
        self.members = 1
        self._decoder = zlib.decompressobj(_GZIP)

    def parts(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            if self._decoder.eof:
                self.members += 1
                self._decoder = zlib.decompressobj(_GZIP)
            yield self._decoder.decompress(piece, SLICE_BYTES)
            piece = self._decoder.unconsumed_tail or self._decoder.unused_data

    @property
    def is_complete(self) -> bool:
        return self._decoder.eof


class _ZstdDecoder:
    def __init__(self) -> None:
        self.members = 1
        self._frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._decoder = self._frames.decompressobj()

    def parts(self, piece: bytes) -> Iterator[bytes]:
        for start in range(0, len(piece), _ZSTD_INPUT_BYTES):
            compressed = piece[start : start + _ZSTD_INPUT_BYTES]
            while compressed:
                if self._decoder.eof:
                    self.members += 1
                    self._decoder = self._frames.decompressobj()
                part = self._decoder.decompress(compressed)
                yield from (part[at : at + SLICE_BYTES] for at in range(0, max(1, len(part)), SLICE_BYTES))
                compressed = self._decoder.unused_data

    @property
    def is_complete(self) -> bool:
        return self._decoder.eof


async def _decompress_pieces(pieces: AsyncIterator[bytes], max_bytes: int, decoder: _Decoder) -> AsyncIterator[bytes]:
    size = in_iteration = 0
    try:
        async for piece in pieces:
            in_iteration = 0
            for part in decoder.parts(piece):
                size += len(part)
                if size > max_bytes:
                    raise too_large(max_bytes)
                if decoder.members > MAX_MEMBERS:
                    message = f"The request body has more than {MAX_MEMBERS:,} gzip members or zstd frames."
                    raise ApiError("invalid_encoding", message)
                cost = max(len(part), _MEMBER_COST)
                if in_iteration + cost > SLICE_BYTES + _MEMBER_COST:
                    in_iteration = 0
                    await asyncio.sleep(0)
                in_iteration += cost
                if part:
                    yield part
    except (zlib.error, zstandard.ZstdError):
        raise _reject_damaged() from None
    if not decoder.is_complete:
        raise _reject_damaged()


def accepted_encoding(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the encoding of a compressed response that the client prefers; None if it accepts none."""
    accepted: dict[str, float] = {}
    for item in headers.get(b"accept-encoding", b"").decode("latin-1").lower().split(","):
        name, _, parameters = item.partition(";")
        quality = _QUALITY.search(parameters)
        accepted[name.strip().removeprefix("x-")] = float(quality.group(1)) if quality else 1.0
    others = accepted.get("*", 0.0)
    quality_of = {name: accepted.get(name, others) for name in ("zstd", "gzip")}  # zstd takes less time and space
    best = max(quality_of, key=quality_of.__getitem__)
    return best if quality_of[best] else None


async def compress(body: bytes, encoding: str) -> bytes:
    """Return the body compressed with gzip or zstd."""
    compress = _zstd if encoding == "zstd" else _gzip
    return compress(body) if len(body) <= MAX_INLINE_BYTES else await asyncio.to_thread(compress, body)


def _gzip(body: bytes) -> bytes:
    encoder = zlib.compressobj(LEVEL, wbits=_GZIP)
    return encoder.compress(body) + encoder.flush()


def _zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def _reject_damaged() -> ApiError:
    return ApiError("invalid_encoding", "The request body is not complete gzip or zstd data. Compress it again.")
