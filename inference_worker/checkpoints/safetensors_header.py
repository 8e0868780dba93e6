"""The header of a safetensors file, read without torch. The file is not trusted: every length is checked."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.model_config import ModelError

MAX_HEADER_BYTES = 16 << 20  # bytes of one file's header; parsing takes about 10 times as much memory
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 8
MAX_SIDE = 1 << 40
_LENGTH = struct.Struct("<Q")
# Bytes of a number.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header describes it."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the file by name, without reading their data.

    Raises:
        ModelError: the file is damaged or incomplete, or exceeds a limit.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else None
            if length is None or length > size - _LENGTH.size:
                raise ValueError("it is truncated, or not a safetensors file")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")
            content = file.read(length)
        return parse_header(content, size - _LENGTH.size - length)
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not a complete safetensors file: {exc}") from None


def parse_header(content: bytes, data_bytes: int) -> dict[str, StoredTensor]:
    """Return the tensors of a header before `data_bytes` of data.

    Raises:
        ValueError, RecursionError: the header is damaged or exceeds a limit.
    """
    header = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{len(header)} tensors exceed the limit of {MAX_TENSORS}")
    entries, places = {}, []
    for name, fields in header.items():
        entry, begin, end = _read_entry(name, fields)
        entries[name] = entry
        places.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(places):
        if begin != position:
            raise ValueError(f"the data of tensor {name!r:.80} overlaps another one or leaves a gap")
        position = end
    if position > data_bytes:
        raise ValueError(f"it has {data_bytes} of {position} bytes of data; is the download complete?")
    if position < data_bytes:
        raise ValueError(f"it has {data_bytes - position} bytes after the last tensor")
    return entries


def _read_entry(name: str, fields: Any) -> tuple[StoredTensor, int, int]:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r:.80} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {name!r:.80} has the unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r:.80} has the invalid shape {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r:.80} has the invalid data_offsets {offsets!r:.80}")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"tensor {name!r:.80} has {end - begin} bytes, which do not fit its shape and dtype")
    return StoredTensor(dtype, tuple(shape), end - begin), begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIDE for value in values
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key of the header occurs twice")
    return result
