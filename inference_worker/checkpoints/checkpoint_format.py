"""The format of a quantized checkpoint, from `quantization_config` in config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inference_worker.checkpoints.model_config import CheckpointFormat, ConfigReader

_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_WHOLE = (None, -1)  # group sizes that mean one group


def read_checkpoint_format(raw: Mapping[str, Any], read: ConfigReader) -> CheckpointFormat | None:
    """Return the format of the checkpoint, or None if it is not quantized.

    Raises:
        ModelError: the format is not supported, or a value is invalid.
    """
    config = raw.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise read.error(f"quantization_config is {config!r:.80}; want an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise read.error(f"quant_method {method!r:.40} is not supported; want {', '.join(_READERS)} or no quantization")
    return _READERS[method](config, read)


def _awq(config: Mapping[str, Any], read: ConfigReader) -> CheckpointFormat:
    _require(config.get("version", "gemm"), ("gemm", "GEMM"), "version of AWQ", read)
    _require(config.get("bits"), (4,), "bits of AWQ", read)
    if config.get("zero_point", True) is not True:
        raise read.error("AWQ without zero_point is not supported")
    return CheckpointFormat("awq", bits=4, group_size=_group_size(config, read), is_symmetric=False)


def _gptq(config: Mapping[str, Any], read: ConfigReader) -> CheckpointFormat:
    layout = config.get("checkpoint_format", "gptq")
    _require(layout, ("gptq", "gptq_v2"), "checkpoint_format of GPTQ", read)
    bits = _require(config.get("bits"), (4, 8), "bits of GPTQ", read)
    return CheckpointFormat(
        "gptq", bits=bits, group_size=_group_size(config, read), is_symmetric=False,
        zero_offset=int(layout == "gptq"),
    )  # fmt: skip


def _fp8(config: Mapping[str, Any], read: ConfigReader) -> CheckpointFormat:
    _require(config.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"), "fmt of FP8", read)
    block = config.get("weight_block_size")
    return CheckpointFormat("fp8", bits=8, is_float=True, block=None if block is None else _block(block, read))


def _compressed_tensors(config: Mapping[str, Any], read: ConfigReader) -> CheckpointFormat:
    if config.get("transform_config"):  # rotations of the inputs of layers
        raise read.error("transform_config of compressed-tensors is not supported; choose a model without it")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(next(iter(groups.values())), dict):
        raise read.error("config_groups of compressed-tensors must have exactly one group")
    group = next(iter(groups.values()))
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(activations, dict | None):
        raise read.error("a group of compressed-tensors must have an object of weights")
    layout = group.get("format") or config.get("format")
    layouts = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized")
    _require(layout, layouts, "format of compressed-tensors", read)
    kind = _require(weights.get("type", "int"), ("int", "float"), "type of compressed-tensors weights", read)
    bits = _require(weights.get("num_bits"), (8,) if kind == "float" else (4, 8), "num_bits of weights", read)
    is_packed = layout == "pack-quantized"
    if (is_packed and kind == "float") or (bits == 4 and not is_packed):
        raise read.error(f"format {layout} of compressed-tensors does not fit {bits} bits of type {kind}")
    strategy = _require(
        weights.get("strategy", "tensor"), ("tensor", "channel", "group", "block"), "strategy of weights", read
    )
    activation_bits = None if activations is None else activations.get("num_bits")
    return CheckpointFormat(
        "compressed-tensors",
        bits=bits,
        group_size=_group_size(weights, read) if strategy == "group" else 0,
        is_float=kind == "float",
        is_packed=is_packed,
        is_symmetric=weights.get("symmetric", True) is not False,
        block=_block(weights.get("block_structure"), read) if strategy == "block" else None,
        activation_bits=_require(activation_bits, (None, 8), "num_bits of input_activations", read) or 16,
    )


def _gguf(_config: Mapping[str, Any], _read: ConfigReader) -> CheckpointFormat:
    return CheckpointFormat("gguf", bits=8, group_size=32)


_READERS: dict[str, Callable[[Mapping[str, Any], ConfigReader], CheckpointFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gguf": _gguf,  # a converted file
}


def _group_size(config: Mapping[str, Any], read: ConfigReader) -> int:
    size = config.get("group_size")
    return 0 if size in _WHOLE else int(_require(size, _GROUP_SIZES, "group_size", read))


def _block(value: Any, read: ConfigReader) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(side in _GROUP_SIZES for side in value):
        return int(value[0]), int(value[1])
    raise read.error(f"the block of FP8 scales is {value!r:.40}; want two sizes such as [128, 128]")


def _require(value: Any, known: tuple[Any, ...], noun: str, read: ConfigReader) -> Any:
    if isinstance(value, bool) or value not in known:
        raise read.error(f"{noun} is {value!r:.40}, which is not supported; want {' or '.join(map(str, known))}")
    return value
