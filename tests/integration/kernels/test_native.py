"""The C kernels compared with the reference, in each instruction set that this machine has."""

from __future__ import annotations

import logging
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from inference_worker.contract.engine_config import EngineConfig, KVCacheDTypeName
from inference_worker.engine import compute_path
from inference_worker.engine.architectures.layers import Layers, NativeLinear
from inference_worker.engine.attention.base import AttentionSpec, CacheShape, ReferenceBackend, StepMetadata
from inference_worker.engine.attention.native import NativeBackend, find_native_limit
from inference_worker.engine.compute_path import choose_path
from inference_worker.engine.kernel_check import find_wrong_operator
from inference_worker.engine.quantization.quantize import quantize_head
from kernels import reference
from kernels.native import build, operators
from kernels.native import library as native
from kernels.native.library import Library, load_library
from kernels.native.memory import MAPPING_BYTES

ROOT = Path(__file__).resolve().parents[3]
VARIANTS = tuple(build._VARIANTS[platform.machine()])
few = settings(max_examples=15, deadline=None)


@cache
def load_all_variants() -> Library:
    return Library(build.build_library(build.find_compilers()[0], build.cache_directory()))


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = load_all_variants()
    if not library.choose(request.param):
        pytest.skip(f"this machine does not have {request.param}")
    assert library.variant == request.param
    library.set_threads(3)
    with pytest.MonkeyPatch.context() as patch:
        # It loads the library of this machine's fastest variant.
        patch.setattr(compute_path, "load_library", lambda _variant="": library)
        yield library
    library.choose("")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), atol=0.01 * float(wanted.abs().max()) + 1e-6, rtol=0.01)


def apply_gate(both: torch.Tensor, activation: operators.Activation | None) -> torch.Tensor:
    """Apply a gate in float64: 1 + tanh(x) of a negative x would lose most digits in float32."""
    if activation is None:
        return both
    gate, up = both.double().chunk(2, -1)
    gated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return gated * up


# Operators


@few
@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 90), st.booleans(), st.booleans())
def test_a_product_equals_the_reference(
    kernels: Library, rows: int, units: int, outputs: int, biased: bool, adds: bool
) -> None:
    inputs = units * operators.UNIT
    weight, bias = randn(outputs, inputs), randn(outputs) if biased else None
    wide = randn(rows, inputs + 3)
    x, residual = wide[:, :inputs], randn(rows, outputs) if adds else None
    want = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if residual is not None:
        want += residual.float()
    product = operators.PackedLinear(kernels, weight, bias)
    got = product(x, residual)
    assert got.shape == want.shape
    if rows:
        assert_near(got, want)
        assert torch.equal(
            got[rows // 2 :], product(x[rows // 2 :], None if residual is None else residual[rows // 2 :])
        )


@few
@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 90), st.booleans())
def test_a_product_in_float32_is_not_rounded(
    kernels: Library, rows: int, units: int, outputs: int, biased: bool
) -> None:
    weight, bias = randn(outputs, units * operators.UNIT), randn(outputs) if biased else None
    x, residual = randn(rows, units * operators.UNIT), torch.randn(rows, outputs + 3)[:, 1 : outputs + 1]
    product = operators.PackedLinear(kernels, weight, bias)
    got, added = product.in_float32(x), product(x, residual)
    want = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == added.dtype == torch.float32
    assert got.shape == want.shape
    if rows:
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(added, got + residual, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.bfloat16(), product(x))


@few
@given(
    st.integers(1, 70),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from(["silu", "gelu_tanh"]),
    st.sampled_from([1, 40]),
)
def test_a_gated_product_equals_the_reference(
    kernels: Library, rows: int, width: int, biased: bool, activation: operators.Activation, scale: int
) -> None:
    weight, bias = scale * randn(2 * width, operators.UNIT), randn(2 * width) if biased else None
    x = randn(rows, operators.UNIT)
    both = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    got = operators.PackedLinear(kernels, weight, bias, activation)(x)
    assert_near(got, apply_gate(both, activation))


@few
@given(st.integers(1, 5), st.integers(1, 600), st.booleans())
def test_argmax_finds_the_first_maximum_or_nan(kernels: Library, rows: int, width: int, has_nan: bool) -> None:
    x = torch.randint(-3, 3, (rows, width)).float()  # most rows have their maximum more than once
    if has_nan:
        x[-1, torch.randint(width, (2,))] = float("nan")
    wanted = [row.index(max(row)) for row in x[:-1].tolist()]
    last = x[-1].tolist()
    wanted.append(next(i for i, v in enumerate(last) if v != v) if has_nan else last.index(max(last)))
    assert operators.argmax(kernels, x).tolist() == wanted


def test_logits_are_not_rounded(kernels: Library) -> None:
    """Two logits that differ by less than a step of bfloat16 keep their order."""
    x, weight = torch.ones(1, 32).bfloat16(), torch.full((2, 32), 8.0).bfloat16()
    weight[1, 0] += 0.125
    head = Layers(kernels=kernels).head(weight)
    assert head(x).tolist() == [[256.0, 256.125]]


