"""What a model is and how an engine serves it. Free of torch: the gateway reads a model's limits with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_JSON_BYTES = 16 << 20

DeviceName = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "bfloat16", "float32"]
ProfileName = Literal["latency", "balanced", "throughput"]


class ModelError(Exception):
    """A model's files are missing, damaged, or of a kind this engine does not serve; the message says which."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: `kind` is "default", "linear" or "llama3"."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, read from a Hugging Face directory's config.json and generation_config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens, prompt and answer together
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # the checkpoint's own: "bfloat16", "float16" or "float32"
    rope: RopeConfig = field(default_factory=RopeConfig)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's keys and values take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read and check the model directory `path`.

        Raises:
            ModelError: a file is missing, not JSON, or describes a model this engine does not serve.
        """
        folder = Path(path)
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return _parse(raw, read_json(generation) if generation.exists() else {}, folder)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What a worker is tuned for: fields as in `EngineConfig`."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_num_seqs: int


PROFILES: dict[ProfileName, EngineProfile] = {
    "latency": EngineProfile(max_num_batched_tokens=128, long_prefill_token_threshold=64, max_num_seqs=32),
    "balanced": EngineProfile(max_num_batched_tokens=512, long_prefill_token_threshold=256, max_num_seqs=64),
    "throughput": EngineProfile(max_num_batched_tokens=2048, long_prefill_token_threshold=0, max_num_seqs=256),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine serves one model. Everything that fixes the numbers of its answers is here."""

    model_dir: Path
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    max_num_seqs: int = 64  # most requests in one step
    max_num_batched_tokens: int = 512  # most tokens in one step
    block_size: int = 32  # tokens per KV cache block
    kv_cache_bytes: int = 1 << 30  # bytes for the KV cache
    threads: int = 0  # compute threads on the CPU; 0: as many as the process has cores
    max_model_len: int | None = None  # lower the model's own limit
    long_prefill_token_threshold: int = (
        0  # most tokens of one prompt in a step, so that one cannot take it all; 0: no cap
    )
    max_long_partial_prefills: int = (
        0  # most prompts longer than that under way at once, so that short ones pass; 0: no cap
    )
    num_blocks: int | None = None  # usable KV blocks, instead of counting them from kv_cache_bytes
    prefix_cache: bool = True
    kv_offload_bytes: int = 0  # bytes of host memory for blocks given up on the device; 0: no second tier
    async_scheduling: bool | None = None  # launch a step before the one before has come back; None: on CUDA
    pin_share: float = 0.5  # share of the blocks that all tenants' pins together may take
    tenant_pin_share: float = 0.25  # and one tenant's
    measure_peaks: bool = True  # take a moment at start to see what the device does at most, for MFU
    attention: str = "auto"  # a name in the attention backends' registry
    batch_invariant: bool = False  # a request's tokens do not depend, in any bit, on what is computed beside it

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs, or a full batch could not decode in one step"
            )
        if self.batch_invariant and self.attention not in ("auto", "invariant"):
            raise ValueError(f"attention {self.attention!r} is not batch-invariant; leave it to batch_invariant")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`; untrusted, so its size is bounded.

    Raises:
        ModelError: missing, too large, or not a JSON object.
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
    """Typed, bounded access to a config.json, each fault naming the file and the key."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self._raw = raw
        self.path = path

    def fault(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}")

    def integer(self, key: str, default: int | None = None, most: int = 1 << 24) -> int:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.fault(f"{key} is {value!r}; want an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
            raise self.fault(f"{key} is {value!r}; want a positive number")
        return float(value)

    def architecture(self) -> str:
        names = self._raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.fault(f"architectures is {names!r}; want a list of one name")
        return names[0]

    def dtype(self) -> str:
        """Return the checkpoint's own."""
        name = self._raw.get("dtype", self._raw.get("torch_dtype", "float32"))
        if name not in ("bfloat16", "float16", "float32"):
            raise self.fault(f"dtype {name!r} is not supported")
        return str(name)

    def flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(f"{key} is {value!r}; want true or false")
        return value


def _parse(raw: dict[str, Any], generation: dict[str, Any], folder: Path) -> ModelConfig:
    read = ConfigReader(raw, folder / "config.json")
    architecture = read.architecture()
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise read.fault(f"hidden_act {activation!r} is not supported; want silu")
    if "quantization_config" in raw:
        raise read.fault("quantized checkpoints are not supported yet; use a plain or a GGUF one")
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads", most=4096)
    kv_heads = read.integer("num_key_value_heads", default=heads, most=4096)
    head_dim = read.integer("head_dim", default=max(hidden // heads, 1), most=4096)
    if heads % kv_heads or head_dim % 2:
        raise read.fault(f"{heads} heads over {kv_heads} KV heads of {head_dim} is not a possible attention")
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    bos = raw.get("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers", most=4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=read.integer("max_position_embeddings"),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
        dtype=read.dtype(),
        rope=_rope(raw, read),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=token_ids(eos),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids as configurations write them: one, a list of them, or null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list):
        return tuple(v for v in value if isinstance(v, int) and not isinstance(v, bool))
    return ()


def _rope(raw: dict[str, Any], read: ConfigReader) -> RopeConfig:
    # Newer files keep everything in rope_parameters; older ones rope_theta apart and rope_scaling or null.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise read.fault(f"rope_scaling is {scaling!r}; want an object")
    if raw.get("rope_interleaved"):
        raise read.fault("interleaved rotary embeddings are not supported")
    merged = {"rope_theta": raw.get("rope_theta", 10_000.0), **scaling}
    nested = ConfigReader(merged, read.path)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise read.fault(f"rope type {kind!r} is not supported; want default, linear or llama3")
    return RopeConfig(
        theta=nested.number("rope_theta", 10_000.0),
        kind=kind,
        factor=nested.number("factor", 1.0),
        low_freq_factor=nested.number("low_freq_factor", 1.0),
        high_freq_factor=nested.number("high_freq_factor", 4.0),
        original_max_position=nested.integer("original_max_position_embeddings", default=8192),
    )
