"""GGUF files: each type of block, each architecture and each tokenizer."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.model_config import CheckpointFormat, ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.architectures import load_model
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.quantization.linear_weights import LinearWeights
from inference_worker.engine.quantization.weights import Int4Weight, Int8Weight, dequantize
from kernels.native.library import load_library
from tests.support.engine.families import CASES, VOCAB, FamilyModel, Generated, generate
from tests.support.engine.gguf_files import round_weights, write_gguf

PROMPT = [random.Random(0).randrange(3, VOCAB) for _ in range(42)]  # longer than the windows
TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
]  # fmt: skip
FAMILIES = [name for name in CASES if name not in ("qwen2", "smollm3-window")]  # the window is not part of a GGUF file


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_decoded_as_by_the_reference(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 5, 2 * max(block, 32)
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "a.gguf") as file, np.errstate(all="ignore"):
        got = np.concatenate(list(file.rows(file.tensors["a.weight"], 2)))
        want = gguf.dequantize(raw, kind).reshape(rows, columns)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


def generate_from(model: FamilyModel, directory: Path, **changes: Any) -> Generated:
    located = copy.copy(model)
    located.directory = directory
    return generate(located.engine(num_blocks=30, **changes), {"a": PROMPT}, 6)["a"]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_architecture_generates_as_its_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "query_pre_attn_scalar" in case.changes:  # a GGUF file does not have it
        case = replace(case, changes=case.changes | {"query_pre_attn_scalar": case.changes["head_dim"]})
    model = FamilyModel(case, tmp_path / "plain")
    round_weights(model.directory)
    write_gguf(model.case.classes, model.directory, tmp_path / "model.gguf")
    converted = ensure_model(ModelSpec("m", str(tmp_path / "model.gguf"), "auto"), tmp_path)
    got, want = generate_from(model, converted), generate_from(model, model.directory)
    for position, logits in want.logits.items():
        assert float((got.logits[position] - logits).abs().max()) < 2e-3 * float(logits.abs().max())
    assert got.tokens == want.tokens


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0"])
def test_kept_blocks_equal_the_reference(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 40, 2 * block
    numbers = np.random.default_rng(0)
    raw = numbers.integers(0, 256, (rows, 2, size), dtype=np.uint8)
    for start in (0,) if name in ("Q4_0", "Q5_0", "Q8_0") else (0, 2):  # the scale and the minimum of each block
        halves = numbers.uniform(-2, 2, (rows, 2)).astype(np.float16)
        halves[0, 0] = 0
        raw[:, :, start : start + 2] = halves.view(np.uint8).reshape(rows, 2, 2)
    raw = raw.reshape(rows, -1)
    save_file({f"a_proj.{name.lower()}": torch.from_numpy(raw)}, tmp_path / "model.safetensors")
    form = CheckpointFormat("gguf", 8)
    with LinearWeights(tmp_path, torch.float32, torch.device("cpu"), form, "gguf") as weights:
        got = weights.take_linear("a_proj", (rows, columns))
        plain = weights.take("a_proj.weight", (rows, columns))
        with pytest.raises(ModelError):
            weights.take_linear("a_proj", (rows, columns + 8))
    assert isinstance(got, Int4Weight if name.startswith("Q4") else Int8Weight)
    want = torch.from_numpy(gguf.dequantize(raw, kind).reshape(rows, columns))
    torch.testing.assert_close(dequantize(got), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    assert torch.equal(plain, dequantize(got))


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "Q8_0"), ("phi3", "Q4_0"), ("qwen3-moe", "Q4_1"), ("olmo2", "Q5_0")]
)
def test_a_file_with_kept_blocks_generates_as_its_converted_weights(family: str, kind: str, tmp_path: Path) -> None:
    model = FamilyModel(CASES[family], tmp_path / "plain")
    path = tmp_path / "model.gguf"
    write_gguf(model.case.classes, model.directory, path, gguf.GGMLQuantizationType[kind])
    converted, kept = (
        ensure_model(ModelSpec("m", str(path), "auto", quantization=quantization), tmp_path)
        for quantization in ("none", "gguf")
    )
    assert converted != kept
    assert (kept / "model.safetensors").stat().st_size < 0.8 * (converted / "model.safetensors").stat().st_size
    want = generate_from(model, converted)
    position = len(PROMPT)
    for dtype in ("float32", "bfloat16"):
        got = generate_from(model, kept, dtype=dtype, quantization="gguf")
        error = (got.logits[position].float() - want.logits[position]).norm() / want.logits[position].norm()
        assert error < 0.1, dtype


def test_a_kept_model_has_quantized_products(tmp_path: Path) -> None:
    model = FamilyModel(CASES["llama"], tmp_path / "plain")
    write_gguf(model.case.classes, model.directory, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    directory = ensure_model(ModelSpec("m", str(tmp_path / "m.gguf"), "auto", quantization="gguf"), tmp_path)
    config, layers = read_decoder_directory(directory), Layers(kernels=load_library())
    cpu = torch.device("cpu")
    with LinearWeights(directory, torch.bfloat16, cpu, config.checkpoint_format, "gguf") as weights:
        load_model(config, weights, layers)
    assert (layers.quantized, layers.dequantized) == (4 * config.num_layers, 0)


def test_only_a_file_has_blocks_to_keep(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"quantization gguf requires a \.gguf file"):
        ensure_model(ModelSpec("m", str(model_dir), "auto", quantization="gguf"), tmp_path)
    form = read_decoder_directory(model_dir).checkpoint_format
    with pytest.raises(ModelError, match=r"not converted from a \.gguf file"):
        LinearWeights(model_dir, torch.float32, torch.device("cpu"), form, "gguf")


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe"])
def test_a_file_with_too_many_layers_is_rejected_in_bounded_time(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
    for add in (writer.add_embedding_length, writer.add_head_count, writer.add_context_length):
        add(64)
    for add in (writer.add_expert_count, writer.add_expert_used_count, writer.add_expert_feed_forward_length):
        add(0 if architecture == "llama" else 8)
    writer.add_token_list(["a"])
    writer.add_block_count((1 << 32) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="block_count is 4294967295; want 1 to 4096"):
        ensure_model(ModelSpec("m", str(tmp_path / "a.gguf"), "auto"), tmp_path)
