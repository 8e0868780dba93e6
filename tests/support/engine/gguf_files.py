"""GGUF files of small models, written with the package gguf: its names of tensors and of keys."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

# Class name -> architecture, whether queries and keys are in the order of rotation by pairs, and the offset of norms.
ARCHITECTURES = {
    "Llama": ("llama", True, 0),
    "Mistral": ("llama", True, 0),
    "Mixtral": ("llama", True, 0),
    "Qwen2": ("qwen2", False, 0),
    "Qwen2Moe": ("qwen2moe", False, 0),
    "Qwen3": ("qwen3", False, 0),
    "Qwen3Moe": ("qwen3moe", False, 0),
    "Gemma2": ("gemma2", False, 1),
    "Gemma3Text": ("gemma3", False, 1),
    "Phi3": ("phi3", False, 0),
    "Olmo2": ("olmo2", False, 0),
    "Granite": ("granite", True, 0),
    "SmolLM3": ("smollm3", True, 0),
    "Glm4": ("glm4", False, 0),
}


def round_weights(directory: Path) -> None:
    """Round the weights of a checkpoint to bfloat16, in which a converted GGUF file has them."""
    path = directory / "model.safetensors"
    save_file({name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}, path)


def write_gguf(
    classes: str, directory: Path, path: Path, quantization: gguf.GGMLQuantizationType | None = None
) -> None:
    """Write the checkpoint `directory` as a GGUF file.

    Args:
        quantization: of the matrices of layers; None: F32.
    """
    architecture, is_permuted, norm_offset = ARCHITECTURES[classes]
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, architecture)
    add_tokenizer(writer, config["vocab_size"])
    tensors = load_file(directory / "model.safetensors")
    layers = config["num_hidden_layers"]
    own, dense = (
        gguf.get_tensor_name_map(next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == name), layers)
        for name in (architecture, "llama")
    )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in _stack_experts(tensors, layers).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stem, _, kind = name.rpartition(".")
        short = own.get_name(stem) or dense.get_name(stem)  # a layer without experts
        assert short, f"gguf has no name for {name}"
        values = tensor.float().numpy()
        if is_permuted and (count := heads.get(short.split(".")[-1])):
            values = _permute(values, count)
        if norm_offset and stem.endswith("norm"):
            values = values + norm_offset
        if short.endswith("ffn_gate_inp_shexp"):
            values = values[0]
        if quantization is not None and values.ndim > 1 and short.startswith("blk"):
            writer.add_tensor(f"{short}.{kind}", gguf.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(f"{short}.{kind}", np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _stack_experts(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(layers):
        for part in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
            own = [name for name in tensors if f"layers.{layer}." in name and name.endswith(f".{part}.weight")]
            experts = sorted((name for name in own if ".experts." in name), key=lambda name: int(name.split(".")[-3]))
            if experts:
                prefix = experts[0].split(".experts.")[0]
                stacked[f"{prefix}.experts.{part}.weight"] = torch.stack([tensors[name] for name in experts])
    return stacked


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    rotated = int(head_dim * (full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
    writer.add_rope_dimension_count(rotated)
    kind = full.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    elif kind == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(full[f"{name}_factor"], dtype=np.float32))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(full, head_dim))
    if config.get("sliding_window") and config.get("use_sliding_window", True) and config["model_type"] != "mixtral":
        writer.add_sliding_window(config["sliding_window"])
    if types := config.get("layer_types") if architecture == "gemma3" else None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
    for key, add in (("attn_logit_softcapping", writer.add_attn_logit_softcapping),
                     ("final_logit_softcapping", writer.add_final_logit_softcapping),
                     ("attention_multiplier", writer.add_attention_scale),
                     ("embedding_multiplier", writer.add_embedding_scale),
                     ("residual_multiplier", writer.add_residual_scale),
                     ("logits_scaling", writer.add_logit_scale),
                     ("num_experts_per_tok", writer.add_expert_used_count),
                     ("moe_intermediate_size", writer.add_expert_feed_forward_length),
                     ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length)):  # fmt: skip
        if config.get(key) is not None:
            add(config[key])
    if count := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(count)


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Return the divisors of the frequencies as llama.cpp's converter computes them."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add a tokenizer of bytes with one merge."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["ab", *letters, *(f"<{number}>" for number in range(vocab_size))][:vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["a b"])
