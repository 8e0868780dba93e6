"""The header of a GGUF file, read without numpy. The file is not trusted: every length is checked."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_STRING_BYTES = 1 << 20
MAX_ARRAY_ITEMS = 1 << 22  # items of all arrays together; a vocabulary of 256,000 tokens has about 1.5 million
MAX_HEADER_BYTES = 1 << 26
_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFError(Exception):
    """An error: the file is not a GGUF file, is damaged or exceeds a limit."""


class TensorEntry(NamedTuple):
    """A tensor as the header describes it. `shape` is (out, in), outermost first."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int  # bytes from the start of the tensors' data


class HeaderCursor:
    """A position in the file that advances as values are read, up to the end of the header."""

    def __init__(self, data: mmap.mmap, *, skip_arrays: bool = False) -> None:
        """Create a cursor. With `skip_arrays`, arrays are checked and their value is None, which takes less memory."""
        self.data = data
        self.skip_arrays = skip_arrays
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self._items_left = MAX_ARRAY_ITEMS

    def take(self, size: int) -> bytes:
        if size < 0 or self.position + size > self.end:
            if self.end == MAX_HEADER_BYTES:
                raise ValueError(f"the header exceeds the limit of {MAX_HEADER_BYTES >> 20} MiB")
            raise ValueError("the header ends too early")
        piece = self.data[self.position : self.position + size]
        self.position += size
        return piece

    def number(self, format_code: str) -> Any:
        return struct.unpack(format_code, self.take(struct.calcsize(format_code)))[0]

    def count(self, noun: str, maximum: int) -> int:
        value = int(self.number("<Q"))
        if value > maximum:
            raise ValueError(f"{value} {noun} exceed the limit of {maximum}")
        return value

    def string(self) -> str:
        return self.take(self.count("bytes in a string", MAX_STRING_BYTES)).decode("utf-8", "replace")

    def value(self, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self.number(_SCALARS[value_type])
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            raise ValueError(f"value type {value_type} is not known")
        item = int(self.number("<I"))
        count = self.count("items in arrays", self._items_left)
        self._items_left -= count
        if item == _STRING and self.skip_arrays:
            for _ in range(count):
                self.take(self.count("bytes in a string", MAX_STRING_BYTES))
            return None
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise ValueError(f"arrays of value type {item} are not supported")
        format_code = _SCALARS[item]
        stored = self.take(count * struct.calcsize(format_code))
        return None if self.skip_arrays else list(struct.unpack(f"<{count}{format_code[1]}", stored))


def header_of(path: Path) -> bytes:
    """Return the bytes of a GGUF file before the tensors' data.

    Raises:
        GGUFError: the file is damaged or exceeds a limit.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = HeaderCursor(data, skip_arrays=True)
            read_header(cursor)
            return data[: cursor.position]
    except (ValueError, OverflowError, struct.error) as exc:
        raise GGUFError(f"{path}: {exc}") from None


def read_header(cursor: HeaderCursor) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return the metadata and the tensors.

    Raises:
        ValueError, OverflowError, struct.error: the header is damaged or exceeds a limit.
    """
    if cursor.take(4) != _MAGIC:
        raise ValueError("this is not a GGUF file")
    if (version := cursor.number("<I")) not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported; want 2 or 3")
    tensor_count = cursor.count("tensors", MAX_TENSORS)
    key_count = cursor.count("keys", MAX_KEYS)
    fields: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        fields[key] = cursor.value(int(cursor.number("<I")))
    return fields, [_read_entry(cursor) for _ in range(tensor_count)]


def _read_entry(cursor: HeaderCursor) -> TensorEntry:
    name = cursor.string()
    dimensions = int(cursor.number("<I"))
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions; want 1 to 4")
    shape = tuple(int(cursor.number("<Q")) for _ in range(dimensions))[::-1]  # stored innermost first
    if any(not 1 <= side <= 1 << 32 for side in shape):
        raise ValueError(f"tensor {name} has the invalid shape {shape}")
    return TensorEntry(name, shape, int(cursor.number("<I")), int(cursor.number("<Q")))