@few
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 400), st.integers(0, 3))
def test_the_logits_of_likely_tokens_are_computed_again(
    kernels: Library, rows: int, units: int, tokens: int, gap: int
) -> None:
    weight, wide = randn(tokens, units * operators.UNIT), randn(rows, units * operators.UNIT + gap)
    x = wide[:, : units * operators.UNIT]
    codes, scales = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(tokens, units) / 100
    approximate = operators.PackedLinearInt8(kernels, codes, scales).in_float32(x)
    exact = functional.linear(x.double(), weight.double()).float()
    above = approximate - approximate.amax(1, keepdim=True) + 1.5 * approximate.std(1, correction=0, keepdim=True)
    logits = operators.RescoredLogits(kernels, weight, operators.PackedLinearInt8(kernels, codes, scales))
    got = logits(x)
    differs = (got - torch.where(above >= 0, exact, approximate)).abs() > 1e-3
    assert not differs[above.abs() > 1e-3].any()
    assert torch.equal(got[rows // 2 :], logits(x[rows // 2 :]))


def test_logits_that_are_not_finite_stay_so(kernels: Library) -> None:
    weight = randn(300, 64)
    codes = quantize_head(weight)
    x = randn(3, 64)
    x[1, 7] = float("nan")
    approximate = operators.PackedLinearInt8(kernels, codes.values, codes.scales)
    got = operators.RescoredLogits(kernels, weight, approximate)(x)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_a_head_in_8_bits_has_the_largest_logits_of_its_weight(kernels: Library) -> None:
    weight, x = randn(2000, 96), randn(20, 96)
    layers = Layers(kernels=kernels)
    head = layers.head(weight, rescores=True)
    assert torch.equal(head(x).argmax(1), layers.head(weight)(x).argmax(1))
    assert torch.equal(layers.embedding(weight, head, is_mapped=False)(torch.tensor([3, 1999])), weight[[3, 1999]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wider_weight_is_converted_in_parts(
    kernels: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_PART_NUMBERS", 10_000)
    weight, x = randn(333, 96).to(dtype) * 1.01, randn(5, 96)
    narrow = weight.to(torch.bfloat16)
    packed, want = operators.PackedLinear(kernels, weight), operators.PackedLinear(kernels, narrow)
    assert torch.equal(packed.in_float32(x), want.in_float32(x))
    assert torch.equal(packed.rows(torch.arange(333)), narrow)
    layers = Layers(kernels=kernels)
    for rescores in (False, True):
        heads = [layers.head(each, rescores=rescores) for each in (weight, narrow)]
        assert torch.equal(heads[0](x), heads[1](x))
    whole = quantize_head(narrow)
    codes = operators.PackedLinearInt8(kernels, whole.values, whole.scales)
    assert torch.equal(operators.RescoredLogits(kernels, narrow, codes)(x), heads[0](x))
    for head in (heads[0], None):
        assert torch.equal(layers.embedding(weight, head, is_mapped=True)(torch.tensor([3, 332])), narrow[[3, 332]])
    with pytest.raises(ValueError, match="cannot be packed"):
        operators.PackedLinear(kernels, weight[:332], activation="silu")


QUANTIZED_SHAPES = (
    st.integers(0, 80),
    st.integers(1, 90),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, "silu", "gelu_tanh"]),
)


@few
@given(*QUANTIZED_SHAPES, st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_product_of_8_bit_integers_equals_the_reference(
    kernels: Library,
    rows: int,
    width: int,
    groups: int,
    units: int,
    biased: bool,
    activation: operators.Activation | None,
    scale_dtype: torch.dtype,
) -> None:
    size, outputs = units * operators.UNIT, 2 * width if activation else width
    weight = torch.randint(-127, 128, (outputs, groups * size), dtype=torch.int8)
    scales, bias = (torch.rand(outputs, groups) / 100).to(scale_dtype), randn(outputs) if biased else None
    wide = 3 * randn(rows, groups * size + 1)
    x = wide[:, : groups * size]
    grouped = x.float().view(rows, groups, size)
    factors = grouped.abs().amax(-1, keepdim=True) / 127
    exact = (grouped / factors).nan_to_num(0)
    # A number on the border between two codes may have either of them, and a gate can amplify the difference.
    exact[((exact % 1) - 0.5).abs() < 1e-3] = 0
    x[exact.view_as(x) == 0] = 0
    codes = exact.round()
    by_group = torch.einsum("rgi,ogi->rgo", codes, weight.float().view(outputs, groups, size))
    want = (by_group * factors * scales.float().T).sum(1) + (0 if bias is None else bias.float())
    product = operators.PackedLinearInt8(kernels, weight, scales, bias, activation)
    residual = randn(rows, outputs) if activation is None else None
    got = product(x, residual)
    assert got.shape == (rows, width)
    if rows:
        assert_near(got, apply_gate(want, activation) + (0 if residual is None else residual.float()))
        some = slice(rows // 2, None)
        assert torch.equal(got[some], product(x[some], None if residual is None else residual[some]))
        if activation is None:
            assert torch.equal(product.in_float32(x)[some], product.in_float32(x[some]))


@few
@given(*QUANTIZED_SHAPES, st.booleans())
def test_a_product_with_4_bit_weights_equals_the_reference(
    kernels: Library,
    rows: int,
    width: int,
    groups: int,
    units: int,
    biased: bool,
    activation: operators.Activation | None,
    has_zeros: bool,
) -> None:
    size, outputs = units * operators.UNIT, 2 * width if activation else width
    numbers = torch.randint(0, 16, (outputs, groups, size))
    scales, bias = torch.rand(outputs, groups) / 10, randn(outputs) if biased else None
    zeros = 15 * torch.rand(outputs, groups) if has_zeros else None
    weight = (numbers - (8 if zeros is None else zeros[..., None])) * scales[..., None]
    flat = numbers.view(outputs, -1)
    packed = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    x = randn(rows, groups * size)
    product = operators.PackedLinearInt4(kernels, packed, scales, zeros, size, bias, activation)
    got = product(x)
    assert got.shape == (rows, width)
    if rows:
        want = functional.linear(x.float(), weight.view(outputs, -1), None if bias is None else bias.float())
        assert_near(got, apply_gate(want, activation))
        assert torch.equal(got[rows // 2 :], product(x[rows // 2 :]))
        if activation is None:
            exact = product.in_float32(x)
            assert torch.equal(exact[rows // 2 :], product.in_float32(x[rows // 2 :]))
            # Inputs in 8 bits would differ by about 0.001 of the largest sum of absolute values.
            largest = functional.linear(x.float().abs(), weight.view(outputs, -1).abs()).max()
            torch.testing.assert_close(exact, want, atol=1e-4 * float(largest), rtol=0)


@few
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 5), st.sampled_from([127, -127, 0]))
def test_products_of_extreme_codes_are_exact(kernels: Library, rows: int, outputs: int, units: int, code: int) -> None:
    """The sums of the largest products fit into the integers of the instruction set. −128 is also a weight's code."""
    inputs = units * operators.UNIT
    x = code * torch.ones(rows, inputs) if code else 127 * (1 - 2 * torch.randint(0, 2, (rows, inputs))).float()
    scales = torch.full((outputs, 1), 2.0**-12)
    extremes = torch.tensor([-128, -127, 127], dtype=torch.int8)[torch.randint(0, 3, (outputs, inputs))]
    for weight in (extremes, torch.full_like(extremes, 127), torch.full_like(extremes, -128)):
        got = operators.PackedLinearInt8(kernels, weight, scales).in_float32(x.bfloat16())
        assert torch.equal(got, x @ weight.float().T * 2.0**-12)
    by_unit = scales.expand(outputs, units).contiguous()
    for numbers in (15 * torch.randint(0, 2, (outputs, inputs)), torch.full((outputs, inputs), 15)):
        packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)
        for zeros in (None, torch.zeros(outputs, units)):
            product = operators.PackedLinearInt4(kernels, packed, by_unit, zeros, operators.UNIT)
            weight = numbers - 8.0 if zeros is None else numbers.float()
            torch.testing.assert_close(product.in_float32(x.bfloat16()), x @ weight.T * 2.0**-12, rtol=1e-6, atol=1e-4)


def test_quantized_products_keep_numbers_that_are_not_finite(kernels: Library) -> None:
    x = randn(4, 64)
    x[1, 5], x[2, 40], x[3] = float("nan"), float("-inf"), 0
    ones = torch.ones(40, 64, dtype=torch.int8)
    got = operators.PackedLinearInt8(kernels, ones, torch.ones(40, 2))(x)
    assert got[0].isfinite().all() and got[1:3].isnan().all() and not got[3].any()
    packed = torch.full((40, 32), 0x99, dtype=torch.uint8)
    for zeros in (None, torch.ones(40, 2)):
        got = operators.PackedLinearInt4(kernels, packed, torch.ones(40, 2), zeros, 32)(x)
        assert got[0].isfinite().all() and not got[1:3].isfinite().any() and not got[3].any()


def test_quantized_weights_of_other_shapes_and_types_are_rejected(kernels: Library) -> None:
    weight, scales = torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 2)
    packed = torch.ones(4, 32, dtype=torch.uint8)
    for wrong in (
        lambda: operators.PackedLinearInt8(kernels, weight.short(), scales),
        lambda: operators.PackedLinearInt8(kernels, weight, torch.ones(4, 4)),
        lambda: operators.PackedLinearInt8(kernels, weight[:3], scales[:3], None, "silu"),
        lambda: operators.PackedLinearInt4(kernels, packed.char(), scales, None, 32),
        lambda: operators.PackedLinearInt4(kernels, packed, scales, None, 64),
        lambda: operators.PackedLinearInt4(kernels, packed, scales, torch.ones(4), 32),
    ):
        with pytest.raises(ValueError, match=r"weight|zeros"):
            wrong()


def test_memory_is_returned_when_its_tensors_are_freed() -> None:
    library = load_library()
    assert library is not None

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) << 10

    size = 2 * MAPPING_BYTES
    before = resident()
    tensors = [library.memory.allocate(3, 5, dtype=torch.float32), library.memory.allocate(size, dtype=torch.uint8)]
    assert all(tensor.data_ptr() % 64 == 0 and not tensor.any() for tensor in tensors)
    tensors[1].fill_(1)
    assert resident() - before > 0.9 * size
    assert tensors[0].shape == (3, 5) and not tensors[0].any()
    tensors.clear()
    assert resident() - before < 0.2 * size


@few
@given(st.integers(1, 40), st.integers(1, 90), st.sampled_from([0.1, 1.0, 40.0]))
def test_a_product_with_gelu_equals_the_reference(kernels: Library, rows: int, outputs: int, scale: float) -> None:
    weight, bias, x = scale * randn(outputs, operators.UNIT), randn(outputs), randn(rows, operators.UNIT)
    want = functional.gelu(functional.linear(x.float(), weight.float(), bias.float()))
    assert_near(operators.PackedLinear(kernels, weight, bias, "gelu")(x), want)


@few
@given(st.integers(0, 40), st.integers(1, 300))
def test_a_norm_equals_the_reference(kernels: Library, rows: int, width: int) -> None:
    x, weight = randn(rows, width), torch.randn(width)
    got = operators.rms_norm(kernels, x, weight, 1e-5)
    assert got.shape == x.shape
    if rows:
        want, residual = reference.rms_norm(x.float(), weight, 1e-5), torch.randn(rows, width)
        assert_near(got, want)
        assert torch.equal(operators.rms_norm(kernels, x.float(), weight, 1e-5), got)
        added = operators.rms_norm(kernels, x.float(), weight, 1e-5, residual)
        torch.testing.assert_close(added, want + residual, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[-1:], operators.rms_norm(kernels, x[-1:], weight, 1e-5))


@few
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_a_rotation_equals_the_reference(kernels: Library, rows: int, heads: int, half: int, rest: int) -> None:
    wide = randn(rows, heads + 2, 2 * half + rest)
    before, cos, sin = wide.clone(), torch.randn(rows, half), torch.randn(rows, half)
    operators.rotate(kernels, wide[:, :heads], cos, sin)
    want = before.float()
    rotated = want[:, :heads, : 2 * half]
    rotated.copy_(reference.apply_rope(rotated, cos, sin))
    assert_near(wide, want)
    assert torch.equal(wide[:, heads:], before[:, heads:])
    assert torch.equal(wide[..., 2 * half :], before[..., 2 * half :])


def test_numbers_that_are_not_finite_stay_so(kernels: Library) -> None:
    x = randn(3, operators.UNIT)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    got = operators.PackedLinear(kernels, torch.ones(40, operators.UNIT).bfloat16())(x)
    assert got[0].isfinite().all() and got[1].isnan().all() and got[2].isinf().all()
    gated = operators.PackedLinear(kernels, torch.ones(40, operators.UNIT).bfloat16(), activation="silu")(x)
    assert gated[0].isfinite().all() and not gated[1:].isfinite().any()


def test_tensors_of_other_shapes_and_types_are_rejected(kernels: Library) -> None:
    product = operators.PackedLinear(kernels, randn(40, operators.UNIT))
    for x in (randn(3, 2 * operators.UNIT), torch.randn(3, operators.UNIT)):
        with pytest.raises(ValueError, match="documented shapes"):
            product(x)
    for residual in (randn(2, 40), torch.randn(2, 40), randn(3, 40).half()):
        with pytest.raises(ValueError, match="documented shapes"):
            product(randn(3, operators.UNIT), residual)
    for weight in (randn(40, operators.UNIT + 2), torch.zeros(40, operators.UNIT, dtype=torch.int8)):
        with pytest.raises(ValueError, match="cannot be packed"):
            operators.PackedLinear(kernels, weight)


# Attention


class Sequences:
    """Sequences in random blocks of a backend."""

    def __init__(self, shape: CacheShape, lengths: list[int]) -> None:
        free = iter(random.sample(range(1, shape.num_blocks), shape.num_blocks - 1))
        self.size = shape.block_size
        self.tables = [[next(free) for _ in range(-(-length // self.size))] for length in lengths]

    def metadata(self, spans: dict[int, range]) -> StepMetadata:
        """Return the metadata of a step that computes the positions spans[i] of each sequence i."""
        lens = torch.tensor([len(span) for span in spans.values()])
        places = [(i, position) for i, span in spans.items() for position in span]
        widest = max(len(self.tables[i]) for i in spans)
        return StepMetadata(
            num_seqs=len(spans),
            num_tokens=len(places),
            num_decodes=0,
            query_lens=lens.tolist(),
            lengths=[span.stop for span in spans.values()],
            query_start_loc=functional.pad(lens.cumsum(0), (1, 0)),
            seq_lens=torch.tensor([span.stop for span in spans.values()]),
            block_table=torch.tensor([self.tables[i] + [0] * (widest - len(self.tables[i])) for i in spans]),
            slot_mapping=torch.tensor([self.tables[i][p // self.size] * self.size + p % self.size for i, p in places]),
            positions=torch.tensor([position for _, position in places]),
        )


def split_heads(qkv: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, ...]:
    return torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["auto", "int8"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([32, 64, 96, 256]),
    st.sampled_from([32, 96, 256]),
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.sampled_from([0, 1, 20, 130]),
    st.sampled_from([0.0, 1.5]),
)
def test_attention_equals_the_reference_and_does_not_depend_on_chunks(
    kernels: Library, kv_dtype: KVCacheDTypeName, kv_heads: int, share: int, head_dim: int, size: int,
    lengths: list[int], window: int, cap: float,
) -> None:  # fmt: skip
    blocks = sum(-(-length // size) for length in lengths) + 1
    shape = CacheShape(
        1, blocks, size, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"), kv_dtype=kv_dtype, kernels=kernels
    )
    heads, specs = kv_heads * share, [AttentionSpec(head_dim**-0.5, window, cap)]
    whole, chunked = NativeBackend(shape, heads, specs), NativeBackend(shape, heads, specs)
    oracle = ReferenceBackend(shape, heads, specs)
    sequences = Sequences(shape, lengths)
    inputs = [randn(length, heads + 2 * kv_heads, head_dim) for length in lengths]

    def attend(backend: NativeBackend | ReferenceBackend, spans: dict[int, range]) -> list[torch.Tensor]:
        metadata = sequences.metadata(spans)
        backend.prepare(metadata)
        qkv = torch.cat([inputs[i][span.start : span.stop] for i, span in spans.items()])
        return list(backend.attend(0, *split_heads(qkv, kv_heads), metadata).split(metadata.query_lens))

    all_tokens = {i: range(length) for i, length in enumerate(lengths)}
    results, wanted = attend(whole, all_tokens), attend(oracle, all_tokens)
    for got, want in zip(results, wanted, strict=True):
        assert (got.float() - want.float()).abs().max() < 0.04
    done, parts = [0] * len(lengths), [list[torch.Tensor]() for _ in lengths]
    while left := [i for i, length in enumerate(lengths) if done[i] < length]:
        some = random.sample(left, random.randint(1, len(left)))
        spans = {i: range(done[i], min(done[i] + random.choice([1, 7, 60, 200]), lengths[i])) for i in some}
        for i, part in zip(spans, attend(chunked, spans), strict=True):
            parts[i].append(part)
            done[i] = spans[i].stop
    for got, chunks in zip(results, parts, strict=True):
        assert torch.equal(got, torch.cat(chunks))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_non_finite_values_in_a_reused_block_have_no_effect(kernels: Library, kv_dtype: KVCacheDTypeName) -> None:
    shape = CacheShape(1, 2, 32, 1, 32, torch.bfloat16, torch.device("cpu"), kv_dtype=kv_dtype, kernels=kernels)
    used, clean = (NativeBackend(shape, 1, [AttentionSpec(0.2)]) for _ in range(2))
    sequences = Sequences(shape, [32])
    broken, x = torch.full((32, 3, 32), float("nan")).bfloat16(), randn(5, 3, 32)
    broken[::2] = float("-inf")
    results = []
    for backend, inputs in ((used, broken), (used, x), (clean, x)):
        metadata = sequences.metadata({0: range(len(inputs))})
        backend.prepare(metadata)
        results.append(backend.attend(0, *split_heads(inputs, 1), metadata))
    assert results[1].isfinite().all()
    assert torch.equal(results[1], results[2])


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "capped"])
def test_a_score_that_is_not_finite_gives_nan_from_its_key_on(kernels: Library, number: float, soft_cap: float) -> None:
    shape = CacheShape(1, 8, 32, 1, 32, torch.bfloat16, torch.device("cpu"), kernels=kernels)
    inputs = randn(200, 3, 32)
    inputs[:, 0] = inputs[:, 0].abs() + 1
    inputs[140, 1, 3] = number
    metadata = Sequences(shape, [200]).metadata({0: range(200)})
    backend = NativeBackend(shape, 1, [AttentionSpec(0.2, soft_cap=soft_cap)])
    backend.prepare(metadata)
    got = backend.attend(0, *split_heads(inputs, 1), metadata)
    assert got[:140].isfinite().all()
    if soft_cap and number > 0:  # the limit makes an infinite score finite
        assert got[140:].isfinite().all()
    else:
        assert got[140:].isnan().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
def test_a_key_that_is_not_finite_stays_so_in_8_bits(kernels: Library, number: float) -> None:
    shape = CacheShape(1, 8, 32, 1, 64, torch.bfloat16, torch.device("cpu"), kv_dtype="int8", kernels=kernels)
    inputs = randn(200, 3, 64)
    inputs[140, 1, 40] = number
    for backend in (NativeBackend(shape, 1, [AttentionSpec(0.2)]), ReferenceBackend(shape, 1, [AttentionSpec(0.2)])):
        metadata = Sequences(shape, [200]).metadata({0: range(200)})
        backend.prepare(metadata)
        got = backend.attend(0, *split_heads(inputs, 1), metadata)
        assert got[:140].isfinite().all()
        assert got[140:].isnan().all()


def test_extreme_keys_and_values_are_kept_in_8_bits(kernels: Library) -> None:
    """Numbers whose sum over all tokens is nearly the largest float32, and the smallest ones, in groups of a head."""
    shape = CacheShape(1, 3, 32, 1, 64, torch.bfloat16, torch.device("cpu"), kv_dtype="int8", kernels=kernels)
    inputs = torch.zeros(40, 3, 64).bfloat16()
    inputs[:, 2, :32] = 8e36 * torch.linspace(-1, 1, 32)
    inputs[:, 2, 32:] = 1e-38
    results = []
    for backend in (NativeBackend(shape, 1, [AttentionSpec(0.2)]), ReferenceBackend(shape, 1, [AttentionSpec(0.2)])):
        metadata = Sequences(shape, [40]).metadata({0: range(40)})
        backend.prepare(metadata)
        results.append(backend.attend(0, *split_heads(inputs, 1), metadata).float())
    got, want = results
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=0.02, atol=8e34)
    assert not got[:, 32:].any()  # their scale is 0


@few
@given(
    st.sampled_from([(1, 1, 32), (2, 3, 64), (1, 2, 256)]),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([(None, None), (None, 0), (20, 20), (140, 0), (0, 0), (500, 3)]),
)
def test_attention_without_a_cache_equals_the_reference(
    kernels: Library, heads_of: tuple[int, int, int], lengths: list[int], window: tuple[int | None, int | None]
) -> None:
    kv_heads, share, head_dim = heads_of
    query, key, value = split_heads(randn(sum(lengths), kv_heads * share + 2 * kv_heads, head_dim), kv_heads)
    want = []
    for q, k, v in zip(*(torch.split(x.float(), lengths) for x in (query, key, value)), strict=True):
        distances = torch.arange(len(q)) - torch.arange(len(q))[:, None]
        before, after = (len(q) if limit is None else limit for limit in window)
        allowed = (distances >= -before) & (distances <= after)
        parts = (x.transpose(0, 1) for x in (q, k, v))
        mixed = functional.scaled_dot_product_attention(*parts, allowed, scale=0.3, enable_gqa=True)
        want.append(mixed.transpose(0, 1).flatten(1))
    got = operators.SelfAttention(kernels, lengths).attend(query, key, value, 0.3, *window)
    assert_near(got, torch.cat(want))


@few
@given(st.integers(1, 20), st.integers(1, 100), st.sampled_from([0.0, 50.0]))
def test_layer_normalization_equals_the_reference(kernels: Library, rows: int, width: int, mean: float) -> None:
    x, weight, bias = randn(rows, width) + mean, torch.randn(width), torch.randn(width)
    got = operators.layer_norm(kernels, x, weight, bias, 1e-5)
    assert_near(got, functional.layer_norm(x.float(), (width,), weight, bias, 1e-5))


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([(1, 1, 32), (2, 3, 64), (1, 5, 96)]),
    st.integers(1, 3),
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.sampled_from([operators.PackedLinear, operators.PackedLinearInt8]),
    st.booleans(),
    st.sampled_from(["before", "before, heads", "after, tokens", "before, after, heads"]),
)
def test_layers_in_one_call_equal_their_operators(
    kernels: Library,
    heads_of: tuple[int, int, int],
    units: int,
    lengths: list[int],
    kind: type[operators.Product],
    biased: bool,
    norms_of: str,
) -> None:
    kv_heads, share, head_dim = heads_of
    heads, width = kv_heads * share, units * operators.UNIT
    total = heads + 2 * kv_heads

    def make_product(outputs: int, inputs: int, activation: operators.Activation | None = None) -> operators.Product:
        bias = randn(outputs) if biased else None
        if kind is operators.PackedLinear:
            return operators.PackedLinear(kernels, randn(outputs, inputs) / inputs**0.5, bias, activation)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        scales = torch.rand(outputs, inputs // operators.UNIT) / 100
        return operators.PackedLinearInt8(kernels, weight, scales, bias, activation)

    def make_norm(name: str, size: int = width) -> torch.Tensor | None:
        return torch.rand(size) + 0.5 if name in norms_of else None

    sizes = (head_dim, head_dim) if "heads" in norms_of else (heads * head_dim, kv_heads * head_dim)

    def make_norms() -> list[torch.Tensor | None]:
        norms = [make_norm(name) for name in ("before", "after", "before", "after")]
        if "tokens" in norms_of or "heads" in norms_of:
            return norms + [make_norm("heads" if size == head_dim else "tokens", size) for size in sizes]
        return [*norms, None, None]

    def normalize(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x.bfloat16() if weight is None else operators.rms_norm(kernels, x, weight, 1e-5)

    def add(product: operators.Product, norm: torch.Tensor | None, x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return product(x, rest)
        return operators.rms_norm(kernels, product.in_float32(x), norm, 1e-5, rest)

    parts = [
        (
            make_norms(),
            (
                make_product(total * head_dim, width), make_product(width, heads * head_dim),
                make_product(2 * inner, width, "silu"), make_product(width, inner),
            ),
        )
        for inner in (96, 32)
    ]  # fmt: skip
    shape = CacheShape(3, 20, 32, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"), kernels=kernels)
    specs = [AttentionSpec(head_dim**-0.5, window) for window in (40, 0, 5)]
    backends = [NativeBackend(shape, heads, specs) for _ in range(2)]
    sequences = Sequences(shape, lengths)
    stack = operators.LayerStack(
        [operators.LayerOperator(kernels, norms, 1e-5, products) for norms, products in parts], 1
    )
    for spans in ({i: range(length) for i, length in enumerate(lengths)}, {0: range(lengths[0] - 1, lengths[0])}):
        metadata = sequences.metadata(spans)
        tokens = metadata.num_tokens
        x, all_angles = torch.randn(tokens, width), torch.rand(2, tokens, head_dim // 2)
        rotations = [
            operators.RotationStep(kernels, angles.cos(), angles.sin(), heads + kv_heads, head_dim)
            for angles in all_angles
        ]
        for backend in backends:
            backend.prepare(metadata)
        got = stack(x, rotations, backends[0].native(metadata))
        want = x
        for index, (norms, (qkv, out, gated, down)) in enumerate(parts):
            before_attention, after_attention, before_mlp, after_mlp, *qk_norms = norms
            mixed = qkv(normalize(want, before_attention)).view(tokens, total, head_dim)
            for norm, part in zip(qk_norms, torch.split(mixed, [heads, kv_heads, kv_heads], dim=1), strict=False):
                if norm is not None:
                    part.copy_(normalize(part.reshape(-1, len(norm)), norm).view(part.shape))
            rotations[index].apply(mixed[:, : heads + kv_heads])
            attended = backends[1].attend(1 + index, *split_heads(mixed, kv_heads), metadata)
            middle = add(out, after_attention, attended, want)
            want = add(down, after_mlp, gated(normalize(middle, before_mlp)), middle)
        assert torch.equal(got, want)


def test_a_layer_of_other_shapes_is_rejected(kernels: Library) -> None:
    def product(outputs: int, inputs: int) -> operators.Product:
        return operators.PackedLinear(kernels, randn(outputs, inputs))

    norms = [torch.ones(32), None, torch.ones(32), None, None, None]
    products = product(96, 32), product(32, 32), product(64, 32), product(32, 64)
    operators.LayerOperator(kernels, norms, 1e-5, products)
    for place, wrong in enumerate((product(96, 64), product(64, 32), product(32, 32), product(32, 32))):
        with pytest.raises(ValueError, match="documented shapes"):
            operators.LayerOperator(kernels, norms, 1e-5, (*products[:place], wrong, *products[place + 1 :]))  # type: ignore[arg-type]


@few
@given(st.integers(1, 90), st.integers(1, 3), st.integers(0, 20))
def test_rows_of_a_packed_weight_equal_the_weight(kernels: Library, outputs: int, units: int, count: int) -> None:
    weight = randn(outputs, units * operators.UNIT)
    product, indexes = operators.PackedLinear(kernels, weight), torch.randint(0, outputs, (count,))
    assert torch.equal(product.rows(indexes), weight[indexes])
    for wrong in (-1, outputs):
        with pytest.raises(IndexError, match="not in"):
            product.rows(torch.tensor([0, wrong]))


def test_a_tied_embedding_is_stored_once(kernels: Library) -> None:
    weight, ids = randn(70, 64), torch.tensor([3, 69, 3])
    for layers in (Layers(kernels=kernels), Layers()):
        head = layers.linear(weight)
        for shared in (head, None):
            embed = layers.embedding(weight, shared, is_mapped=False)
            assert torch.equal(embed(ids), weight[ids])
            is_shared = isinstance(getattr(embed, "__self__", None), operators.PackedLinear)
            assert is_shared == (isinstance(head, NativeLinear) and shared is not None)


def test_the_backend_names_what_it_does_not_support(kernels: Library) -> None:
    shape = CacheShape(1, 2, 32, 1, 64, torch.bfloat16, torch.device("cpu"), kernels=kernels)
    assert find_native_limit(shape) == ""
    for changes, limit in (
        ((1, 2, 32, 1, 80, torch.bfloat16), "head_dim 80"),
        ((1, 2, 32, 1, 288, torch.bfloat16), "head_dim 288"),
        ((1, 2, 16, 1, 64, torch.bfloat16), "block_size 16"),
        ((1, 2, 32, 1, 64, torch.float32), "torch.float32 on cpu"),
    ):
        assert find_native_limit(CacheShape(*changes, torch.device("cpu"), kernels=kernels)) == limit
    assert find_native_limit(replace(shape, kernels=None)) == "a machine without the C kernels"
    assert find_native_limit(replace(shape, kv_dtype="int8")) == ""
    assert find_native_limit(replace(shape, kv_dtype="fp8")) == "a KV cache in fp8"


# Threads


def run_script(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_threads_and_forked_processes_compute_the_same() -> None:
    """Several Python threads use the pool at the same time, and a child process starts its own."""
    script = """
import os, threading, torch
from kernels.native.library import load_library
from kernels.native.operators import PackedLinear
kernels = load_library()
kernels.set_threads(3)
torch.set_num_threads(1)
product, x = PackedLinear(kernels, torch.randn(700, 64).bfloat16()), torch.randn(40, 64).bfloat16()
want = product(x)
equal = []
def compute():
    equal.append(all(torch.equal(product(x), want) for _ in range(200)))
threads = [threading.Thread(target=compute) for _ in range(4)]
for thread in threads: thread.start()
child = os.fork()
if not child:
    os._exit(0 if all(torch.equal(product(x), want) for _ in range(20)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for thread in threads: thread.join()
assert equal == [True] * 4
"""
    result = run_script(script)
    assert result.returncode == 0, result.stderr


# Build


@pytest.fixture
def compiler() -> build.Compiler:
    return build.find_compilers()[0]


def test_concurrent_builds_give_one_complete_library(tmp_path: Path) -> None:
    script = """
import sys; from pathlib import Path
from kernels.native import build
from kernels.native.library import Library
build._COMMON = (*build._COMMON, "-O0")  # a third of the time
path = build.build_library(build.find_compilers()[0], Path(sys.argv[1]))
print(path, Library(path).variant)
"""
    place = tmp_path / "cache" / "kernels"
    command = [sys.executable, "-c", script, str(place)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=110)[0] for process in processes}
    assert len(printed) == 1
    assert [path.suffix for path in place.iterdir()] == [".so"]
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path, compiler: build.Compiler) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for place in (shared, link):
        with pytest.raises(build.BuildError, match="can be changed by another user"):
            build.build_library(compiler, place)
    assert not list(shared.iterdir())
    below = shared / "cache" / "kernels"
    with pytest.raises(build.BuildError, match="shared can be changed by another user; run chmod go-w"):
        build.build_library(compiler, below)
    shared.chmod(0o1777)  # sticky: others cannot rename `below`
    with pytest.raises(build.BuildError, match="false failed"):
        build.build_library(build.Compiler(("false",), "1"), below)


def test_a_library_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(_compiler: build.Compiler, place: Path, _flags: object, **_options: object) -> Path:
        library = place / "kernels.so"
        library.write_text("new")
        library.chmod(0o775)
        return library

    monkeypatch.setattr(build, "compile_library", link)
    umask = os.umask(0o002)
    try:
        path = build.build_library(build.Compiler(("cc",), "1"), tmp_path / ".cache" / "millrace" / "kernels")
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o700
    for mode, text in ((0o700, "old"), (0o775, "new")):  # a library that others could write to is built again
        path.write_text("old")
        path.chmod(mode)
        assert build.build_library(build.Compiler(("cc",), "1"), path.parent) == path
        assert path.read_text() == text


def test_a_broken_compiler_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: build.Compiler
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "find_compilers", lambda: [build.Compiler(("false",), "1"), compiler])
    monkeypatch.setattr(build, "_COMMON", (*build._COMMON, "-O0"))
    variants = {"avx2": ("-fno-such-option",), "generic": ()}
    monkeypatch.setitem(build._VARIANTS, platform.machine(), variants)
    with caplog.at_level(logging.WARNING):
        library = native.load_library.__wrapped__()
    assert library is not None and library.variant == "generic"
    assert "cannot be built with false" in caplog.records[1].message
    assert "cannot be built for the instruction set avx2: /" in caplog.records[2].message


def test_only_the_fastest_variant_of_this_machine_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that this machine cannot run is not built if /proc/cpuinfo shows it, and else not used."""
    fastest = load_all_variants()
    fastest.choose("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_COMMON", (*build._COMMON, "-O0"))
    built: list[str] = []
    compile_library = build.compile_library

    def record(*arguments: Any, variants: Sequence[str], **options: Any) -> Path:
        built.extend(variants)
        return compile_library(*arguments, variants=variants, **options)

    monkeypatch.setattr(build, "compile_library", record)
    library = native.load_library.__wrapped__()
    assert library is not None
    assert built == [fastest.variant] == [library.variant]
    assert not library.choose(VARIANTS[-1]) or library.variant == fastest.variant == VARIANTS[-1]
    options = {"impossible": ("-mno_such_instructions",), "generic": ()}
    monkeypatch.setitem(build._VARIANTS, platform.machine(), options)
    library = native.load_library.__wrapped__()
    assert library is not None
    assert built[1:] == ["generic"] == [library.variant]


def test_a_start_builds_the_library_before_a_worker_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_COMMON", (*build._COMMON, "-O0"))
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_compilers", lambda: [build.Compiler(("false",), "1")])
        build.main()  # no error: the worker reports it
    build.main()
    monkeypatch.setattr(build, "compile_library", None)
    library = native.load_library.__wrapped__()
    assert library is not None
    assert find_wrong_operator(library) == ""


def test_a_library_of_another_variant_or_compiler_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(_compiler: build.Compiler, place: Path, _flags: object, **_options: object) -> Path:
        library = place / "kernels.so"
        library.touch()
        return library

    monkeypatch.setattr(build, "compile_library", link)
    compilers = [build.Compiler(("cc",), version) for version in "12"]
    place = tmp_path / "kernels"
    paths = {build.build_library(each, place, variants=(name,)) for each in compilers for name in ("a", "b")}
    assert len(paths) == 4


def test_an_interrupted_build_is_removed_and_errors_name_the_compiler(tmp_path: Path) -> None:
    place = tmp_path / "kernels"
    (place / "build-old").mkdir(parents=True)
    (place / "build-new").mkdir()
    place.chmod(0o700)
    os.utime(place / "build-old", (0, 0))
    with pytest.raises(build.BuildError, match="false failed"):
        build.build_library(build.Compiler(("false",), "1"), place)
    assert [path.name for path in place.iterdir()] == ["build-new"]


def test_pytorch_computes_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "find_compilers", list)
    with caplog.at_level(logging.INFO, native.__name__):
        assert native.load_library.__wrapped__() is None
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["no C compiler is installed"]


@pytest.mark.parametrize("name", ["rms_norm", "rotate", "PackedLinear"])
def test_kernels_with_a_wrong_operator_are_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_path(EngineConfig(Path())).kernels is not None
    correct = getattr(operators, name)
    wrong = {
        "rms_norm": lambda *arguments: correct(*arguments) * 1.1,
        "rotate": lambda library, x, cos, sin: correct(library, x, cos, -sin),
        "PackedLinear": lambda library, weight, bias, *activation: correct(library, weight, None, *activation),
    }
    monkeypatch.setattr(operators, name, wrong[name])
    assert choose_path(EngineConfig(Path())).kernels is not None  # the check runs once a process
    monkeypatch.setattr(compute_path, "find_wrong_operator", find_wrong_operator.__wrapped__)
    assert choose_path(EngineConfig(Path())).kernels is None
    assert "the CPU kernels are not used" in caplog.text


@pytest.mark.parametrize(("activation", "noun"), [("gelu", "the product with GELU"), ("silu", "the gated product")])
def test_the_check_includes_each_activation(activation: str, noun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, correct = load_library(), operators.PackedLinear
    assert library is not None

    def pack(kernels: Library, weight: torch.Tensor, bias: torch.Tensor, used: str | None = None) -> object:
        wrong = used == activation
        return correct(kernels, -weight if wrong else weight, bias, used)  # type: ignore[arg-type]

    monkeypatch.setattr(operators, "PackedLinear", pack)
    assert find_wrong_operator.__wrapped__(library) == noun


def test_the_check_passes_in_each_instruction_set(kernels: Library) -> None:
    assert find_wrong_operator.__wrapped__(kernels) == ""


def test_the_library_of_a_wheel_is_used_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = build.build_library(build.find_compilers()[0], build.cache_directory())
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(native, "find_compilers", list)
    build.prebuilt_path().write_bytes(b"built for another C library")
    assert native.load_library.__wrapped__() is None
    assert "cannot be loaded" in caplog.text
    build.prebuilt_path().write_bytes(compiled.read_bytes())
    library = native.load_library.__wrapped__()
    assert library is not None
    assert find_wrong_operator(library) == ""


def test_an_instruction_set_that_does_not_exist_is_not_chosen() -> None:
    library = load_library()
    assert library is not None
    chosen = library.variant
    assert not library.choose("sse9")
    assert library.variant == chosen


# Sanitizers


def test_the_sanitizers_find_no_error(tmp_path: Path, compiler: build.Compiler) -> None:
    """Run all operators on exactly sized memory of the C library's heap, in a build with ASan and UBSan."""
    runtime = subprocess.run(
        [*compiler.command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("the compiler has no AddressSanitizer")
    script = ROOT / "tests" / "support" / "kernels" / "run_sanitized.py"
    variables = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), str(tmp_path / "kernels"), *options],
            cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
            env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    result = run()
    if result.returncode < 0:  # undefined behavior
        pytest.fail(f"signal {-result.returncode}: {run('--describe').stderr[-3000:]}")
    assert result.returncode == 0, result.stderr[-3000:]
    library = load_all_variants()
    checked = [f"checked {name}" for name in VARIANTS if library.choose(name)]
    library.choose("")
    assert result.stdout.splitlines() == checked
