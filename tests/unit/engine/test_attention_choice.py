"""The choice of the attention backend: the device's default, its capabilities and its check at load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from inference_worker.contract.engine_config import KVCacheDTypeName
from inference_worker.engine.attention import registry
from inference_worker.engine.attention.base import AttentionSpec, BackendChoice, CacheShape, ReferenceBackend
from inference_worker.engine.attention.cpu import CpuBackend
from inference_worker.engine.attention.registry import BackendEntry, make_backend
from inference_worker.engine.attention.self_check import BackendMismatchError, check_backend
from kernels.native.library import load_library

SHAPE = CacheShape(3, 4, 16, 2, 32, torch.float32, torch.device("cpu"))
SPECS = [AttentionSpec(0.2), AttentionSpec(0.2, window=100), AttentionSpec(0.2, window=9, soft_cap=3.0)]


class OffByOneWindow(ReferenceBackend):
    """A backend whose windows are one token too wide."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, [replace(s, window=s.window + 1 if s.window else 0) for s in specs])


class OneKeyBlock(ReferenceBackend):
    """A backend that reads only the last 128 keys."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, [replace(spec, window=spec.window or 128) for spec in specs])


class BrokenCompiler(ReferenceBackend):
    """A backend that cannot be built on this machine."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        raise RuntimeError("ptxas failed")


def use_default(monkeypatch: pytest.MonkeyPatch, entry: BackendEntry) -> None:
    """Make `entry` the default backend of the CPU, under the name triton."""
    monkeypatch.setitem(registry.BACKENDS, "triton", entry)
    monkeypatch.setitem(registry._DEFAULTS, "cpu", "triton")


def test_the_cpu_takes_its_own_backend() -> None:
    backend, choice = make_backend("auto", SHAPE, 6, SPECS)
    assert isinstance(backend, CpuBackend)
    assert choice == BackendChoice("cpu")


def test_cuda_takes_triton() -> None:
    assert registry._DEFAULTS["cuda"] == "triton"
    on_gpu = replace(SHAPE, device=torch.device("cuda"))
    assert registry.BACKENDS["triton"].find_limit(on_gpu, SPECS[:1]) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_correct_backend_passes_the_check(dtype: torch.dtype) -> None:
    assert check_backend(CpuBackend, replace(SHAPE, dtype=dtype), 6, SPECS) < 0.03


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_cache_in_8_bits_without_its_kernels_is_refused(kv_dtype: KVCacheDTypeName) -> None:
    for name in ("auto", "invariant"):
        with pytest.raises(ValueError, match=f"does not support a KV cache in {kv_dtype}; set kv_cache_dtype to auto"):
            make_backend(name, replace(SHAPE, kv_dtype=kv_dtype), 6, SPECS)
    backend, choice = make_backend("reference", replace(SHAPE, kv_dtype=kv_dtype), 6, SPECS)
    assert isinstance(backend, ReferenceBackend)
    assert choice == BackendChoice("reference")


def test_a_cache_in_int8_requires_groups_of_a_head() -> None:
    with pytest.raises(ValueError, match="int8 with head_dim 48; set kv_cache_dtype to auto"):
        make_backend("reference", replace(SHAPE, kv_dtype="int8", head_dim=48), 6, SPECS)


def test_a_wrong_window_of_one_layer_is_found() -> None:
    assert check_backend(OffByOneWindow, SHAPE, 6, SPECS[:1]) == 0
    with pytest.raises(BackendMismatchError, match="differ from the reference by up to"):
        check_backend(OffByOneWindow, SHAPE, 6, SPECS)


def test_the_check_has_a_sequence_of_several_key_blocks() -> None:
    with pytest.raises(BackendMismatchError, match="differ from the reference by up to"):
        check_backend(OneKeyBlock, SHAPE, 6, SPECS[:1])


@pytest.mark.parametrize(
    ("entry", "reason", "text"),
    [
        (BackendEntry(OffByOneWindow), "mismatch", "differ from the reference by up to"),
        (BackendEntry(BrokenCompiler), "error", "ptxas failed"),
        (BackendEntry(ReferenceBackend, lambda _shape, _specs: "head_dim 72"), "unsupported", "support head_dim 72"),
    ],
    ids=["mismatch", "error", "unsupported"],
)
def test_a_backend_that_fails_is_replaced_with_an_error_in_the_log(
    entry: BackendEntry, reason: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_default(monkeypatch, entry)
    with caplog.at_level(logging.INFO):
        backend, choice = make_backend("auto", SHAPE, 6, SPECS)
    assert type(backend) is ReferenceBackend
    assert choice == BackendChoice("reference", reason)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "triton is not used" in errors[0]
    assert text in errors[0]
    assert "attention backend: reference" in caplog.text


@pytest.mark.parametrize(("name", "instead"), [("auto", "cpu"), ("invariant", "invariant")])
def test_the_c_kernels_are_replaced_by_the_backend_without_them(
    name: str, instead: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(registry.BACKENDS, "native", BackendEntry(OffByOneWindow))
    shape = CacheShape(3, 4, 32, 2, 32, torch.bfloat16, torch.device("cpu"), kernels=load_library())
    _, choice = make_backend(name, shape, 6, SPECS)
    assert choice == BackendChoice(instead, "mismatch")
    assert "native is not used" in caplog.text
    assert f"backend {instead} is used instead" in caplog.text


def test_a_named_backend_that_does_not_support_the_model_is_rejected() -> None:
    with pytest.raises(ValueError, match="triton does not support head_dim 72; set attention to auto"):
        make_backend("triton", replace(SHAPE, head_dim=72), 6, SPECS)
    with pytest.raises(ValueError, match="'flash' is not known; want one of cpu, invariant, native, reference, triton"):
        make_backend("flash", SHAPE, 6, SPECS)
