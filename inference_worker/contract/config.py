"""Configurations of models and engines. Does not import torch: the gateway reads a model's limits with this module."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_JSON_BYTES = 16 << 20
DEFAULT_KV_BYTES = 1 << 30  # of the KV cache on the CPU
MAX_DRAFTING_SEQUENCES = 4  # in a step with drafts: at 8 sequences drafts cost more than they saved
DEFAULT_KV_SHARE = 0.9  # of a GPU's free memory; the rest is for a step's intermediate results

DeviceName = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
CpuKernelsName = Literal["auto", "pytorch", "amx", "avx512", "avx2", "generic"]
ProfileName = Literal["latency", "balanced", "throughput"]
SpeculationName = Literal["auto", "off"]
KVCacheDTypeName = Literal["auto", "int8", "fp8"]
QuantizationName = Literal["none", "int8", "int4", "int4-g64", "int4-g128", "fp8", "gguf"]


class ModelError(Exception):
    """An error in a model's files: missing, damaged or not supported. The message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of rotary position embeddings.

    `rope_type` is "default", "dynamic", "linear", "llama3", "yarn" or "longrope".
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotary_dim: int = 0  # rotated dimensions of a head, the first ones; 0: all
    beta_fast: float = 32.0  # of yarn, as the next two
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cos and sin
    short_factors: tuple[float, ...] = ()  # of longrope, for a context of at most original_max_position tokens
    long_factors: tuple[float, ...] = ()  # for a longer context


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # the weights of a token's experts add up to 1
    sparse_layers: tuple[bool, ...]  # layers with experts; the others have one feed-forward block
    shared_size: int = 0  # width of an expert that every token uses; 0: none


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The format of a quantized checkpoint's weights."""

    name: str  # "awq", "gptq", "compressed-tensors", "fp8" or "gguf"
    bits: int
    group_size: int = 0  # inputs that share a scale; 0: no groups
    is_float: bool = False  # 8-bit floating-point numbers, e4m3
    is_packed: bool = False  # of compressed-tensors: several numbers in 32 bits
    is_symmetric: bool = True  # of compressed-tensors: without zero points
    zero_offset: int = 0  # of GPTQ: added to the stored zero points
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    activation_bits: int = 16  # 8: the inputs of a product are quantized, too


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, from config.json and generation_config.json of a Hugging Face directory."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of prompt and output
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    rope: RopeConfig = field(default_factory=RopeConfig)
    eos_token_ids: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # of layers with a window; None: as the other layers
    activation: str = "silu"  # or "gelu_pytorch_tanh"
    qkv_bias: bool = False  # of queries, keys and values; attention_bias is that of the output, too
    windows: tuple[int, ...] = ()  # tokens that each layer attends to; 0: all; no entries: all, in every layer
    attention_scale: float = 0.0  # of the scores; 0: head_dim ** −0.5
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    moe: MoeConfig | None = None
    checkpoint_format: CheckpointFormat | None = None  # of quantized weights; None: they are not quantized
    unrotated: tuple[bool, ...] = ()  # layers without rotary embedding; no entries: none

    @property
    def active_inner_sizes(self) -> list[int]:
        """Return the width of the feed-forward block that one token uses, for each layer."""
        if self.moe is None:
            return [self.intermediate_size] * self.num_layers
        active = self.moe.experts_per_token * self.moe.intermediate_size + self.moe.shared_size
        return [active if sparse else self.intermediate_size for sparse in self.moe.sparse_layers]

    @property
    def kv_values_per_token(self) -> int:
        """Return how many numbers the keys and values of one token take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read and check the model directory `path`.

        Raises:
            ModelError: a file is missing or not JSON, or the engine does not support the model.
        """
        from inference_worker.contract.decoder_config import read_decoder_config  # it imports this module

        config, generation = Path(path) / "config.json", Path(path) / "generation_config.json"
        return read_decoder_config(read_json(config), read_json(generation) if generation.exists() else {}, config)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Limits of a scheduler step for one purpose: low latency, high throughput or a balance. Fields as in
    `EngineConfig`."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_num_seqs: int
    max_starting_tokens: int = 0


