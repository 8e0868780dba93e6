"""Capacity of the KV cache, compared with manual calculations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference_worker.contract.config import EngineConfig
from inference_worker.engine.model_runner import ModelRunner
from inference_worker.engine.telemetry.sizing import KVMemoryError, KVSizing, size_kv_cache
from tests.support.engine.fakes import TINY

SMOLLM2 = replace(TINY, num_layers=30, num_kv_heads=3, head_dim=64, max_model_len=8192)
TOKEN = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, numbers per head, bytes per number


def sizing(max_model_len: int = 8192, **settings: int) -> KVSizing:
    return size_kv_cache(EngineConfig(Path(), **settings), SMOLLM2, max_model_len, 2)


def test_the_number_of_blocks_and_requests() -> None:
    found = sizing(kv_cache_bytes=1 << 30)
    assert found.token_bytes == TOKEN == 23_040
    assert found.num_blocks == (1 << 30) // (TOKEN * 32) == 1456
    assert (found.num_tokens, found.num_bytes) == (46_592, 46_592 * TOKEN)
    assert found.median_requests == 1456 // 36 == 40  # 1,149 tokens require 36 blocks
    assert found.longest_requests == 1456 // 256 == 5
    said = str(found)
    for figure in (
        "23,040 bytes",
        "1,456 blocks of 32",
        "46,592 tokens",
        "1023.8 MiB",
        "40 requests",
        "5 of max",
    ):
        assert figure in said


def test_one_request_of_the_maximum_length_just_fits() -> None:
    assert sizing(kv_cache_bytes=8192 * TOKEN).longest_requests == 1
    with pytest.raises(KVMemoryError):
        sizing(kv_cache_bytes=8192 * TOKEN - 1)


def test_an_error_names_two_solutions_if_the_maximum_length_does_not_fit() -> None:
    with pytest.raises(KVMemoryError) as exc_info:
        sizing(kv_cache_bytes=64 << 20)
    assert "64.0 MiB of KV cache fit 2,912 tokens, but one request may take 8,192" in str(exc_info.value)
    assert "MILLRACE_KV_CACHE_BYTES=180MiB" in str(exc_info.value)
    assert "?max_model_len=2912 " in str(exc_info.value)
    assert sizing(kv_cache_bytes=180 << 20).longest_requests == 1
    assert sizing(2912, kv_cache_bytes=64 << 20).longest_requests == 1


def test_an_error_names_one_solution_if_no_block_fits() -> None:
    with pytest.raises(KVMemoryError) as exc_info:
        sizing(kv_cache_bytes=1000)
    assert "MILLRACE_KV_CACHE_BYTES" in str(exc_info.value)
    assert "max_model_len" not in str(exc_info.value)


def test_a_configured_number_of_blocks_is_used_unchanged() -> None:
    found = sizing(num_blocks=10)
    assert (found.num_blocks, found.num_tokens, found.longest_requests) == (10, 320, 0)


def test_the_runner_raises_before_loading_the_model() -> None:
    config = EngineConfig(Path("nowhere"), device="cpu", dtype="bfloat16", kv_cache_bytes=1 << 20)
    with pytest.raises(KVMemoryError):
        ModelRunner(config, SMOLLM2, 8192)
