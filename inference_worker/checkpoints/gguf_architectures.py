"""The architectures of GGUF files: the names of their tensors, and the keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_worker.checkpoints.gguf_fields import Fields

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Tensors of rotary embeddings, which become keys of config.json.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
# `{}` is the expert's index: these tensors are [experts, outputs, inputs].
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_GEMMA3_LOCAL_THETA, _GEMMA3_PATTERN = 10_000.0, 6

Keys = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    names: of a layer's parts in GGUF -> in a Hugging Face checkpoint.
    keys: returns the keys of config.json that differ from those of Llama.
    is_permuted: queries and keys are in the row order of rotation by pairs.
    norm_offset: is subtracted from the weights of norms.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str]
    keys: Callable[[Fields], Keys] = field(default=lambda _: {})
    is_permuted: bool = False
    norm_offset: float = 0.0


def architecture_of(fields: Fields) -> Architecture:
    """Return the architecture of the file.

    Raises:
        GGUFError: it is not supported.
    """
    name = fields.architecture
    if name == "llama" and fields.size("expert_count", 0):
        return _MIXTRAL_MODEL
    if name == "llama" and fields.has("attention.sliding_window"):
        return _MISTRAL_MODEL
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise fields.error(f"architecture {name!r:.40} is not supported; want one of {known}")
    return _ARCHITECTURES[name]


def config_of(fields: Fields, architecture: Architecture) -> Keys:
    """Return the content of config.json."""
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // max(heads, 1))
    eos = [token for token in (fields.token("eos"), fields.token("eot")) if token is not None]
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "bos_token_id": fields.token("bos"),
        "eos_token_id": eos[0] if len(set(eos)) == 1 else eos or None,
        "pad_token_id": fields.token("padding"),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": head_dim,
        "intermediate_size": fields.size("feed_forward_length", hidden),  # absent if all layers have experts
        "max_position_embeddings": fields.size("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": fields.layers,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(fields, head_dim),
        "tie_word_embeddings": "output.weight" not in fields.file.tensors,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields.items("tokenizer.ggml.tokens", str)),
        **architecture.keys(fields),
    }


def _rope_scaling(fields: Fields, head_dim: int) -> Keys | None:
    kind = fields.text(f"{fields.architecture}.rope.scaling.type", "none")
    context = fields.size("context_length")
    if (factors := fields.tensor("rope_freqs.weight")) is not None:  # of Llama 3: divisors of the frequencies
        return {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0,
            "attention_factor": 1.0, "original_max_position_embeddings": context,
        }  # fmt: skip
    short, long = (fields.tensor(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is not None and long is not None:
        scaling = {
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": fields.size("rope.scaling.original_context_length", context),
        }  # fmt: skip
        if fields.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = fields.number("rope.scaling.attn_factor", 1.0)
        return scaling
    if kind == "none":
        return None
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.size("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise fields.error(f"rope scaling {kind!r:.40} is not supported")


def _llama(fields: Fields) -> Keys:
    return {
        "attention_bias": "blk.0.attn_q.bias" in fields.file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in fields.file.tensors,
    }


def _mistral(fields: Fields) -> Keys:
    window = fields.size("attention.sliding_window", 0)
    return {"sliding_window": window or None}


def _mixtral(fields: Fields) -> Keys:
    count, used = fields.size("expert_count"), fields.size("expert_used_count")
    return {**_mistral(fields), "num_local_experts": count, "num_experts_per_tok": used}


def _experts(fields: Fields) -> Keys:
    layers = range(fields.layers)
    return {
        "num_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate.weight" in fields.file.tensors],
        "norm_topk_prob": True,
    }


def _qwen2_moe(fields: Fields) -> Keys:
    shared = fields.size("expert_shared_feed_forward_length")
    return {**_experts(fields), "norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _gemma2(fields: Fields) -> Keys:
    return {
        **_gemma(fields, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields) -> Keys:
    layers = fields.layers
    pattern = fields.file.fields.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, list):
        slides = [bool(slide) for slide in pattern]
    else:
        every = fields.size("attention.sliding_window_pattern", _GEMMA3_PATTERN) or 1
        slides = [bool((layer + 1) % every) for layer in range(layers)]
    return {
        **_gemma(fields, _GEMMA3_27B_LAYERS),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_local_base_freq": fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
    }


def _gemma(fields: Fields, layers_27b: int) -> Keys:
    """Return the keys of Gemma. The file does not have the divisor of scores, which differs for the model of 27B."""
    head_dim = fields.size("attention.key_length", 256)
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    is_27b = fields.layers == layers_27b
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b and heads else head_dim,
        "sliding_window": fields.size("attention.sliding_window", 4096),
    }


def _phi3(fields: Fields) -> Keys:
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // max(heads, 1))
    return {
        "partial_rotary_factor": fields.size("rope.dimension_count", head_dim) / max(head_dim, 1),
        "original_max_position_embeddings": fields.size(
            "rope.scaling.original_context_length", fields.size("context_length")
        ),
        "sliding_window": fields.size("attention.sliding_window", 0) or None,
    }


def _glm4(fields: Fields) -> Keys:
    head_dim = fields.size("attention.key_length", 128)
    return {
        "attention_bias": "blk.0.attn_q.bias" in fields.file.tensors,
        "partial_rotary_factor": fields.size("rope.dimension_count", head_dim) / max(head_dim, 1),
    }


def _granite(fields: Fields) -> Keys:
    head_dim = fields.size("embedding_length") / max(fields.size("attention.head_count"), 1)
    if head_dim <= 0:
        raise fields.error("embedding_length and attention.head_count must be at least 1")
    return {
        **_llama(fields),
        "attention_multiplier": fields.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


_LLAMA_NAMES = _ATTENTION | _DENSE
_GEMMA_NAMES = _ATTENTION | _DENSE | _SANDWICH
_MISTRAL_MODEL = Architecture("MistralForCausalLM", "mistral", _LLAMA_NAMES, _mistral, is_permuted=True)
_MIXTRAL_MODEL = Architecture("MixtralForCausalLM", "mixtral", _LLAMA_NAMES | _MIXTRAL, _mixtral, is_permuted=True)
_ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _GEMMA_NAMES, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA_NAMES | _QK_NORM, _gemma3, norm_offset=1.0),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        _LLAMA_NAMES
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _glm4,
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", _LLAMA_NAMES, _granite, is_permuted=True),
    "llama": Architecture("LlamaForCausalLM", "llama", _LLAMA_NAMES, _llama, is_permuted=True),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        _LLAMA_NAMES
        | _QK_NORM
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _phi3,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA_NAMES),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _LLAMA_NAMES | _EXPERTS | _SHARED, _qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LLAMA_NAMES | _QK_NORM),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _LLAMA_NAMES | _QK_NORM | _EXPERTS, _experts),
    # A file does not have the layers without rotary embedding: every fourth one.
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _LLAMA_NAMES, _llama, is_permuted=True),
}
