"""Add + RMSNorm and SiLU·mul: results in Triton's interpreter, and invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.triton import rms_norm, silu_mul
from tests.support.kernels.compiler import recorded_launches
from tests.support.kernels.interpreter import Interpreter

EPS = 1e-5


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 576), (3, 1000), (2, 4096)])
def test_rms_norm(interpreter: Interpreter, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(width)
    before = x.clone()
    torch.testing.assert_close(interpreter.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("width", [64, 576])
def test_rms_norm_adds_the_residual_and_keeps_the_sum(interpreter: Interpreter, width: int) -> None:
    x, residual, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
    added = x + residual
    out = interpreter.rms_norm(x, weight, EPS, residual=residual)
    torch.testing.assert_close(residual, added)
    torch.testing.assert_close(out, reference.rms_norm(added, weight, EPS))


def test_rms_norm_in_place_and_of_strided_rows(interpreter: Interpreter) -> None:
    wide, weight = torch.randn(4, 200), torch.randn(64)
    wanted = reference.rms_norm(wide[:, 32:96], weight, EPS)
    torch.testing.assert_close(interpreter.rms_norm(wide[:, 32:96], weight, EPS), wanted)
    x = wide[:, 32:96].contiguous()
    interpreter.rms_norm(x, weight, EPS, out=x)
    torch.testing.assert_close(x, wanted)


def test_rms_norm_of_zeros_is_zero(interpreter: Interpreter) -> None:
    assert torch.equal(interpreter.rms_norm(torch.zeros(1, 64), torch.ones(64), EPS), torch.zeros(1, 64))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1536), (2, 1025)])
def test_silu_mul(interpreter: Interpreter, rows: int, width: int) -> None:
    x = 10 * torch.randn(rows, 2 * width)
    torch.testing.assert_close(interpreter.silu_mul(x), reference.silu_mul(x))


def test_silu_mul_of_extremes_and_strided_rows(interpreter: Interpreter) -> None:
    wide = torch.tensor([[-200.0, 200.0, 0.0, -0.5, 2.0, 3.0, 4.0, 5.0, 99.0]]).repeat(3, 1)
    out = torch.empty(3, 4)
    interpreter.silu_mul(wide[:, :8], out=out)
    torch.testing.assert_close(out, reference.silu_mul(wide[:, :8]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(2, 64).T}, ValueError, "contiguous in its rows"),
        ({"x": torch.zeros(2, 40_000), "weight": torch.zeros(40_000)}, ValueError, "wider than"),
        ({"weight": torch.zeros(32)}, ValueError, "weight must be"),
        ({"residual": torch.zeros(3, 64)}, ValueError, "residual must be contiguous"),
        ({"residual": torch.zeros(2, 64, dtype=torch.bfloat16)}, TypeError, "residual must be float32"),
        ({"out": torch.zeros(2, 128)[:, ::2]}, ValueError, "out must be contiguous"),
    ],
)
def test_rms_norm_rejects_invalid_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with recorded_launches() as launches, pytest.raises(error, match=message):
        rms_norm(**({"x": torch.zeros(2, 64), "weight": torch.zeros(64), "eps": EPS} | arguments))
    assert not launches


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(2, 65)}, ValueError, "even width"),
        ({"x": torch.zeros(64)}, ValueError, "num_tokens"),
        ({"x": torch.zeros(2, 64), "out": torch.zeros(2, 64)}, ValueError, "out must be contiguous"),
        ({"x": torch.zeros(2, 64), "out": torch.zeros(2, 32).double()}, TypeError, "out must be float32"),
    ],
)
def test_silu_mul_rejects_invalid_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with recorded_launches() as launches, pytest.raises(error, match=message):
        silu_mul(**arguments)
    assert not launches


def test_no_rows_launch_nothing() -> None:
    with recorded_launches() as launches:
        assert rms_norm(torch.zeros(0, 64), torch.ones(64), EPS).shape == (0, 64)
        assert silu_mul(torch.zeros(0, 64)).shape == (0, 32)
    assert not launches
