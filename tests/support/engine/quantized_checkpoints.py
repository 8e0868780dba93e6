"""Quantized checkpoints of each format, made of a plain one with loops that share no code with the engine.

A builder returns the tensors of one layer and the weight that they stand for, in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Built = tuple[dict[str, torch.Tensor], torch.Tensor]
GROUP = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _round_groups(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [outputs, inputs], and scales and zero points [outputs, groups]."""
    top = 2**bits - 1
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(0, top)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    return values.view_as(weight).long(), scales, zeros.long()


def _words(rows: Sequence[Sequence[int]], bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return the rows with 32 / bits numbers in each int32."""
    per_word = 32 // bits
    packed = []
    for row in rows:
        words = []
        for start in range(0, len(row), per_word):
            word = 0
            for place in range(per_word):
                word |= int(row[start + (order[place] if order else place)]) << (bits * place)
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(words)
    return torch.tensor(packed, dtype=torch.int32)


def _expand(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values[:, index].float()


def awq(weight: torch.Tensor) -> Built:
    values, scales, zeros = _round_groups(weight, 4, GROUP)
    index = torch.arange(weight.shape[1]) // GROUP
    tensors = {
        "qweight": _words(values.T.tolist(), 4, _AWQ_ORDER),
        "qzeros": _words(zeros.T.tolist(), 4, _AWQ_ORDER),
        "scales": scales.T.half().contiguous(),
    }
    return tensors, (values - _expand(zeros, index)) * _expand(scales, index)


def gptq(weight: torch.Tensor, bits: int = 4, *, act_order: bool = False, offset: int = 1) -> Built:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(inputs)
    sorted_values, scales, zeros = _round_groups(weight[:, order], bits, GROUP)
    index = torch.empty(inputs, dtype=torch.long)
    index[order] = torch.arange(inputs) // GROUP
    values = torch.empty_like(sorted_values)
    values[:, order] = sorted_values
    stored = (zeros - offset) % (1 << bits)
    tensors = {
        "qweight": _words(values.tolist(), bits).T.contiguous(),
        "qzeros": _words(stored.T.tolist(), bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": index.int(),
    }
    return tensors, (values - _expand(zeros, index)) * _expand(scales, index)


def int8(weight: torch.Tensor) -> Built:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def packed_int4(weight: torch.Tensor, *, symmetric: bool = True) -> Built:
    values, scales, zeros = _round_groups(weight, 4, GROUP)
    index = torch.arange(weight.shape[1]) // GROUP
    if symmetric:
        scales = (weight.view(len(weight), -1, GROUP).abs().amax(-1) / 7).half().float()
        values = (weight / _expand(scales, index)).round().clamp(-8, 7).long() + 8
        zeros = torch.full_like(zeros, 8)
    tensors = {
        "weight_packed": _words(values.tolist(), 4),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T.tolist(), 4).T.contiguous()
    return tensors, (values - _expand(zeros, index)) * _expand(scales, index)


def fp8(weight: torch.Tensor, scale_of: str = "channel") -> Built:
    outputs, inputs = weight.shape
    if scale_of == "block":
        scales = torch.zeros(-(-outputs // GROUP), -(-inputs // GROUP))
        full = torch.zeros_like(weight)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = (slice(row * GROUP, (row + 1) * GROUP), slice(column * GROUP, (column + 1) * GROUP))
                scales[row, column] = weight[place].abs().amax() / 448
                full[place] = scales[row, column]
        name = "weight_scale_inv"
    else:
        scales = weight.abs().amax(1, keepdim=True) / 448 if scale_of == "channel" else weight.abs().amax() / 448
        full, name = scales.expand_as(weight), "weight_scale"
    values = (weight / full).to(torch.float8_e4m3fn)
    return {"weight": values, name: scales}, values.float() * full


def _compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}

# Name -> quantization_config, and the builder of a layer.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Built]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq-4": (_GPTQ | {"bits": 4}, gptq),
    "gptq-4-act-order": (_GPTQ | {"bits": 4, "desc_act": True}, lambda w: gptq(w, act_order=True)),
    "gptq-8": (_GPTQ | {"bits": 8}, lambda w: gptq(w, 8)),
    "gptq-v2": (_GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, offset=0)),
    "compressed-w8a16": (_compressed("int-quantized", _INT8), int8),
    "compressed-w8a8": (_compressed("int-quantized", _INT8, _TOKENS | {"type": "int"}), int8),
    "compressed-w4a16": (_compressed("pack-quantized", _INT4 | {"symmetric": True}), packed_int4),
    "compressed-w4a16-zeros": (
        _compressed("pack-quantized", _INT4 | {"symmetric": False}), lambda w: packed_int4(w, symmetric=False),
    ),
    "compressed-fp8": (_compressed("float-quantized", _FLOAT | {"strategy": "channel"}, _TOKENS), fp8),
    "compressed-fp8-tensor": (
        _compressed("float-quantized", _FLOAT | {"strategy": "tensor"}), lambda w: fp8(w, "tensor"),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
        lambda w: fp8(w, "block"),
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda w: fp8(w, "tensor")),
}  # fmt: skip


def write_quantized(source: Path, name: str, quantized: Path, reference: Path) -> None:
    """Write the checkpoint `source` in a format, and the plain checkpoint with the same weights."""
    config, build = FORMATS[name]
    for directory in (quantized, reference):
        shutil.copytree(source, directory)
    stored, plain = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        stored[key] = plain[key] = tensor
        if layer.endswith("_proj"):
            tensors, plain[key] = build(tensor.float())
            del stored[key]
            stored.update({f"{layer}.{part}": value.contiguous() for part, value in tensors.items()})
    save_file(stored, quantized / "model.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in plain.items()}, reference / "model.safetensors")
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
