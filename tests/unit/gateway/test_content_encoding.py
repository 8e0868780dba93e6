"""Compressed bodies: their limits count decompressed bytes, and damaged ones are rejected."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Callable

import pytest
import zstandard

from millrace.gateway.core.content_encoding import MAX_MEMBERS, SLICE_BYTES, accepted_encoding, compress, decoded_pieces
from millrace.gateway.core.errors import ApiError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "zstd": zstandard.decompress}
encodings = pytest.mark.parametrize("encoding", ["gzip", "zstd"])


async def pieces(body: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def decoded(body: bytes, encoding: bytes = b"gzip", max_bytes: int = 2**20) -> list[bytes]:
    return [piece async for piece in decoded_pieces({b"content-encoding": encoding}, pieces(body), max_bytes)]


@encodings
@pytest.mark.parametrize("size", [0, 1, 100_000, 3 * SLICE_BYTES])
async def test_a_body_is_decompressed_in_slices(size: int, encoding: str) -> None:
    body = os.urandom(size // 2) + b"x" * (size - size // 2)
    found = await decoded(COMPRESS[encoding](body), encoding.encode())
    assert b"".join(found) == body
    assert max(map(len, found), default=0) <= SLICE_BYTES
    assert b"".join(await decoded(body, b"identity")) == body


@encodings
async def test_the_limit_counts_decompressed_bytes(encoding: str) -> None:
    bomb = COMPRESS[encoding](b"\0" * 2**24)
    received = 0
    with pytest.raises(ApiError) as exc_info:
        async for piece in decoded_pieces({b"content-encoding": encoding.encode()}, pieces(bomb), 2**17):
            received += len(piece)
    assert (exc_info.value.status, exc_info.value.code) == (413, "request_too_large")
    assert received <= 2**17


async def test_a_zstd_bomb_is_decompressed_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decompressor has no limit of its output, so its input is limited."""
    sizes: list[int] = []
    decoder = zstandard.ZstdDecompressor().decompressobj()

    class Recorder:
        eof, unused_data = False, b""

        def decompress(self, data: bytes) -> bytes:
            part = decoder.decompress(data)
            sizes.append(len(part))
            return part

    class Decompressor:
        def __init__(self, **_: int) -> None:
            pass

        def decompressobj(self) -> Recorder:
            return Recorder()

    monkeypatch.setattr("millrace.gateway.core.content_encoding.zstandard.ZstdDecompressor", Decompressor)
    with pytest.raises(ApiError, match="larger than"):
        await decoded(zstandard.compress(b"\0" * 2**28), b"zstd")
    assert sizes
    assert sum(sizes) <= 2**23


async def test_a_zstd_body_may_not_need_much_memory() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(ApiError, match="not complete"):
        await decoded(compressor.compress(b"{}") + compressor.flush(), b"zstd")


def skippable(content: bytes) -> bytes:
    """Return a skippable frame (RFC 8878, 3.1.2)."""
    return (0x184D2A53).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content


@pytest.mark.parametrize("size", [1, 7, 1000, 2**16])
@pytest.mark.parametrize(
    ("encoding", "before", "between"),
    [
        (b"gzip", b"", b""),
        (b"gzip", gzip.compress(b""), gzip.compress(b"")),
        (b"x-gzip", b"", gzip.compress(b"") * 3),
        (b"zstd", b"", b""),
        (b"zstd", skippable(b"size"), skippable(b"") + zstandard.compress(b"")),
        (b"zstd", skippable(b"x" * 999), zstandard.compress(b"") + skippable(b"y" * 300)),
    ],
)
async def test_a_body_may_have_several_members(encoding: bytes, before: bytes, between: bytes, size: int) -> None:
    compressed = COMPRESS["zstd" if encoding == b"zstd" else "gzip"]
    parts = [b'{"model": ', os.urandom(3000), b"}" * 200_000]
    body = before + between.join(map(compressed, parts)) + between
    found = [piece async for piece in decoded_pieces({b"content-encoding": encoding}, pieces(body, size), 2**20)]
    assert b"".join(found) == b"".join(parts)


@encodings
async def test_the_number_of_members_is_limited(encoding: str) -> None:
    most = COMPRESS[encoding](b"") * (MAX_MEMBERS - 1) + COMPRESS[encoding](b"{}")
    assert b"".join(await decoded(most, encoding.encode())) == b"{}"
    with pytest.raises(ApiError, match="more than 10,000") as exc_info:
        await decoded(COMPRESS[encoding](b"") + most, encoding.encode())
    assert exc_info.value.code == "invalid_encoding"


@encodings
async def test_empty_members_do_not_block_the_event_loop(encoding: str) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = COMPRESS[encoding](b"") * 5000
    [each async for each in decoded_pieces({b"content-encoding": encoding.encode()}, pieces(body, len(body)), 99)]
    counting.cancel()
    assert turns > 50


@encodings
@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, -3), None])
async def test_a_damaged_body_is_rejected(encoding: str, cut: slice | None) -> None:
    complete = COMPRESS[encoding](b"{}")
    for body in (complete + b"more", complete * 2 + complete[:9], b"{}") if cut is None else (complete[cut],):
        for size in (1, 1000):
            with pytest.raises(ApiError) as exc_info:
                [
                    each
                    async for each in decoded_pieces({b"content-encoding": encoding.encode()}, pieces(body, size), 99)
                ]
            assert (exc_info.value.status, exc_info.value.code) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", [b"br", b"gzip, gzip"])
async def test_other_encodings_are_rejected(encoding: bytes) -> None:
    with pytest.raises(ApiError) as exc_info:
        await decoded(b"", encoding)
    assert exc_info.value.status == 415


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (b"", None),
        (b"gzip", "gzip"),
        (b"x-gzip", "gzip"),
        (b"gzip, deflate, br", "gzip"),
        (b"gzip, deflate, br, zstd", "zstd"),
        (b"br;q=1.0, gzip;q=0.8, zstd;q=0.5", "gzip"),
        (b"*", "zstd"),
        (b"*, zstd;q=0", "gzip"),
        (b"gzip;q=0", None),
        (b"gzip;q=0.0, br", None),
        (b"deflate", None),
        (b"identity;q=1, *;q=0", None),
    ],
)
def test_accepted_encodings(header: bytes, accepted: str | None) -> None:
    assert accepted_encoding({b"accept-encoding": header}) == accepted


@encodings
async def test_responses_are_compressed(encoding: str) -> None:
    for size in (2000, 200_000):
        assert DECOMPRESS[encoding](await compress(b"x" * size, encoding)) == b"x" * size
