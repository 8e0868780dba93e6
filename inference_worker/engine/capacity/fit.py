"""The fit of a model to a machine, computed before the model is loaded. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.inspection import CheckpointReport
from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.contract.engine_config import (
    DEFAULT_KV_BYTES,
    DEFAULT_KV_SHARE,
    PROFILES,
    EngineConfig,
    KVCacheDTypeName,
    ProfileName,
    QuantizationName,
)
from inference_worker.engine.capacity.roofline import BatchShape, Peaks, Roofline
from inference_worker.engine.capacity.sizing import (
    MIN_FREE_BYTES,
    KVMemoryError,
    kv_cache_bytes,
    kv_number_bytes,
    size_kv_cache,
)

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes of a number in the layers' matrices, with the scales and zero points of its group.
QUANTIZED_BYTES = {"int8": 1 + 2 / 32, "int4": 0.5 + 8 / 32, "int4-g64": 0.5 + 8 / 64, "int4-g128": 0.5 + 8 / 128}
HEAD_BYTES = 1 + 2 / 64  # bytes of a number in a head in 8 bits, with the scale of its group
PROMPT_TOKENS = 1024  # tokens of the prompt whose rate is estimated


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The device that a worker would compute on."""

    device: str  # "cpu" or "cuda"
    name: str  # name of the processor
    free_bytes: int  # free bytes of the device's memory
    dtype: str
    peaks: Peaks | None  # in the dtype; None: not measured


