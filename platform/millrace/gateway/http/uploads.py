"""Bodies too large for memory: written to the disk as they come, and read from there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from django.core.exceptions import SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer

BUFFER_BYTES = 2**20


class UploadConsumer(HttpConsumer):
    """Its `handle` takes the body by `spooled`."""

    most_bytes = 0

    @asynccontextmanager
    async def spooled(self) -> AsyncIterator[Path]:
        """Write the complete body to a file, which is removed afterwards. An Idempotency-Key's first call continues.

        Raises:
            ApiError: 413; 503, the disk has no space for it.
        """
        path = self.gateway.storage.part("body")
        try:
            digest = hashlib.sha256()
            with await asyncio.to_thread(path.open, "wb", BUFFER_BYTES) as file:
                # The client sends no faster than the disk writes: nothing more is received until a piece is written.
                async for part in self.body.pieces(self.most_bytes):
                    self.gateway.disk.require_space()
                    digest.update(part)
                    await asyncio.to_thread(file.write, part)
            await self.do_once(digest.digest())
            yield path
        finally:
            path.unlink(missing_ok=True)


class _ToFile(FileUploadHandler):
    """Writes the field `file` to an open file."""

    def __init__(self, target: IO[bytes]) -> None:
        super().__init__()
        self._target = target
        self.found: str | None = None
        self.size = 0
        self.lines = 0
        self.last = b"\n"

    def new_file(self, field_name: str, file_name: str, *args: Any, **kwargs: Any) -> None:
        if field_name != "file" or self.found is not None:
            raise MultiPartParserError(f"Only one file is taken, in the field 'file', not in {field_name!r}.")
        self.found = file_name
        super().new_file(field_name, file_name, *args, **kwargs)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self._target.write(raw_data)
        self.size += len(raw_data)
        self.lines += raw_data.count(b"\n")
        self.last = raw_data[-1:] or self.last

    def file_complete(self, file_size: int) -> None:
        self.lines += self.last != b"\n"


def read_form(body: Path, content_type: str, target: IO[bytes]) -> tuple[dict[str, str], _ToFile]:
    """Copy a multipart body's file to `target`; its other fields, and what is known of the file.

    Raises:
        ApiError: 400, it is no such body.
    """
    handler = _ToFile(target)
    head = {"CONTENT_TYPE": content_type, "CONTENT_LENGTH": body.stat().st_size}
    with body.open("rb") as file:
        try:
            fields, _ = MultiPartParser(head, file, [handler], "utf-8").parse()
        except (MultiPartParserError, SuspiciousOperation) as exc:
            raise ApiError("invalid_value", f"The body is no multipart form with a file: {exc}") from None
    if handler.found is None:
        raise invalid("file", "A file is required, in the field 'file'.", "missing_required_parameter")
    return {name: str(value) for name, value in fields.items()}, handler
