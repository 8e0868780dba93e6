"""Reading a GGUF file's header and tensors. The file is untrusted: every length is checked before it is believed."""

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
    """The file is no GGUF, is damaged, or is larger in some way than a model can be."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor's numbers are. `shape` is (out, in), outermost first."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the file's beginning
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
            self.header_bytes = cursor.at
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

    def rows(self, tensor: GGUFTensor, rows_at_once: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the tensor's numbers as float32 [rows, columns], some rows at a time, so that memory stays bounded."""
        columns = tensor.shape[-1]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        row_bytes = tensor.size // max(rows, 1)
        for start in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - start)
            at = tensor.offset + start * row_bytes
            raw = np.frombuffer(self._map[at : at + count * row_bytes], dtype=np.uint8).reshape(count, row_bytes)
            try:
                yield np.asarray(gguf.dequantize(raw, tensor.kind), dtype=np.float32).reshape(count, columns)
            except NotImplementedError as exc:
                raise GGUFError(f"{self.path}: tensor {tensor.name}: {exc}") from None


class _Cursor:
    """A place in the file that moves forward as values are read, and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > self.end:
            raise ValueError("the header runs past its end")
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, most: int) -> int:
        value = int(self.number("<Q"))
        if value > most:
            raise ValueError(f"{value} {what} are too many; at most {most}")
        return value

    def string(self) -> str:
        return self.take(self.count("bytes in a string", MAX_STRING_BYTES)).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown kind of value {kind}")
        item = int(self.number("<I"))
        count = self.count("items in an array", MAX_ARRAY_ITEMS)
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise ValueError(f"arrays of kind {item} are not supported")
        form = _SCALARS[item]
        return list(struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form))))


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if cursor.take(4) != _MAGIC:
        raise ValueError("this is no GGUF file")
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
        raise ValueError(f"alignment {alignment!r} is not possible")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        size = _byte_size(name, shape, kind)
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        if start + offset + size > len(cursor.data):
            raise ValueError(f"tensor {name} runs past the end of the file; is the download complete?")
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, size)
    return fields, tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = cursor.string()
    dimensions = int(cursor.number("<I"))
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions; want 1 to 4")
    shape = tuple(int(cursor.number("<Q")) for _ in range(dimensions))[::-1]  # written innermost first
    if any(not 1 <= side <= 1 << 32 for side in shape):
        raise ValueError(f"tensor {name} has the impossible shape {shape}")
    return name, shape, gguf.GGMLQuantizationType(cursor.number("<I")), int(cursor.number("<Q"))


def _byte_size(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} do not divide into blocks of {block}")
    total = size
    for side in (*shape[:-1], shape[-1] // block):
        total *= side
    return total