@dataclass(frozen=True, slots=True)
class ModelFit:
    """The memory and the speed of a model on a machine.

    Rates are limits of the machine: the roofline of its measured peaks. A worker stays below them.
    """

    weight_bytes: int
    dtype: str
    context: int  # tokens of each stream, prompt and output
    problem: str | None = None  # why the model does not fit; the message contains a solution
    kv_token_bytes: int | None = None  # None, as all below: the model has no KV cache, or does not fit
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    streams: int | None = None  # number of streams that fit, each of `context` tokens, without sharing
    decode_tokens_per_second: float | None = None  # output tokens of one stream
    batch_tokens_per_second: float | None = None  # output tokens of all streams together
    prompt_tokens_per_second: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fit as JSON values."""
        return asdict(self)


def estimate_fit(
    report: CheckpointReport,
    device: ComputeDevice,
    *,
    context: int | None = None,
    kv_memory: int | float | None = None,
    block_size: int = 32,
    profile: ProfileName = "balanced",
    quantization: QuantizationName = "none",
    kv_dtype: KVCacheDTypeName = "auto",
) -> ModelFit:
    """Return the fit of a supported checkpoint.

    Args:
        context: tokens of each stream; None: the model's maximum.
        kv_memory: bytes of the KV cache, or its share of the memory that is free beside the weights; None: the default.
        profile: the engine's profile, which limits the streams of a step.
        quantization: of the weights when they are loaded.
        kv_dtype: of the keys and values in the KV cache.

    Raises:
        ValueError: the checkpoint is not supported or cannot be quantized, or the context exceeds the model's maximum.
    """
    if report.config is None or not report.is_supported:
        raise ValueError(f"{report.path}: is not supported")
    longest = report.config.max_model_len
    context = context or longest
    if context > longest:
        raise ValueError(f"the context of {context:,} tokens exceeds the model's maximum of {longest:,}; lower it")
    value_bytes = DTYPE_BYTES[device.dtype]
    saved = _saved_bytes(report, device, quantization)
    converted = _converted_bytes(report, device)
    fit = ModelFit(report.weight_bytes(value_bytes) - saved + converted, device.dtype, context)
    needed = fit.weight_bytes + (MIN_FREE_BYTES if device.device == "cpu" else 0)
    if needed > device.free_bytes:
        text = f"the weights need {_gib(needed)}, but {_gib(device.free_bytes)} are free: free memory, or use another"
        return replace(fit, problem=f"{text} machine or a smaller dtype")
    if not isinstance(report.config, ModelConfig):
        return fit
    kv_bytes = kv_number_bytes(kv_dtype, value_bytes)
    token_bytes = int(report.config.kv_values_per_token * kv_bytes)
    fit = replace(fit, kv_token_bytes=token_bytes)
    if kv_memory is None:
        kv_memory = DEFAULT_KV_SHARE if device.device == "cuda" else DEFAULT_KV_BYTES
    engine = EngineConfig(model_dir=Path(), block_size=block_size)
    try:
        num_bytes = kv_cache_bytes(kv_memory, device.free_bytes - fit.weight_bytes, device.device)
        sizing = size_kv_cache(engine, report.config, context, kv_bytes, num_bytes)
    except KVMemoryError as exc:
        return replace(fit, problem=str(exc))
    fit = replace(fit, kv_bytes=sizing.num_bytes, kv_tokens=sizing.num_tokens, streams=sizing.longest_requests)
    return _with_rates(
        fit, report.config, device.peaks, PROFILES[profile].max_num_seqs, kv_bytes,
        is_packed=bool((report.packed_bytes and not converted) or saved),
    )  # fmt: skip


def _converted_bytes(report: CheckpointReport, device: ComputeDevice) -> int:
    """Return the bytes by which the weights of a quantized checkpoint grow when they are loaded.

    Those that the engine does not keep quantized on the device are converted to the dtype. A checkpoint of GPTQ in the
    order of activations is converted, too, which its configuration does not show.
    """
    form = report.config.checkpoint_format if isinstance(report.config, ModelConfig) else None
    if form is None or form.name == "gguf":
        return 0
    is_native = (device.device, device.dtype) == ("cpu", "bfloat16")
    if form.is_float:
        is_kept = device.device == "cuda" and form.block is None
    elif form.bits == 4:
        is_kept = is_native
    else:
        is_plain = form.name == "compressed-tensors" and form.is_symmetric and not form.group_size
        is_kept = is_plain and form.activation_bits == 8 and (is_native or device.device == "cuda")
    if is_kept:
        return 0
    return report.packed_bytes * 8 // form.bits * DTYPE_BYTES[device.dtype] - report.packed_bytes


def _saved_bytes(report: CheckpointReport, device: ComputeDevice, quantization: QuantizationName) -> int:
    """Return the bytes by which the quantization at load makes the weights smaller.

    int8 is kept on each device, int4 by the C kernels in bfloat16, and fp8 on CUDA devices. With int8 the C kernels
    also have the head in 8 bits.
    """
    if quantization == "none":
        return 0
    config = report.config
    if config is None:
        return 0
    if isinstance(config, ModelConfig) and config.checkpoint_format is not None:
        raise ValueError(f"{report.path}: is already quantized ({report.quantization}): set quantization to none")
    is_native = (device.device, device.dtype) == ("cpu", "bfloat16")
    if quantization == "gguf":
        if report.format != "gguf":
            raise ValueError(f"{report.path}: is not a .gguf file: set quantization to none")
        return report.kept_values * DTYPE_BYTES[device.dtype] - report.kept_bytes if is_native else 0
    if quantization == "fp8":
        stored = 1.0 if device.device == "cuda" else float(DTYPE_BYTES[device.dtype])
    else:
        is_kept = quantization == "int8" or is_native
        stored = QUANTIZED_BYTES[quantization] if is_kept else float(DTYPE_BYTES[device.dtype])
    has_head = isinstance(config, ModelConfig) and not config.tie_word_embeddings
    plain = config.vocab_size * config.hidden_size * (2 if has_head else 1)
    saved = max(report.float_values - plain, 0) * (DTYPE_BYTES[device.dtype] - stored)
    if quantization == "int8" and is_native and isinstance(config, ModelConfig):
        saved -= config.vocab_size * config.hidden_size * HEAD_BYTES
    return int(saved)


def _with_rates(
    fit: ModelFit, config: ModelConfig, peaks: Peaks | None, max_num_seqs: int, kv_bytes: float, *, is_packed: bool
) -> ModelFit:
    """Return the fit with the rates of the roofline. The streams of a step have half of their context on average."""
    if peaks is None or not fit.streams:
        return fit
    value_bytes = DTYPE_BYTES[fit.dtype]
    roofline = Roofline.of(config, weight_bytes=value_bytes, kv_value_bytes=kv_bytes, peaks=peaks)
    if is_packed and config.moe is None:
        parameters = roofline.layer_parameters + roofline.head_parameters
        roofline = replace(roofline, weight_bytes=fit.weight_bytes / parameters)

    def rate(streams: int) -> float:
        length = max(1, fit.context // 2)
        pairs = streams * length
        return streams / _seconds(roofline, peaks, BatchShape(streams, 0, pairs, 0, pairs, streams))

    prompt = min(PROMPT_TOKENS, fit.context)
    batch = BatchShape(0, prompt, 0, prompt * (prompt + 1) // 2, prompt, 1)
    return replace(
        fit,
        decode_tokens_per_second=rate(1),
        batch_tokens_per_second=rate(min(fit.streams, max_num_seqs)),
        prompt_tokens_per_second=prompt / _seconds(roofline, peaks, batch),
    )


def _seconds(roofline: Roofline, peaks: Peaks, batch: BatchShape) -> float:
    """Return the minimum duration of a step: that of its operations or of its memory transfers."""
    cost = roofline.cost(batch)
    return max(
        (cost.prefill_flops + cost.decode_flops) / peaks.flops, (cost.bytes_read + cost.bytes_written) / peaks.bandwidth
    )


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**30:.2f} GiB"
