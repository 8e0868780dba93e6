"""Conversion of a GGUF file to a Hugging Face directory, with the weights in bfloat16 or in the file's blocks.

Increment `CONVERTER_VERSION` in model_source.py when the output changes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_worker.checkpoints.gguf_architectures import (
    ROPE_TENSORS,
    TOP_NAMES,
    Architecture,
    architecture_of,
    config_of,
)
from inference_worker.checkpoints.gguf_blocks import KEPT_BLOCKS
from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_file import GGUFFile, GGUFTensor
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.gguf_tokenizer import write_tokenizer
from inference_worker.checkpoints.safetensors_header import MAX_TENSORS

# By their names in generation_config.json, the keys below `general.sampling`.
_SAMPLING_KEYS = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
_BATCH_NUMBERS = 1 << 17  # numbers that are converted at a time, in whole rows or heads
_MAX_INDEX_DIGITS = 6  # digits of a layer's index
_MAX_EXPERTS = 1 << 12  # experts in a layer


@dataclass(frozen=True, slots=True)
class Target:
    """A converted tensor. `dtype` is BF16, or U8 for blocks as the file has them."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype == "BF16" else 1)


def convert(
    file: GGUFFile,
    directory: Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    keep_blocks: bool = False,
) -> None:
    """Write `file` to the empty `directory` as config.json, tokenizer files and model.safetensors.

    Args:
        keep_blocks: keep the matrices of layers in the blocks that the engine can keep. All others are in bfloat16.

    Raises:
        GGUFError: the architecture or tokenizer is not supported, or a tensor is missing or has a wrong shape.
    """
    converter = write_settings(file, directory, keep_blocks=keep_blocks)
    converter.write(directory / "model.safetensors", progress)


def write_settings(file: GGUFFile, directory: Path, *, keep_blocks: bool = False) -> TensorConverter:
    """Write config.json and the tokenizer files to the empty `directory`, and return the converter of the tensors.

    Raises:
        GGUFError: the architecture or tokenizer is not supported, or a tensor is not part of such a model.
    """
    fields = Fields(file)
    architecture = architecture_of(fields)
    config = config_of(fields, architecture)
    if keep_blocks:
        config["quantization_config"] = {"quant_method": "gguf"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    converter = TensorConverter(file, architecture, heads if architecture.is_permuted else {}, keep_blocks)
    converter.targets()
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} | sampling_of(fields),
    )
    write_tokenizer(fields, directory)
    return converter


