"""A reader of a GGUF file's tensors. The file is not trusted: every length is checked."""

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

from inference_worker.checkpoints.gguf_header import GGUFError, HeaderCursor, TensorEntry, read_header


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
            cursor = HeaderCursor(self._map)
            self.fields, entries = read_header(cursor)
            self.tensors = _locate(self.fields, entries, cursor.position, len(self._map))
        except (ValueError, KeyError, OverflowError, struct.error) as exc:
            self._file.close()
            raise GGUFError(f"{path}: {exc}") from None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()

    def blocks(self, tensor: GGUFTensor, rows_per_call: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the tensor's blocks as they are stored, [rows, bytes of a row], in groups of rows."""
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        row_bytes = tensor.size // max(rows, 1)
        for start in range(0, rows, rows_per_call):
            count = min(rows_per_call, rows - start)
            position = tensor.offset + start * row_bytes
            raw = np.frombuffer(self._map[position : position + count * row_bytes], dtype=np.uint8)
            yield raw.reshape(count, row_bytes)

    def rows(self, tensor: GGUFTensor, rows_per_call: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the tensor's numbers as float32 [rows, columns], in groups of rows to bound memory."""
        for raw in self.blocks(tensor, rows_per_call):
            try:
                yield np.asarray(gguf.dequantize(raw, tensor.tensor_type), dtype=np.float32).reshape(len(raw), -1)
            except NotImplementedError as exc:
                raise GGUFError(f"{self.path}: tensor {tensor.name}: {exc}") from None


def _locate(
    fields: dict[str, Any], entries: list[TensorEntry], header_bytes: int, file_bytes: int
) -> dict[str, GGUFTensor]:
    """Return the tensors by name, with their places in the file."""
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise ValueError(f"alignment {alignment!r} is invalid")
    start = -(-header_bytes // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, offset in entries:
        tensor_type = gguf.GGMLQuantizationType(type_number)
        size = _byte_size(name, shape, tensor_type)
        if name in tensors:
            raise ValueError(f"tensor {name} occurs twice")
        if start + offset + size > file_bytes:
            raise ValueError(f"tensor {name} runs past the end of the file; is the download complete?")
        tensors[name] = GGUFTensor(name, shape, tensor_type, start + offset, size)
    return tensors


def _byte_size(name: str, shape: tuple[int, ...], tensor_type: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} do not divide into blocks of {block}")
    total = size
    for side in (*shape[:-1], shape[-1] // block):
        total *= side
    return total
