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

from inference_worker.contract.config import ModelError
from inference_worker.contract.settings import ModelSpec
from inference_worker.models.gguf_file import GGUFFile
from inference_worker.models.model_source import ensure_model
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
