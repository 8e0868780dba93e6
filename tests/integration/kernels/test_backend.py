"""The engine's Triton backend compared with its reference in each step, with the kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference_worker.contract.engine_config import KVCacheDTypeName
from inference_worker.engine.attention import triton
from inference_worker.engine.attention.base import ReferenceBackend
from inference_worker.engine.attention.registry import make_backend
from kernels.reference import to_fp8
from tests.support.engine import attention
from tests.support.kernels.interpreter import Interpreter

HEADS, KV_HEADS, DIM, SPECS = attention.HEADS, attention.KV_HEADS, 16, attention.SPECS


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_triton_backend_equals_the_reference(
    kv_dtype: KVCacheDTypeName, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "kernels", interpreter)
    monkeypatch.setattr(attention, "DIM", DIM)  # Triton's minimum
    monkeypatch.setattr(attention, "BLOCK", 16)
    shape = replace(attention.shape(torch.float32), kv_dtype=kv_dtype)
    ours, oracle = make_backend("triton", shape, HEADS, SPECS)[0], ReferenceBackend(shape, HEADS, SPECS)
    batch = attention.Batch(4, 0)
    # Only chunks, only decodes, and both in one batch.
    for news in ({0: 5, 1: 19}, {0: 1, 1: 1}, {0: 1, 2: 7, 1: 1, 3: 3}):
        metadata = batch.grow(news)
        qkv = [torch.randn(metadata.num_tokens, HEADS + 2 * KV_HEADS, DIM) for _ in SPECS]
        if kv_dtype == "fp8":  # normal numbers of this type, which the interpreter converts exactly
            qkv = [to_fp8(x).float() * (x.abs() > 1 / 32) for x in qkv]
        wanted = attention.step(oracle, qkv, metadata)
        for got, want in zip(attention.step(ours, qkv, metadata), wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
