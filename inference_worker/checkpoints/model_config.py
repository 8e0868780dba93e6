"""The shape of a decoder, and readers of configuration files. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 << 20


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
    beta_fast: float = 32.0  # rotations in the original context above which yarn keeps a frequency
    beta_slow: float = 1.0  # rotations below which yarn divides a frequency by the factor
    truncate: bool = True  # yarn rounds the limits between these to whole dimensions
    attention_factor: float = 1.0  # factor of cos and sin
    short_factors: tuple[float, ...] = ()  # longrope's divisors in a context of at most original_max_position tokens
    long_factors: tuple[float, ...] = ()  # the same in a longer context


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # width of one expert
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
    is_packed: bool = False  # compressed-tensors: several numbers in 32 bits
    is_symmetric: bool = True  # compressed-tensors: without zero points
    zero_offset: int = 0  # GPTQ: number added to the stored zero points
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
    dtype: str  # dtype of the checkpoint: "bfloat16", "float16" or "float32"
    rope: RopeConfig = field(default_factory=RopeConfig)
    eos_token_ids: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # embeddings of layers with a window; None: as the other layers
    activation: str = "silu"  # or "gelu_pytorch_tanh"
    qkv_bias: bool = False  # queries, keys and values have a bias; with attention_bias, the output, too
    windows: tuple[int, ...] = ()  # tokens that each layer attends to; 0: all; no entries: all, in every layer
    attention_scale: float = 0.0  # factor of the scores; 0: head_dim ** −0.5
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    moe: MoeConfig | None = None
    checkpoint_format: CheckpointFormat | None = None  # format of quantized weights; None: they are not quantized
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
