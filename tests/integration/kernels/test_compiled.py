"""The kernels compiled for an H100/H200 in bfloat16, without a GPU: registers, spills, shared memory, tensor cores.

A multiprocessor has 65,536 registers and 228 KiB of shared memory. A program can use 227 KiB; 1 KiB is reserved per
program. The tests check how many programs fit on it concurrently.
"""

from __future__ import annotations

import pytest
import torch

from kernels.triton import (
    DecodePlan,
    PrefillConfig,
    paged_decode,
    paged_prefill,
    rms_norm,
    rotate,
    silu_mul,
    write_cache,
)
from tests.support.kernels.compiler import Compiled, compiled

BLOCK_SIZE = 32
# Heads, KV heads and head_dim. Head sizes of 80 and 96 are computed in tiles of 128.
SHAPES = [(9, 3, 64), (32, 8, 64), (28, 4, 128), (32, 8, 128), (32, 32, 128), (32, 32, 80), (32, 32, 96)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)  # as the engine's step metadata has them


def programs_per_sm(kernel: Compiled, warps: int) -> int:
    by_registers = 65_536 // (-(-kernel.registers // 8) * 8 * 32 * warps)
    return min(by_registers, 228 * 1024 // (kernel.shared + 1024), 64 // warps)


def decode_kernels(
    shape: tuple[int, int, int], splits: int, cache_dtype: torch.dtype = torch.bfloat16, **limits: float
) -> list[Compiled]:
    heads, kv_heads, dim = shape
    cache = meta(1000, BLOCK_SIZE, kv_heads, dim, dtype=cache_dtype)
    query, table, lengths = meta(48, heads, dim), integers(48, 128), integers(48)
    return compiled(lambda: paged_decode(query, cache, cache, table, lengths, 0.1, DecodePlan(splits), **limits))


def prefill_kernel(
    shape: tuple[int, int, int], longest: int, config: PrefillConfig | None = None,
    cache_dtype: torch.dtype = torch.bfloat16, **limits: float,
) -> Compiled:  # fmt: skip
    heads, kv_heads, dim = shape
    cache = meta(1000, BLOCK_SIZE, kv_heads, dim, dtype=cache_dtype)
    query, table, lengths, starts = meta(2000, heads, dim), integers(48, 128), integers(48), integers(49)
    (kernel,) = compiled(
        lambda: paged_prefill(query, cache, cache, table, lengths, starts, 0.1, longest, config=config, **limits)
    )
    return kernel


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: tuple[int, int, int], splits: int) -> None:
    kernel = decode_kernels(shape, splits)[0]
    assert kernel.stack == 0
    assert kernel.uses_tensor_cores
    assert kernel.registers <= 128
    assert programs_per_sm(kernel, warps=4) >= 3
    # Three tiles of keys and values, so that loads are issued early enough before their use.
    assert kernel.shared >= 2 * 2 * 64 * shape[2] * 2
    assert max(kernel.pending_copies) >= 2


def test_combine() -> None:
    kernel = decode_kernels((32, 8, 128), 8)[1]
    assert (kernel.name, kernel.stack) == ("_combine_kernel", 0)
    assert programs_per_sm(kernel, warps=4) >= 8


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape: tuple[int, int, int]) -> None:
    kernel = prefill_kernel(shape, longest=1000)
    assert kernel.stack == 0
    assert kernel.uses_wgmma
    assert programs_per_sm(kernel, warps=8) >= 1
    assert kernel.registers <= 200
    assert kernel.shared <= 227 * 1024
    assert max(kernel.pending_copies) >= 2


@pytest.mark.parametrize("longest", [1, 8, 16])
def test_prefill_of_small_chunks(longest: int) -> None:
    kernel = prefill_kernel((32, 8, 128), longest)
    assert kernel.stack == 0
    assert kernel.uses_tensor_cores
    assert kernel.uses_wgmma == (longest == 16)
    assert programs_per_sm(kernel, warps=4) >= 2


@pytest.mark.parametrize("longest", [8, 1000])
def test_prefill_of_wide_heads_fits(longest: int) -> None:
    kernel = prefill_kernel((8, 4, 256), longest)
    assert programs_per_sm(kernel, warps=4) >= 1
    assert kernel.stack <= 32


@pytest.mark.parametrize("shape", [(32, 8, 128), (8, 4, 256)])
def test_windows_and_soft_caps(shape: tuple[int, int, int]) -> None:
    limits = {"window": 4096, "soft_cap": 50.0}
    decode, prefill = decode_kernels(shape, 8, **limits)[0], prefill_kernel(shape, 1000, **limits)
    for kernel in (decode, prefill):
        assert kernel.stack <= 32
        assert kernel.uses_tensor_cores
        assert programs_per_sm(kernel, warps=8) >= 1


@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128)])
def test_a_cache_in_fp8(shape: tuple[int, int, int]) -> None:
    decode = decode_kernels(shape, 8, torch.float8_e4m3fn)[0]
    prefill = prefill_kernel(shape, 1000, cache_dtype=torch.float8_e4m3fn)
    for kernel in (decode, prefill):
        assert kernel.stack == 0
        assert kernel.uses_tensor_cores or kernel.uses_wgmma
    assert programs_per_sm(decode, warps=4) >= 3
    cache, key = meta(1000, BLOCK_SIZE, *shape[1:], dtype=torch.float8_e4m3fn), meta(48, *shape[1:])
    (write,) = compiled(lambda: write_cache(key, key, cache, cache, integers(48)))
    assert write.stack == 0


def test_decode_of_wide_heads_fits() -> None:
    kernel = decode_kernels((8, 4, 256), 1)[0]
    assert kernel.stack == 0
    assert programs_per_sm(kernel, warps=4) >= 1


@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (32, 32, 128)])
def test_rope(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    cache, key = meta(1000, BLOCK_SIZE, kv_heads, dim), meta(48, kv_heads, dim)
    table, tokens = meta(4096, dim // 2, dtype=torch.float32), integers(48)
    kernels = compiled(lambda: rotate(meta(48, heads + kv_heads, dim), table, table, tokens))
    kernels += compiled(lambda: write_cache(key, key, cache, cache, tokens))
    assert [kernel.name for kernel in kernels] == ["_rotate_kernel", "_write_cache_kernel"]
    for kernel in kernels:
        assert kernel.stack == 0
        assert kernel.registers <= 64


@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_rms_norm(width: int) -> None:
    x = meta(48, width)
    (kernel,) = compiled(lambda: rms_norm(x, meta(width), 1e-5, residual=x))
    assert kernel.stack == 0
    assert kernel.registers <= 64
    assert kernel.widest_access == 16


@pytest.mark.parametrize("width", [1536, 14_336])
def test_silu_mul(width: int) -> None:
    (kernel,) = compiled(lambda: silu_mul(meta(48, 2 * width)))
    assert kernel.stack == 0
    assert kernel.registers <= 40
    assert kernel.widest_access == 16
