"""Compressed bodies: their limits count decompressed bytes, and damaged ones are rejected."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator

import pytest

from millrace.gateway.core.content_encoding import SLICE_BYTES, accepts_gzip, compressed, decoded_pieces
from millrace.gateway.core.errors import ApiError


async def pieces(body: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def decoded(body: bytes, encoding: bytes = b"gzip", max_bytes: int = 2**20) -> list[bytes]:
    return [piece async for piece in decoded_pieces({b"content-encoding": encoding}, pieces(body), max_bytes)]


@pytest.mark.parametrize("size", [0, 1, 100_000, 3 * SLICE_BYTES])
async def test_a_body_is_decompressed_in_slices(size: int) -> None:
    body = b"x" * size
    found = await decoded(gzip.compress(body))
    assert b"".join(found) == body
    assert max(map(len, found), default=0) <= SLICE_BYTES
    assert b"".join(await decoded(body, b"identity")) == body


async def test_the_limit_counts_decompressed_bytes() -> None:
    bomb = gzip.compress(b"\0" * 2**24)
    received = 0
    with pytest.raises(ApiError) as exc_info:
        async for piece in decoded_pieces({b"content-encoding": b"gzip"}, pieces(bomb), 2**17):
            received += len(piece)
    assert (exc_info.value.status, exc_info.value.code) == (413, "request_too_large")
    assert received <= 2**17


@pytest.mark.parametrize(
    "body", [b"{}", gzip.compress(b"{}", mtime=0)[:-3], gzip.compress(b"{}", mtime=0) + b"more", b""]
)
async def test_a_damaged_body_is_rejected(body: bytes) -> None:
    with pytest.raises(ApiError) as exc_info:
        await decoded(body)
    assert (exc_info.value.status, exc_info.value.code) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", [b"zstd", b"br", b"gzip, gzip"])
async def test_other_encodings_are_rejected(encoding: bytes) -> None:
    with pytest.raises(ApiError) as exc_info:
        await decoded(b"", encoding)
    assert exc_info.value.status == 415


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (b"", False),
        (b"gzip", True),
        (b"gzip, deflate, br", True),
        (b"br;q=1.0, gzip;q=0.8", True),
        (b"*", True),
        (b"gzip;q=0", False),
        (b"gzip;q=0.0, br", False),
        (b"deflate", False),
    ],
)
def test_accepted_encodings(header: bytes, accepted: bool) -> None:
    assert accepts_gzip({b"accept-encoding": header}) is accepted


async def test_responses_are_compressed() -> None:
    for size in (2000, 200_000):
        assert gzip.decompress(await compressed(b"x" * size)) == b"x" * size
