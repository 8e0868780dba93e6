"""Checkpoints of each quantized format, compared with the same weights in float32, and invalid ones."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract.engine_config import QuantizationName
from inference_worker.engine.architectures import load_model, smoothing
from inference_worker.engine.architectures.layers import Fp8Linear, Int8Linear, Layers, NativeLinear, RMSNorm
from inference_worker.engine.quantization import linear_weights
from inference_worker.engine.quantization.linear_weights import LinearWeights
from inference_worker.engine.quantization.quantize import quantize, quantize_head, to_int8
from inference_worker.engine.quantization.weights import Fp8Weight, Int4Weight, Int8Weight, Weight, dequantize
from kernels.native import operators
from kernels.native.library import load_library
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
    form = read_decoder_directory(directory).checkpoint_format
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
    for shape in ((100, 64), (96, 65)):  # sizes that do not fill the packed numbers
        with pytest.raises(ModelError):
            take(tmp_path / "quantized", "a_proj", shape)


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


def test_transforms_of_activations_are_rejected(tmp_path: Path) -> None:
    model = FamilyModel(CASES["qwen3"], tmp_path / "plain")
    write_quantized(model.directory, "compressed-w4a16", tmp_path / "quantized", tmp_path / "reference")
    path = tmp_path / "quantized" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="transform_config of compressed-tensors is not supported"):
        read_decoder_directory(tmp_path / "quantized")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    model = FamilyModel(CASES["qwen3"], tmp_path / "plain")
    write_quantized(model.directory, "awq", tmp_path / "quantized", tmp_path / "reference")
    with pytest.raises(ModelError, match=r"is already quantized \(awq\): set quantization to none"):
        generate_from(model, tmp_path / "quantized", quantization="int8")


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("awq", operators.PackedLinearInt4),
        ("gptq-4", operators.PackedLinearInt4),
        ("compressed-w4a16-zeros", operators.PackedLinearInt4),
        ("compressed-w8a8", operators.PackedLinearInt8),
    ],
)
def test_the_kernels_keep_weights_quantized(name: str, product: type, model: FamilyModel, tmp_path: Path) -> None:
    write_quantized(model.directory, name, tmp_path / "quantized", tmp_path / "reference")
    kept, want = (
        generate_from(model, tmp_path / part, dtype=dtype)
        for part, dtype in (("quantized", "bfloat16"), ("reference", "float32"))
    )
    position = len(PROMPT)
    error = (kept.logits[position].float() - want.logits[position]).norm() / want.logits[position].norm()
    assert error < 0.1
    library = load_library()
    assert library is not None
    form = read_decoder_directory(tmp_path / "quantized").checkpoint_format
    with LinearWeights(tmp_path / "quantized", torch.bfloat16, torch.device("cpu"), form) as weights:
        layers = Layers(kernels=library)
        load_model(read_decoder_directory(tmp_path / "quantized"), weights, layers)
        layer = layers.linear(weights.take_linear("model.layers.0.self_attn.o_proj", (64, 64)))
    assert layers.quantized > 0
    assert layers.dequantized == 0
    assert layers.bytes_per_parameter < (1.3 if product is operators.PackedLinearInt8 else 1.1)
    assert isinstance(layer, NativeLinear)
    assert isinstance(layer.product, product)


@pytest.mark.parametrize("groups", [1, 3])
def test_products_of_8_bit_integers_are_exact(groups: int) -> None:
    x, weight = torch.randn(5, 96), torch.randn(24, 96)
    bias, other = torch.randn(24), torch.randn(5, 24)
    values, scales = to_int8(weight, groups)
    layer = Int8Linear(Int8Weight(values, scales, torch.float32), bias)
    rows, row_scales = to_int8(x, groups)
    want = bias.double().repeat(5, 1)
    for row in range(5):
        for output in range(24):
            for group in range(groups):
                place = slice(group * 96 // groups, (group + 1) * 96 // groups)
                product = int((rows[row, place].int() * values[output, place].int()).sum())
                want[row, output] += product * float(row_scales[row, group]) * float(scales[output, group])
    torch.testing.assert_close(layer(x), want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.add(x, other), want.float() + other, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer(x)[2:3], layer(x[2:3]))


def test_products_of_8_bit_floats_are_close() -> None:
    x, weight, bias = torch.randn(5, 64).bfloat16(), torch.randn(48, 64), torch.randn(48).bfloat16()
    quantized = quantize(weight.bfloat16(), "fp8")
    assert isinstance(quantized, Fp8Weight)
    want = x.float() @ quantized.dequantize().float().T + bias.float()
    got = Fp8Linear(quantized, bias)(x).float()
    assert float((got - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize(("name", "error"), [("int8", 0.01), ("int4", 0.1), ("int4-g64", 0.12), ("fp8", 0.05)])
def test_a_weight_is_quantized_when_it_is_loaded(name: QuantizationName, error: float) -> None:
    weight = torch.randn(48, 192).bfloat16()
    got = dequantize(quantize(weight, name)).float()
    assert float((got - weight.float()).norm() / weight.float().norm()) < error
    assert torch.equal(dequantize(quantize(torch.zeros_like(weight), name)), torch.zeros_like(weight))


def test_the_scales_of_a_weight_have_the_smallest_errors() -> None:
    levels = torch.randint(-8, 9, (64, 320)) * 0.9375
    levels[:, ::32] = 7.5  # with a scale of 7.5 / 120, all levels are multiples
    weight = quantize(levels, "int8")
    assert torch.equal(dequantize(weight), levels)
    values, scales = to_int8(levels, 10)
    assert not torch.equal(dequantize(Int8Weight(values, scales, torch.float32)), levels)


def test_a_head_is_quantized_in_groups_that_divide_its_width() -> None:
    for width, size in ((576, 64), (96, 32), (32, 32)):
        weight = torch.randn(5000, width).bfloat16()
        head = quantize_head(weight)
        assert (head.values.shape, head.scales.shape) == ((5000, width), (5000, width // size))
        assert float((dequantize(head).float() - weight.float()).norm() / weight.float().norm()) < 0.01


def test_a_weight_whose_inputs_do_not_fit_the_groups_stays_as_it_is() -> None:
    weight = torch.randn(8, 48)
    assert quantize(weight, "int4") is weight


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_model_that_is_quantized_when_it_is_loaded_is_close(name: QuantizationName, model: FamilyModel) -> None:
    got, want = (generate_from(model, model.directory, quantization=choice) for choice in (name, "none"))
    position = len(PROMPT)
    error = (got.logits[position] - want.logits[position]).norm() / want.logits[position].norm()
    assert 0 < error < (0.4 if name == "int4" else 0.15)


@pytest.mark.parametrize("family", CASES)
def test_smoothing_changes_no_result_of_weights_that_are_not_rounded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FamilyModel(CASES[family], tmp_path)
    want = generate_from(model, model.directory, quantization="none")
    monkeypatch.setattr(linear_weights, "quantize", lambda weight, _: weight)
    factors: list[float] = []
    divide = RMSNorm.divide

    def watch(norm: RMSNorm, divisors: torch.Tensor) -> None:
        factors.extend(divisors.tolist())
        divide(norm, divisors)

    monkeypatch.setattr(RMSNorm, "divide", watch)
    got = generate_from(model, model.directory, quantization="int8")
    assert all(torch.equal(got.logits[position], want.logits[position]) for position in want.logits)
    assert bool(factors) == (family != "olmo2")  # which has no norm before its products
    assert all(math.log2(factor).is_integer() for factor in factors)


def test_smoothing_lowers_the_error_of_channels_of_different_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FamilyModel(CASES["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 60  # and the columns of the weights that read these channels are smaller
        elif any(f".{part}_proj.weight" in name for part in ("q", "k", "v", "gate", "up")):
            tensor[:, ::16] /= 60
    save_file(tensors, tmp_path / "model.safetensors")
    want = generate_from(model, tmp_path, quantization="none").logits
    smoothed = generate_from(model, tmp_path, quantization="int8").logits
    monkeypatch.setattr(LinearWeights, "is_int8", False)
    rounded = generate_from(model, tmp_path, quantization="int8").logits
    position = len(PROMPT)
    errors = [float((logits[position] - want[position]).norm()) for logits in (smoothed, rounded)]
    assert 0 < 2 * errors[0] < errors[1]


def test_smoothing_lowers_the_error_of_inner_channels_of_different_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FamilyModel(CASES["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".up_proj.weight" in name:
            tensor[::16] *= 1000
        elif ".down_proj.weight" in name:
            tensor[:, ::16] /= 1000
    save_file(tensors, tmp_path / "model.safetensors")
    want = generate_from(model, tmp_path, quantization="none", dtype="bfloat16").logits
    smoothed = generate_from(model, tmp_path, quantization="int8", dtype="bfloat16").logits
    monkeypatch.setattr(smoothing, "_INNER_EXPONENT", 0.0)
    others = generate_from(model, tmp_path, quantization="int8", dtype="bfloat16").logits
    position = len(PROMPT)
    errors = [float((logits[position] - want[position]).norm()) for logits in (smoothed, others)]
    assert 0 < 1.5 * errors[0] < errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_never_in_memory_twice(dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    keys = {"vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **keys}))
    shapes = {f"self_attn.{name}_proj": (512, 512) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (1536, 512), "mlp.up_proj": (1536, 512), "mlp.down_proj": (512, 1536)}
    tensors = {"model.embed_tokens.weight": torch.randn(64, 512), "model.norm.weight": torch.ones(512)}
    for layer in range(8):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(512)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    del tensors
    before, most, total_bytes = anonymous_bytes(), 0, 0

    def watch(_: int, total: int) -> None:
        nonlocal most, total_bytes
        most, total_bytes = max(most, anonymous_bytes()), total

    config = read_decoder_directory(tmp_path)
    kernels = load_library() if dtype == torch.bfloat16 else None
    with LinearWeights(tmp_path, dtype, torch.device("cpu"), progress=watch) as weights:
        model = load_model(config, weights, Layers(kernels=kernels))
    most = max(most, anonymous_bytes())
    del model
    assert most - before < 1.5 * total_bytes


def anonymous_bytes() -> int:
    """Return the memory of the process that is not part of a mapped file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10
