"""A reader of a GGUF file's header and tensors. The file is not trusted: every length is checked."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_STRING_BYTES = 1 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_HEADER_BYTES = 1 << 28
_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFError(Exception):
    """An error: the file is not a GGUF file, is damaged or exceeds a limit."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The location of one tensor's data. `shape` is (out, in), outermost first."""

    name: str
    shape: tuple[int, ...]
    tensor_type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GGUFFile:
    """An open GGUF file: `fields` is its metadata, `tensors` its tensors by name. Close it, or use it with `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            cursor = _Cursor(self._map)
            self.fields, self.tensors = _read_header(cursor)
            self.header_bytes = cursor.position
        except (ValueError, KeyError, OverflowError, struct.error) as exc:
            self._file.close()
            raise GGUFError(f"{path}: {exc}") from None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()

    def header(self) -> bytes:
        """Return the bytes before the tensors' data."""
        return self._map[: self.header_bytes]

    def rows(self, tensor: GGUFTensor, rows_per_call: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the tensor's numbers as float32 [rows, columns], in groups of rows to bound memory."""
        columns = tensor.shape[-1]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        row_bytes = tensor.size // max(rows, 1)
        for start in range(0, rows, rows_per_call):
            count = min(rows_per_call, rows - start)
            position = tensor.offset + start * row_bytes
            raw = np.frombuffer(self._map[position : position + count * row_bytes], dtype=np.uint8).reshape(
                count, row_bytes
            )
            try:
                yield np.asarray(gguf.dequantize(raw, tensor.tensor_type), dtype=np.float32).reshape(count, columns)
            except NotImplementedError as exc:
                raise GGUFError(f"{self.path}: tensor {tensor.name}: {exc}") from None


class _Cursor:
    """A position in the file that advances as values are read, up to the end of the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def take(self, size: int) -> bytes:
        if size < 0 or self.position + size > self.end:
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
        count = self.count("items in an array", MAX_ARRAY_ITEMS)
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise ValueError(f"arrays of value type {item} are not supported")
        format_code = _SCALARS[item]
        return list(struct.unpack(f"<{count}{format_code[1]}", self.take(count * struct.calcsize(format_code))))


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
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
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise ValueError(f"alignment {alignment!r} is invalid")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, tensor_type, offset in entries:
        size = _byte_size(name, shape, tensor_type)
        if name in tensors:
            raise ValueError(f"tensor {name} occurs twice")
        if start + offset + size > len(cursor.data):
            raise ValueError(f"tensor {name} runs past the end of the file; is the download complete?")
        tensors[name] = GGUFTensor(name, shape, tensor_type, start + offset, size)
    return fields, tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = cursor.string()
    dimensions = int(cursor.number("<I"))
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions; want 1 to 4")
    shape = tuple(int(cursor.number("<Q")) for _ in range(dimensions))[::-1]  # stored innermost first
    if any(not 1 <= side <= 1 << 32 for side in shape):
        raise ValueError(f"tensor {name} has the invalid shape {shape}")
    return name, shape, gguf.GGMLQuantizationType(cursor.number("<I")), int(cursor.number("<Q"))


def _byte_size(name: str, shape: tuple[int, ...], tensor_type: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} do not divide into blocks of {block}")
    total = size
    for side in (*shape[:-1], shape[-1] // block):
        total *= side
    return total
