"""The contents of responses that are sent in parts."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync


def read_download(response: Any) -> bytes:
    """Return the whole content of a streaming response."""
    if not response.is_async:
        return b"".join(response.streaming_content)

    async def read() -> bytes:
        return b"".join([part async for part in response.streaming_content])

    return async_to_sync(read)()
