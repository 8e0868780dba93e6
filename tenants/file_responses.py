"""Responses that send an open file at the speed at which the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO

from django.http import StreamingHttpResponse

_PART_BYTES = 2**18


def file_response(content: IO[bytes], size: int, name: str, content_type: str) -> StreamingHttpResponse:
    """Return the rest of an open file as a download with this name. The file is closed at the end.

    Args:
        size: bytes until the end of the file.
    """
    response = StreamingHttpResponse(_read_parts(content), content_type=content_type)
    response.headers["Content-Length"] = str(size)
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


async def _read_parts(content: IO[bytes]) -> AsyncIterator[bytes]:
    try:
        while part := await asyncio.to_thread(content.read, _PART_BYTES):
            yield part
    finally:
        content.close()
