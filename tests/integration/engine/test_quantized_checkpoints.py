"""Checkpoints of each quantized format, compared with the same weights in float32, and invalid ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_worker.contract.config import ModelConfig, ModelError
from inference_worker.engine.quantization.linear_weights import LinearWeights
from inference_worker.engine.quantization.weights import Int4Weight, Int8Weight, Weight, dequantize
from tests.support.engine.families import CASES, VOCAB, FamilyModel, Generated, generate
from tests.support.engine.quantized_checkpoints import FORMATS, write_quantized

PROMPT = [random.Random(0).randrange(3, VOCAB) for _ in range(20)]
KEPT = {"awq": Int4Weight, "gptq-4": Int4Weight, "compressed-w4a16": Int4Weight, "compressed-w8a8": Int8Weight}


@pytest.fixture(scope="module", params=["llama", "phi3", "qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASES[request.param], tmp_path_factory.mktemp(request.param))


def generate_from(model: FamilyModel, directory: Path, **changes: Any) -> Generated:
    located = copy.copy(model)
    located.directory = directory
    return generate(located.engine(num_blocks=30, **changes), {"a": PROMPT}, 6)["a"]


def take(directory: Path, layer: str, shape: tuple[int, int]) -> Weight:
    form = ModelConfig.from_dir(directory).checkpoint_format
    with LinearWeights(directory, torch.float32, torch.device("cpu"), form) as weights:
        return weights.take_linear(layer, shape)


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_generates_as_its_dequantized_weights(name: str, model: FamilyModel, tmp_path: Path) -> None:
    write_quantized(model.directory, name, tmp_path / "quantized", tmp_path / "reference")
    got, want = (generate_from(model, tmp_path / part) for part in ("quantized", "reference"))
    if name == "compressed-w8a8":  # quantizes the inputs of products, too
        position = len(PROMPT)
        error = (got.logits[position] - want.logits[position]).norm() / want.logits[position].norm()
        assert error < 0.1
        return
    assert got.tokens == want.tokens
    for position, logits in want.logits.items():
        torch.testing.assert_close(got.logits[position], logits, atol=1e-4 * float(logits.abs().max()), rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_equal_the_reference(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = tmp_path / "plain"
    plain.mkdir()
    weight = torch.randn(96, 64) * torch.rand(96, 1).exp()
    save_file({"a_proj.weight": weight}, plain / "model.safetensors")
    sizes = {
        "vocab_size": 8, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (plain / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    write_quantized(plain, name, tmp_path / "quantized", tmp_path / "reference")
    got = take(tmp_path / "quantized", "a_proj", (96, 64))
    assert isinstance(got, KEPT.get(name, object))
    want = load_file(tmp_path / "reference" / "model.safetensors")["a_proj.weight"]
    torch.testing.assert_close(dequantize(got), want, rtol=1e-6, atol=1e-7)
    assert float((want - weight).norm() / weight.norm()) < 0.15


def edit(directory: Path, layer_part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change or remove one tensor of the first layer that has it."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(layer_part))
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, path)


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("awq", "qweight", lambda t: t[:-1].contiguous(), "qweight has the shape"),
        ("awq", "qzeros", lambda t: t.long(), "qzeros is of torch.int64; want int32"),
        ("awq", "scales", lambda t: None, "no tensor .*scales"),
        ("gptq-4-act-order", "g_idx", lambda t: t + 1000, "g_idx names a group that does not exist"),
        ("gptq-4-act-order", "g_idx", lambda t: t - 1, "g_idx names a group that does not exist"),
        ("compressed-w4a16", "weight_packed", lambda t: t.float(), "weight_packed is of torch.float32; want int32"),
        ("compressed-w8a8", "_proj.weight", lambda t: t.float(), "weight is of torch.float32; want int8"),
        ("compressed-w8a8", "weight_scale", lambda t: t[:3].contiguous(), "weight_scale has the shape"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:, :1].contiguous(), "weight_scale_inv has the shape"),
    ],
)
def test_an_error_names_an_invalid_tensor(
    name: str, part: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    model = FamilyModel(CASES["qwen3"], tmp_path / "plain")
    write_quantized(model.directory, name, tmp_path / "quantized", tmp_path / "reference")
    edit(tmp_path / "quantized", part, change)
    with pytest.raises(ModelError, match=message):
        generate_from(model, tmp_path / "quantized")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    model = FamilyModel(CASES["qwen3"], tmp_path / "plain")
    write_quantized(model.directory, "awq", tmp_path / "quantized", tmp_path / "reference")
    with pytest.raises(ModelError, match=r"is already quantized \(awq\): set quantization to none"):
        generate_from(model, tmp_path / "quantized", quantization="int8")
