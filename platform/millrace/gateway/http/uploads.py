"""Request bodies that are too large for memory: they are written to disk as they arrive and read from there."""

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

from millrace.gateway.core.content_encoding import decoded_pieces
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer

BUFFER_BYTES = 2**20


class UploadConsumer(HttpConsumer):
    """Base class of endpoints that receive the body into a file, with `spooled`."""

    max_bytes = 0

    @asynccontextmanager
    async def spool(self) -> AsyncIterator[Path]:
        """Write the body to a file, which is removed afterwards, and begin the idempotent call if there is one.

        Raises:
            ApiError: 413, the body is too large; 503, the disk is almost full.
        """
        path = self.gateway.storage.part("body")
        try:
            digest = hashlib.sha256()
            with await asyncio.to_thread(path.open, "wb", BUFFER_BYTES) as file:
                # Nothing more is received until a piece is written, so the client is slowed to the disk's speed.
                async for part in decoded_pieces(self.headers, self.body.pieces(self.max_bytes), self.max_bytes):
                    self.gateway.disk.require_space()
                    digest.update(part)
                    await asyncio.to_thread(file.write, part)
            await self.begin_idempotent_call(digest.digest())
            yield path
        finally:
            path.unlink(missing_ok=True)


class _FileWriter(FileUploadHandler):
    """An upload handler that writes the form field `file` to an open file."""

    def __init__(self, target: IO[bytes]) -> None:
        super().__init__()
        self._target = target
        self.file_name: str | None = None
        self.size = 0
        self.lines = 0
        self.last_byte = b"\n"

    def new_file(self, field_name: str, file_name: str, *args: Any, **kwargs: Any) -> None:
        if field_name != "file" or self.file_name is not None:
            raise MultiPartParserError(f"Send exactly one file, in the field 'file', not in {field_name!r}.")
        self.file_name = file_name
        super().new_file(field_name, file_name, *args, **kwargs)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self._target.write(raw_data)
        self.size += len(raw_data)
        self.lines += raw_data.count(b"\n")
        self.last_byte = raw_data[-1:] or self.last_byte

    def file_complete(self, file_size: int) -> None:
        self.lines += self.last_byte != b"\n"


def read_form(body: Path, content_type: str, target: IO[bytes]) -> tuple[dict[str, str], _FileWriter]:
    """Copy a multipart body's file to `target`. Return the other fields and the upload handler.

    Raises:
        ApiError: 400, the body is not a multipart form with a file.
    """
    handler = _FileWriter(target)
    head = {"CONTENT_TYPE": content_type, "CONTENT_LENGTH": body.stat().st_size}
    with body.open("rb") as file:
        try:
            fields, _ = MultiPartParser(head, file, [handler], "utf-8").parse()
        except (MultiPartParserError, SuspiciousOperation) as exc:
            raise ApiError("invalid_value", f"The body is not a multipart form with a file: {exc}") from None
    if handler.file_name is None:
        raise invalid("file", "A file is required, in the field 'file'.", "missing_required_parameter")
    return {name: str(value) for name, value in fields.items()}, handler