PROFILES: dict[ProfileName, EngineProfile] = {
    "latency": EngineProfile(max_num_batched_tokens=128, long_prefill_token_threshold=64, max_num_seqs=32),
    "balanced": EngineProfile(max_num_batched_tokens=512, long_prefill_token_threshold=256, max_num_seqs=64),
    "throughput": EngineProfile(max_num_batched_tokens=2048, long_prefill_token_threshold=0, max_num_seqs=256),
}
# On the CPU, a step of twice the tokens takes twice the time. Prompts that start together delay each other's first
# token.
CPU_PROFILES: dict[ProfileName, EngineProfile] = {
    **PROFILES,
    "balanced": EngineProfile(
        max_num_batched_tokens=512, long_prefill_token_threshold=256, max_num_seqs=64, max_starting_tokens=256
    ),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine. It includes everything that determines the engine's numerical results."""

    model_dir: Path
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    max_num_seqs: int = 64  # maximum sequences in a step
    max_num_batched_tokens: int = 512  # maximum tokens in a step
    block_size: int = 32  # tokens per KV cache block
    # Bytes of the KV cache, or its share of the memory that is free when the model is loaded. None: DEFAULT_KV_SHARE on
    # CUDA, DEFAULT_KV_BYTES on the CPU.
    kv_cache_memory: int | float | None = None
    # Of the keys and values; auto: the model's dtype. int8: C kernels, with scales. fp8: CUDA.
    kv_cache_dtype: KVCacheDTypeName = "auto"
    threads: int = 0  # compute threads on the CPU; 0: one for each core of the process
    max_model_len: int | None = None  # tokens; lowers the model's limit
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt in a step; 0: no limit
    max_starting_tokens: int = 0  # maximum tokens of the prompts that start in a step beside few others; 0: no limit
    max_long_partial_prefills: int = 0  # maximum concurrent prefills of longer prompts; 0: no limit
    locality_tokens: int = 0  # by which a tenant may be ahead if its next prompt is cached (scheduling/waiting.py)
    num_blocks: int | None = None  # usable KV blocks; None: as many as fit into kv_cache_memory
    prefix_cache: bool = True
    kv_offload_bytes: int = 0  # host memory for blocks evicted from the device; 0: no offload
    async_scheduling: bool | None = None  # launch a step before the previous one has finished; None: on CUDA only
    pin_share: float = 0.5  # maximum share of the blocks that all pins together may take
    tenant_pin_share: float = 0.25  # maximum share for the pins of one tenant
    measure_peaks: bool = True  # measure the device's peak rates at start, for MFU
    # Of the weights of a checkpoint that is not quantized, when it is loaded; gguf: as a converted GGUF file has them.
    quantization: QuantizationName = "none"
    progress: Callable[[int, int], None] | None = None  # called with the bytes read and those of all weights
    attention: str = "auto"  # a name in the registry of attention backends
    cpu_kernels: CpuKernelsName = "auto"  # on the CPU in bfloat16: the C kernels, or PyTorch
    speculation: bool = False  # verify drafts of the next tokens; not with asynchronous scheduling
    draft_model_dir: Path | None = None  # of a model with the same vocabulary that drafts tokens; None: none
    draft_quantization: QuantizationName = "none"  # of the draft model's weights, when they are loaded
    batch_invariant: bool = False  # a request's tokens do not depend on the other requests in its batches

    @property
    def max_tokens_in_flight(self) -> int:
        """Return the maximum new tokens of a sequence in the steps that have not ended, which are at most two."""
        return 2 * self.max_num_batched_tokens

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        memory = self.kv_cache_memory
        if isinstance(memory, float) and not 0 < memory < 1:
            raise ValueError("kv_cache_memory must be above 0 and below 1 as a share; pass bytes as an integer")
        if isinstance(memory, int) and memory < 1:
            raise ValueError("kv_cache_memory must be at least 1 byte")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs, so that a full batch can decode in one step"
            )
        if self.batch_invariant and self.attention not in ("auto", "invariant"):
            raise ValueError(f"attention {self.attention!r} is not batch-invariant; leave it at auto")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`. The file is not trusted, so its size is limited.

    Raises:
        ModelError: the file is missing, is too large or does not contain a JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes is too large for a configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; want a Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: cannot be read as JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: want a JSON object")
    return value


class ConfigReader:
    """A reader of a config.json with checks of types and ranges. Every error names the file and the key."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self._raw = raw
        self.path = path

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}")

    def integer(self, key: str, default: int | None = None, maximum: int = 1 << 24) -> int:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self.error(f"{key} is {value!r}; want an integer from 1 to {maximum}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
            raise self.error(f"{key} is {value!r}; want a positive number")
        return float(value)

    def architecture(self) -> str:
        names = self._raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error(f"architectures is {names!r}; want a list with one name")
        return names[0]

    def dtype(self) -> str:
        """Return the dtype of the checkpoint."""
        name = self._raw.get("dtype", self._raw.get("torch_dtype", "float32"))
        if name not in ("bfloat16", "float16", "float32"):
            raise self.error(f"dtype {name!r} is not supported")
        return str(name)

    def flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; want true or false")
        return value


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of a configuration value, which is an id, a list of ids or null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list):
        return tuple(v for v in value if isinstance(v, int) and not isinstance(v, bool))
    return ()
