"""Reading and validation of a batch's input file. Does not import Django, because gateways also read lines."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

MAX_LINES = 50_000
MAX_FILE_BYTES = 200_000_000
MAX_CUSTOM_ID_LENGTH = 512  # characters
MAX_REPORTED_ERRORS = 100  # per file


class BatchFileRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True)
class ParsedLine:
    """A valid line and its position in the file."""

    number: int
    custom_id: str
    byte_offset: int
    size: int


class BadFile(Exception):
    """An error of an input file. `errors` is in OpenAI's format: {code, line, message, param}."""

    def __init__(self, errors: Sequence[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = list(errors)


decode_request = msgspec.json.Decoder(BatchFileRequest).decode


def read_lines(file: IO[bytes], endpoint: str, most_line_bytes: int) -> list[ParsedLine]:
    """Return the requests of a file in order. Empty lines are ignored.

    Raises:
        BadFile: the file has no request or too many, or a line is not valid.
    """
    lines: list[ParsedLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for line, byte_offset, text in _lines(file, most_line_bytes):
        problem = _too_long(most_line_bytes) if len(text) > most_line_bytes else None
        request = None if problem else _decode(text)
        if isinstance(request, BatchFileRequest):
            problem = _line_error(request, endpoint, seen)
            seen.add(request.custom_id)
            lines.append(ParsedLine(len(lines), request.custom_id, byte_offset, len(text)))
        elif request is not None:
            problem = request
        if problem is not None:
            code, message, param = problem
            errors.append({"code": code, "line": line, "message": message, "param": param})
        if len(errors) == MAX_REPORTED_ERRORS:
            break
        if len(lines) > MAX_LINES:
            message = f"A batch has at most {MAX_LINES} requests."
            raise BadFile([{"code": "too_many_requests", "line": line, "message": message, "param": None}])
    if errors:
        raise BadFile(errors)
    if not lines:
        raise BadFile([{"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None}])
    return lines


LineError = tuple[str, str, str | None]


def _lines(file: IO[bytes], most: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number (from 1), byte offset and text of each line that is not empty.

    A line that is too long is cut, and no further lines are read.
    """
    byte_offset = 0
    number = 0
    while text := file.readline(most + 2):
        number += 1
        bare = text.strip()
        if number == 1:
            bare = bare.removeprefix(BOM_UTF8).strip()
        if bare:
            yield number, byte_offset + text.index(bare), bare
        if len(bare) > most:
            return
        byte_offset += len(text)


def _too_long(most: int) -> LineError:
    return "request_too_large", f"This line is longer than {most} bytes.", None


def _decode(text: bytes) -> BatchFileRequest | LineError:
    try:
        return decode_request(text)
    except msgspec.ValidationError as exc:
        return "invalid_request", f"This line is not a valid request: {exc}", None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return "invalid_json_line", f"This line is not valid JSON: {exc}", None


def _line_error(request: BatchFileRequest, endpoint: str, seen: set[str]) -> LineError | None:
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID_LENGTH:
        return "invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID_LENGTH} characters.", "custom_id"
    if "\0" in request.custom_id:
        return "invalid_custom_id", "custom_id must not contain the character NUL.", "custom_id"
    if request.custom_id in seen:
        return "duplicate_custom_id", f"custom_id {request.custom_id!r} was used before in this file.", "custom_id"
    if request.method != "POST":
        return "invalid_method", "method must be POST.", "method"
    if request.url != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint, {endpoint}.", "url"
    if not bytes(request.body).lstrip().startswith(b"{"):
        return "invalid_body", "body must be a JSON object.", "body"
    return None
