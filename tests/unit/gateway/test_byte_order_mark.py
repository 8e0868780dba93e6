"""A byte order mark before JSON, as some programs on Windows write it, is ignored."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator

import pytest

from millrace.gateway.core.request_body import without_mark


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'{"model": "m"}', "{é}".encode(), BOM_UTF8[:2], b"{" + BOM_UTF8])
async def test_the_mark_is_removed_from_the_start_of_a_body(body: bytes, size: int) -> None:
    for sent in (body, BOM_UTF8 + body):
        assert b"".join([piece async for piece in without_mark(pieces(sent, size))]) == body
