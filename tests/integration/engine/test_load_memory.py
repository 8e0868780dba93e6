"""The anonymous memory of a load, for each source format and quantization, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inference_worker.checkpoints.inspection import inspect_checkpoint
from inference_worker.contract.engine_config import QuantizationName
from inference_worker.engine.capacity.fit import ComputeDevice, estimate_fit
from kernels.native.library import load_library
from tests.support.engine.gguf_files import add_tokenizer
from tests.support.engine.load_memory import LoadMemory
from tests.support.engine.tiny_tokenizer import write_tokenizer

HIDDEN, INNER, LAYERS, HEADS, VOCAB = 256, 2048, 16, 4, 512
MATRICES = {
    "self_attn.q_proj": ("attn_q", HIDDEN, HIDDEN),
    "self_attn.k_proj": ("attn_k", HIDDEN, HIDDEN),
    "self_attn.v_proj": ("attn_v", HIDDEN, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HIDDEN),
    "mlp.gate_proj": ("ffn_gate", INNER, HIDDEN),
    "mlp.up_proj": ("ffn_up", INNER, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, INNER),
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
LAYER_VALUES = sum(rows * columns for _, rows, columns in MATRICES.values())
MORE_BYTES = 24 << 20  # of temporary tensors and of the process; the documented bound is 100 MB
CASES: list[tuple[str, QuantizationName]] = [
    ("BF16", "none"), ("BF16", "int8"), ("BF16", "int4"), ("F32", "none"), ("F32", "int8"), ("FP8", "none"),
    ("Q8_0", "none"), ("Q8_0", "gguf"), ("Q4_K", "none"), ("Q4_K", "gguf"),
]  # fmt: skip
SOURCE_BYTES = {"BF16": 2, "F32": 4, "FP8": 1, "Q8_0": 2, "Q4_K": 2}  # a number; GGUF after the conversion
DEVICE = ComputeDevice("cpu", "test", 1 << 40, "bfloat16", None)


def write_checkpoint(directory: Path, kind: str) -> Path:
    """Write a Llama as safetensors files in one of the types."""
    directory.mkdir()
    write_tokenizer(directory, [])
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "eos_token_id": 256,
    }  # fmt: skip
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    rows = {name: torch.ones(HIDDEN) for name in ("model.norm.weight",)}
    rows |= {name: torch.randn(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors = {name: tensor.to(dtype) for name, tensor in rows.items()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": torch.ones(HIDDEN).to(dtype) for name in NORMS}
        for name, (_, outs, ins) in MATRICES.items():
            weight = torch.randn(outs, ins).mul_(0.02)
            tensors[f"{prefix}.{name}.weight"] = weight.to(torch.float8_e4m3fn if kind == "FP8" else dtype)
            if kind == "FP8":
                tensors[f"{prefix}.{name}.weight_scale"] = torch.ones(())
    if kind == "FP8":
        config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_gguf(path: Path, kind: str) -> Path:
    """Write a Llama as a GGUF file with random blocks in the layers."""
    block = gguf.GGMLQuantizationType[kind]
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[block]
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    add_tokenizer(writer, VOCAB)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", draw.normal(size=(VOCAB, HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name in NORMS.values():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name, outs, ins in MATRICES.values():
            blocks = draw.integers(0, 64, (outs, ins // numbers * num_bytes), np.uint8)  # scales are finite
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, LoadMemory]]:
    """Return the source and the memory of each case. One process loads all of them."""
    root = tmp_path_factory.mktemp("loads")
    torch.manual_seed(0)
    sources = {
        kind: write_gguf(root / f"{kind}.gguf", kind) if kind.startswith("Q") else write_checkpoint(root / kind, kind)
        for kind in SOURCE_BYTES
    }
    cases = [[str(sources[kind]), quantization, str(root / "data")] for kind, quantization in CASES]
    command = [sys.executable, "-m", "tests.support.engine.load_memory", json.dumps(cases)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = [LoadMemory(*numbers) for numbers in json.loads(output.splitlines()[-1])]
    return {case: (sources[case[0]], result) for case, result in zip(CASES, results, strict=True)}


@pytest.mark.parametrize(("kind", "quantization"), CASES)
def test_a_load_takes_the_weights_and_one_layer(
    kind: str, quantization: QuantizationName, loads: dict[tuple[str, str], tuple[Path, LoadMemory]]
) -> None:
    assert load_library() is not None, "the bounds are those of the C kernels"
    source, memory = loads[kind, quantization]
    weights = estimate_fit(inspect_checkpoint(source), DEVICE, quantization=quantization).weight_bytes
    layer = LAYER_VALUES * SOURCE_BYTES[kind]
    assert weights - MORE_BYTES < memory.rest < weights + MORE_BYTES
    assert memory.peak < weights + layer + MORE_BYTES
    assert memory.conversion_peak < layer + MORE_BYTES