def sampling_of(fields: Fields) -> dict[str, float]:
    """Return the recommended sampling parameters, by their names in generation_config.json."""
    values = {name: fields.file.fields.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@dataclass(frozen=True)
class TensorConverter:
    """The conversion of a file's tensors. `permuted` has the heads of the parts whose rows change their order."""

    file: GGUFFile
    architecture: Architecture
    permuted: dict[str, int]
    keep_blocks: bool = False

    def write(self, path: Path, progress: Callable[[int, int], None] | None) -> None:
        """Write the safetensors file in groups of rows, so that memory use does not depend on the model's size."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        total = 0
        for target in self.targets():
            end = total + target.num_bytes
            header[target.name] = {"dtype": target.dtype, "shape": target.shape, "data_offsets": [total, end]}
            total = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        done = 0
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in self._sources():
                for data in self._convert(tensor):
                    out.write(data)
                    done += len(data)
                    if progress is not None:
                        progress(done, total)

    def _convert(self, tensor: GGUFTensor) -> Iterator[bytes]:
        """Yield the data of a converted tensor, in groups of rows."""
        part = _part(tensor)
        heads = self.permuted.get(part, 0)
        head_rows = _count_head_rows(tensor.shape[0], heads) if heads else 1
        rows = head_rows * max(1, _BATCH_NUMBERS // (head_rows * tensor.shape[-1]))
        if self._keeps(tensor):
            for blocks in self.file.blocks(tensor, rows):
                yield (_unpermute(blocks, head_rows) if heads else blocks).tobytes()
            return
        for values in self.file.rows(tensor, rows):
            block = values
            if heads:
                block = _unpermute(values if len(tensor.shape) > 1 else values.T, head_rows)
            if self.architecture.norm_offset and part.endswith("_norm"):
                block = values - np.float32(self.architecture.norm_offset)
            yield to_bfloat16(block).tobytes()

    def _keeps(self, tensor: GGUFTensor) -> bool:
        """Return whether the tensor's blocks are kept."""
        is_matrix = tensor.name.startswith("blk.") and tensor.name.endswith(".weight") and len(tensor.shape) > 1
        return self.keep_blocks and is_matrix and _kind(tensor) in KEPT_BLOCKS

    def _target(self, tensor: GGUFTensor, name: str, shape: tuple[int, ...]) -> Target:
        if not self._keeps(tensor):
            return Target(name, shape)
        block = KEPT_BLOCKS[_kind(tensor)]
        row_bytes = shape[-1] // block.numbers * block.num_bytes
        return Target(f"{name.removesuffix('.weight')}.{_kind(tensor)}", (*shape[:-1], row_bytes), "U8")

    def targets(self) -> list[Target]:
        """Return the converted tensors.

        Raises:
            GGUFError: a tensor is not part of the model, or two become one.
        """
        found: list[Target] = []
        for tensor in self._sources():
            found += [self._target(tensor, name, shape) for name, shape in self._targets(tensor)]
            if len(found) > MAX_TENSORS:
                raise GGUFError(f"{self.file.path}: has more than {MAX_TENSORS} tensors")
        if len({target.name for target in found}) < len(found):
            raise GGUFError(f"{self.file.path}: two tensors have the same place in the model")
        return found

    def _sources(self) -> list[GGUFTensor]:
        return [tensor for tensor in self.file.tensors.values() if tensor.name not in ROPE_TENSORS]

    def _targets(self, tensor: GGUFTensor) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the tensors that the tensor becomes: one, or one for each expert."""
        rest, _, kind = tensor.name.rpartition(".")
        *layer, part = rest.split(".")
        if kind in ("weight", "bias"):
            if not layer and part in TOP_NAMES:
                return [(f"{TOP_NAMES[part]}.{kind}", tensor.shape)]
            if len(layer) == 2 and layer[0] == "blk" and _is_index(layer[1]) and part in self.architecture.names:
                name = f"model.layers.{int(layer[1])}.{self.architecture.names[part]}.{kind}"
                if "{}" not in name:
                    return [(name, (1, *tensor.shape) if part == "ffn_gate_inp_shexp" else tensor.shape)]
                if len(tensor.shape) == 3 and tensor.shape[0] <= _MAX_EXPERTS:
                    return [(name.format(expert), tensor.shape[1:]) for expert in range(tensor.shape[0])]
        model = self.architecture.class_name
        raise GGUFError(f"{self.file.path}: tensor {tensor.name:.80} {tensor.shape} is not part of a {model}")


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_INDEX_DIGITS


def _kind(tensor: GGUFTensor) -> str:
    return tensor.tensor_type.name.lower()


def _part(tensor: GGUFTensor) -> str:
    return tensor.name.rpartition(".")[0].rpartition(".")[2]


def _count_head_rows(rows: int, heads: int) -> int:
    if rows % (2 * heads):
        raise GGUFError(f"{rows} rows do not divide into {heads} heads")
    return rows // heads


def _unpermute(rows: npt.NDArray[Any], head_rows: int) -> npt.NDArray[Any]:
    """Convert the row order of queries and keys from GGUF's rotation by pairs to rotation by halves.

    Args:
        rows: of whole heads, which have `head_rows` each.
    """
    count, columns = rows.shape
    return rows.reshape(count // head_rows, head_rows // 2, 2, columns).swapaxes(1, 2).reshape(count, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of `values` in bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
