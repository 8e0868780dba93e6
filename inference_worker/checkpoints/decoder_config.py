"""The keys of config.json by model family. A key that changes results and is not implemented is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log, sqrt
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.checkpoint_format import read_checkpoint_format
from inference_worker.checkpoints.model_config import (
    ConfigReader,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    read_json,
    token_ids,
)

MAX_LAYERS = 4096
_OUTER = ("eos_token_id", "quantization_config", "tie_word_embeddings")  # a multimodal file's own replace its decoder's
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys that change results, with the values that do not. A family implements the other values of the keys in `keys`.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "layer_types": (None,),
    "logits_scaling": (None, 1),
    "mlp_bias": (None, False),
    "n_shared_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_local_base_freq": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
}


def _no_windows(_raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    return [False] * num_layers


def _all_windows(_raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    return [True] * num_layers


def _late_windows(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return Qwen's pattern: windows from layer `max_window_layers` on."""
    first = raw.get("max_window_layers", 28)
    return [isinstance(first, int) and layer >= first for layer in range(num_layers)]


def _every_full_layer(default: int) -> Callable[[Mapping[str, Any], int], list[bool]]:
    """Return Gemma's pattern: one layer in `sliding_window_pattern` has no window."""

    def windows(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
        every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or default
        return [not isinstance(every, int) or bool((layer + 1) % every) for layer in range(num_layers)]

    return windows


def _unrotated_windows(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return SmolLM3's pattern: windows in the layers without rotary embedding."""
    return [not rotates for rotates in _read_rotary_layers(raw, num_layers)]


def _read_rotary_layers(raw: Mapping[str, Any], num_layers: int) -> list[Any]:
    """Return which layers have a rotary embedding, by default all but one in `no_rope_layer_interval`."""
    every = raw.get("no_rope_layer_interval", 4)
    default = [int(not isinstance(every, int) or every < 1 or (layer + 1) % every > 0) for layer in range(num_layers)]
    found = raw.get("no_rope_layers") or default
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class FamilyKeys:
    """The keys of one family.

    keys: of _NEUTRAL, which the family implements.
    defaults: values of keys that a file of the family may omit.
    windows: which layers have a window, if the file has no layer_types.
    """

    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Callable[[Mapping[str, Any], int], list[bool]] = _no_windows
    qkv_bias: bool = False  # always, without a key
    output_bias: bool = True  # attention_bias is also that of the attention's output
    normalize_experts: bool = False  # always, without a key


_EXPERTS = {"num_experts", "num_local_experts"}
_GEMMA = {
    "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "query_pre_attn_scalar",
    "sliding_window",
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
}  # fmt: skip
_GEMMA3 = FamilyKeys(
    keys=frozenset(_GEMMA | {"rope_local_base_freq"}),
    defaults=_GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 131_072,
    },
    windows=_every_full_layer(6),
)  # fmt: skip
_QWEN = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: dict[str, FamilyKeys] = {
    "Gemma2ForCausalLM": FamilyKeys(
        keys=frozenset(_GEMMA),
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windows=_every_full_layer(2),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Glm4ForCausalLM": FamilyKeys(
        keys=frozenset({"attention_bias", "partial_rotary_factor"}),
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        output_bias=False,
    ),
    "GraniteForCausalLM": FamilyKeys(
        keys=frozenset({
            "attention_bias", "attention_multiplier", "embedding_multiplier", "logits_scaling", "mlp_bias",
            "residual_multiplier",
        }),
        defaults={"attention_multiplier": 1.0},
    ),
    "LlamaForCausalLM": FamilyKeys(keys=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": FamilyKeys(
        keys=frozenset({"sliding_window"}), defaults={"sliding_window": 4096}, windows=_all_windows
    ),
    "MixtralForCausalLM": FamilyKeys(
        keys=frozenset({"sliding_window"} | _EXPERTS),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1_000_000.0},
        windows=_all_windows,
        normalize_experts=True,
    ),
    "Olmo2ForCausalLM": FamilyKeys(keys=frozenset({"attention_bias"}), defaults={"rms_norm_eps": 1e-5}),
    "Phi3ForCausalLM": FamilyKeys(
        keys=frozenset({"sliding_window", "partial_rotary_factor"}),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        windows=_all_windows,
    ),
    "Qwen2ForCausalLM": FamilyKeys(
        keys=frozenset({"sliding_window", "layer_types"}),
        defaults=_QWEN,
        windows=_late_windows,
        qkv_bias=True,
    ),
    "Qwen2MoeForCausalLM": FamilyKeys(
        keys=frozenset({"shared_expert_intermediate_size"} | _EXPERTS),
        defaults=_QWEN | {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632},
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": FamilyKeys(
        keys=frozenset({"attention_bias", "sliding_window", "layer_types"}),
        defaults=_QWEN | {"head_dim": 128},
        windows=_late_windows,
    ),
    "Qwen3MoeForCausalLM": FamilyKeys(
        keys=frozenset({"attention_bias", "sliding_window"} | _EXPERTS),
        defaults=_QWEN | {"num_experts": 128, "num_experts_per_tok": 8},
        windows=_all_windows,
    ),
    "SmolLM3ForCausalLM": FamilyKeys(
        keys=frozenset({"attention_bias", "mlp_bias", "no_rope_layers", "sliding_window", "layer_types"}),
        defaults={
            "use_sliding_window": False, "num_key_value_heads": 4, "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        windows=_unrotated_windows,
    ),
}  # fmt: skip


def read_decoder_directory(path: str | Path) -> ModelConfig:
    """Read and check the model directory `path`.

    Raises:
        ModelError: a file is missing or not JSON, or the engine does not support the model.
    """
    config, generation = Path(path) / "config.json", Path(path) / "generation_config.json"
    return _read_decoder_config(read_json(config), read_json(generation) if generation.exists() else {}, config)


def _read_decoder_config(raw: dict[str, Any], generation: dict[str, Any], path: Path) -> ModelConfig:
    """Return the configuration in config.json (`raw`) and generation_config.json.

    Raises:
        ModelError: a value is invalid, or the engine does not support the model.
    """
    read = ConfigReader(raw, path)
    architecture = read.architecture()
    if isinstance(raw.get("text_config"), dict):  # a multimodal model's decoder
        outer = {key: raw[key] for key in _OUTER if raw.get(key) is not None}
        raw = {"dtype": read.dtype(), **raw["text_config"], **outer}
    # An unknown architecture is reported when the model is built; the engine has the list.
    family = FAMILIES.get(architecture, FamilyKeys(keys=frozenset(_NEUTRAL)))
    raw = {key: value for key, value in {**family.defaults, **raw}.items() if value is not None}
    read = ConfigReader(raw, path)
    ropes = [part for part in (raw.get("rope_parameters"), raw.get("rope_scaling")) if isinstance(part, dict)]
    for key in _NEUTRAL.keys() - family.keys:
        for part in (raw, *ropes):
            if part.get(key) not in _NEUTRAL[key] and not _has_no_effect(key, part):
                raise read.error(f"{key} is {part[key]!r}, which is not supported for {architecture}")
    activation = raw.get("hidden_activation", raw.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise read.error(f"hidden_act {activation!r} is not supported; want one of {', '.join(_ACTIVATIONS)}")
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads", maximum=4096)
    kv_heads = read.integer("num_key_value_heads", default=heads, maximum=4096)
    head_dim = read.integer("head_dim", default=max(hidden // heads, 1), maximum=4096)
    if heads % kv_heads or head_dim % 2:
        raise read.error(f"{heads} heads, {kv_heads} KV heads and head_dim {head_dim} do not fit together")
    num_layers = read.integer("num_hidden_layers", maximum=MAX_LAYERS)
    attention_bias = read.flag("attention_bias", False)
    rope, local_rope = _ropes(raw, read, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=read.integer("max_position_embeddings"),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias=attention_bias and family.output_bias,
        mlp_bias=read.flag("mlp_bias", False),
        dtype=read.dtype(),
        rope=rope,
        local_rope=local_rope,
        eos_token_ids=token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        activation=activation,
        qkv_bias=(family.qkv_bias and read.flag("qkv_bias", True)) or (attention_bias and not family.output_bias),
        windows=_windows(raw, read, family, num_layers),
        attention_scale=_attention_scale(raw, read, head_dim),
        attention_soft_cap=read.number("attn_logit_softcapping", 0.0) if "attn_logit_softcapping" in raw else 0.0,
        logit_soft_cap=read.number("final_logit_softcapping", 0.0) if "final_logit_softcapping" in raw else 0.0,
        embedding_multiplier=read.number("embedding_multiplier", 1.0),
        residual_multiplier=read.number("residual_multiplier", 1.0),
        logit_divisor=read.number("logits_scaling", 1.0),
        moe=_moe(raw, read, family, num_layers),
        checkpoint_format=read_checkpoint_format(raw, read),
        unrotated=_find_unrotated(raw, read, num_layers) if "no_rope_layers" in family.keys else (),
    )


def _has_no_effect(key: str, raw: Mapping[str, Any]) -> bool:
    if key == "sliding_window":
        return raw.get("use_sliding_window") is False
    return key == "layer_types" and isinstance(raw[key], list) and all(kind == _FULL for kind in raw[key])


def _attention_scale(raw: Mapping[str, Any], read: ConfigReader, head_dim: int) -> float:
    if "attention_multiplier" in raw:
        return read.number("attention_multiplier", 1.0)
    scalar: float = read.number("query_pre_attn_scalar", float(head_dim))
    return float(scalar**-0.5)


def _windows(raw: Mapping[str, Any], read: ConfigReader, family: FamilyKeys, num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer, or no entries if no layer has one."""
    is_off = "use_sliding_window" in family.defaults and not raw.get("use_sliding_window")
    if "sliding_window" not in raw or is_off:
        return ()
    window = read.integer("sliding_window", maximum=1 << 30)
    types = raw.get("layer_types") if "layer_types" in family.keys else None
    if types is None:
        slides = family.windows(raw, num_layers)
    elif isinstance(types, list) and len(types) == num_layers and all(kind in (_FULL, _SLIDING) for kind in types):
        slides = [kind == _SLIDING for kind in types]
    else:
        raise read.error(f"layer_types must have {num_layers} entries, each {_FULL} or {_SLIDING}")
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def _find_unrotated(raw: Mapping[str, Any], read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    rotated = _read_rotary_layers(raw, num_layers)
    if len(rotated) < num_layers or any(each not in (0, 1) for each in rotated):
        raise read.error(f"no_rope_layers must have a 0 or 1 for each of {num_layers} layers")
    return tuple(not each for each in rotated[:num_layers])


def _moe(raw: Mapping[str, Any], read: ConfigReader, family: FamilyKeys, num_layers: int) -> MoeConfig | None:
    if not _EXPERTS & family.keys:
        return None
    key = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    num_experts = read.integer(key, maximum=4096)
    per_token = read.integer("num_experts_per_tok", maximum=num_experts)
    step, dense = read.integer("decoder_sparse_step", default=1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise read.error(f"mlp_only_layers is {dense!r}; want a list of layers")
    shared = "shared_expert_intermediate_size"
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=read.integer("moe_intermediate_size", default=read.integer("intermediate_size")),
        normalize=family.normalize_experts or read.flag("norm_topk_prob", False),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        shared_size=read.integer(shared) if shared in family.keys else 0,
    )


def _ropes(raw: Mapping[str, Any], read: ConfigReader, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and that of layers with a window if it differs."""
    if raw.get("rope_interleaved"):
        raise read.error("interleaved rotary embeddings are not supported")
    # Newer files have rope_parameters, by type of layer or for all. Older ones have rope_theta and rope_scaling.
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise read.error(f"rope_scaling is {given!r}; want an object")
    if not given.keys() & {_FULL, _SLIDING}:
        local = {"rope_theta": raw["rope_local_base_freq"]} if "rope_local_base_freq" in raw else None
        return _rope(given, raw, read, head_dim), _rope(local, raw, read, head_dim) if local else None
    parts = [given.get(name, {}) for name in (_FULL, _SLIDING)]
    if not all(isinstance(part, dict) for part in parts):
        raise read.error("rope_parameters must have an object for each type of layer")
    full, local_rope = (_rope(part, raw, read, head_dim) for part in parts)
    return full, local_rope


def _rope(given: Mapping[str, Any], raw: Mapping[str, Any], outer: ConfigReader, head_dim: int) -> RopeConfig:
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    own = {key: value for key, value in given.items() if value is not None}
    merged = {**{name: raw[name] for name in names if name in raw}, **own}
    read = ConfigReader(merged, outer.path)
    kind = merged.get("rope_type", merged.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the first name in Phi-3's files
    if kind not in ("default", "dynamic", "linear", "llama3", "yarn", "longrope"):
        raise read.error(
            f"rope type {kind!r} is not supported; want default, dynamic, linear, llama3, yarn or longrope"
        )
    rotary = int(head_dim * read.number("partial_rotary_factor", 1.0))
    if not 2 <= rotary <= head_dim or rotary % 2:
        raise read.error(f"partial_rotary_factor rotates {rotary} of {head_dim} dimensions; want an even number")
    longest = outer.integer("max_position_embeddings")
    default = {"llama3": 8192}.get(kind, longest)
    original = read.integer("original_max_position_embeddings", default=default)
    scaled = kind in ("yarn", "longrope")
    factor = read.number("factor", longest / original if scaled else 1.0)
    theta = read.number("rope_theta", 10_000.0)
    if kind == "yarn" and theta <= 1:
        raise read.error(f"rope_theta is {theta}; want more than 1 for yarn")
    if kind == "longrope" and original == 1:
        raise read.error("original_max_position_embeddings is 1; want at least 2 for longrope")
    return RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=factor,
        low_freq_factor=read.number("low_freq_factor", 1.0),
        high_freq_factor=read.number("high_freq_factor", 4.0),
        original_max_position=original,
        rotary_dim=rotary,
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        truncate=read.flag("truncate", True),
        attention_factor=_attention_factor(kind, factor, original, merged, read),
        short_factors=_factors("short_factor", kind, merged, rotary, read),
        long_factors=_factors("long_factor", kind, merged, rotary, read),
    )


def _attention_factor(kind: str, factor: float, original: int, merged: Mapping[str, Any], read: ConfigReader) -> float:
    """Return the factor of cos and sin."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in merged:
        return read.number("attention_factor", 1.0)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return sqrt(1 + log(factor) / log(original))
    if merged.get("mscale") and merged.get("mscale_all_dim"):
        part = [0.1 * read.number(name, 1.0) * log(factor) + 1.0 for name in ("mscale", "mscale_all_dim")]
        return part[0] / part[1]
    return 0.1 * log(factor) + 1.0


def _factors(name: str, kind: str, merged: Mapping[str, Any], rotary: int, read: ConfigReader) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    values = merged.get(name)
    if not isinstance(values, list) or len(values) != rotary // 2:
        raise read.error(f"{name} must be a list of {rotary // 2} numbers")
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e6 for v in values):
        raise read.error(f"{name} must contain positive numbers")
    return tuple(float(value) for value in values)
