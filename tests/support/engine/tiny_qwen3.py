"""A small Qwen3 checkpoint with random weights, written without transformers, which takes seconds to import."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.engine.tiny_tokenizer import write_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{# <think> enable_thinking #}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 320, 64, 96, 2, 4, 2, 16, 512


def write_qwen3(directory: Path, *, shards: int = 1, hidden: int = HIDDEN, **changes: object) -> Path:
    """Write the checkpoint, in several files if asked, and return its directory. `changes` are keys of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, MARKS, TEMPLATE)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        "dtype": "float32",
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    numbers = np.random.default_rng(0)
    shapes = list(_shapes(hidden).items())
    weights = {name: numbers.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes}
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name, _ in shapes[shard::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.mlp.gate_proj.weight": (INNER, hidden),
            f"{prefix}.mlp.up_proj.weight": (INNER, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, INNER),
        }
    return shapes
