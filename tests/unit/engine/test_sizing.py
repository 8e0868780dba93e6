"""Capacity of the KV cache, compared with manual calculations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine import device
from inference_worker.engine.capacity.sizing import (
    MAX_CPU_SHARE_BYTES,
    KVMemoryError,
    KVSizing,
    kv_cache_bytes,
    kv_number_bytes,
    size_kv_cache,
)
from inference_worker.engine.model_runner import ModelRunner
from tests.support.engine.fakes import TINY

SMOLLM2 = replace(TINY, num_layers=30, num_kv_heads=3, head_dim=64, max_model_len=8192)
TOKEN = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, numbers per head, bytes per number


def sizing(num_bytes: int = 0, max_model_len: int = 8192, num_blocks: int | None = None) -> KVSizing:
    return size_kv_cache(EngineConfig(Path(), num_blocks=num_blocks), SMOLLM2, max_model_len, 2, num_bytes)


def test_a_cache_in_8_bits_has_almost_twice_the_tokens() -> None:
    size = kv_number_bytes("int8", 2)  # a scale of 2 bytes for 32 numbers
    found = size_kv_cache(EngineConfig(Path()), SMOLLM2, 8192, size, 1 << 30)
    assert found.token_bytes == TOKEN // 2 + 2 * TOKEN // 2 // 32 == 12_240
    assert found.num_blocks == (1 << 30) // (12_240 * 32) == 2741
    assert (kv_number_bytes("fp8", 2), kv_number_bytes("auto", 2), kv_number_bytes("auto", 4)) == (1, 2, 4)


def test_the_number_of_blocks_and_requests() -> None:
    found = sizing(1 << 30)
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
    assert sizing(8192 * TOKEN).longest_requests == 1
    with pytest.raises(KVMemoryError):
        sizing(8192 * TOKEN - 1)


def test_an_error_names_two_solutions_if_the_maximum_length_does_not_fit() -> None:
    with pytest.raises(KVMemoryError) as exc_info:
        sizing(64 << 20)
    assert "64.0 MiB of KV cache fit 2,912 tokens, but one request may take 8,192" in str(exc_info.value)
    assert "MILLRACE_KV_CACHE_MEMORY=180MiB" in str(exc_info.value)
    assert "?max_model_len=2912 " in str(exc_info.value)
    assert sizing(180 << 20).longest_requests == 1
    assert sizing(64 << 20, 2912).longest_requests == 1


def test_an_error_names_one_solution_if_no_block_fits() -> None:
    with pytest.raises(KVMemoryError) as exc_info:
        sizing(1000)
    assert "MILLRACE_KV_CACHE_MEMORY" in str(exc_info.value)
    assert "max_model_len" not in str(exc_info.value)


def test_a_configured_number_of_blocks_is_used_unchanged() -> None:
    found = sizing(num_blocks=10)
    assert (found.num_blocks, found.num_tokens, found.longest_requests) == (10, 320, 0)


def test_the_runner_raises_before_loading_the_model() -> None:
    config = EngineConfig(Path("nowhere"), device="cpu", dtype="bfloat16", kv_cache_memory=1 << 20)
    with pytest.raises(KVMemoryError):
        ModelRunner(config, SMOLLM2, 8192)


def test_a_share_is_one_of_the_free_memory() -> None:
    assert kv_cache_bytes(0.5, 80 << 30, "cuda") == 40 << 30
    assert kv_cache_bytes(0.5, (8 << 30) + (256 << 20), "cpu") == 4 << 30  # some of the machine's memory remains free
    assert kv_cache_bytes(0.9, 1 << 40, "cpu") == MAX_CPU_SHARE_BYTES
    assert kv_cache_bytes(0.9, 1 << 20, "cpu") == 0


@pytest.mark.parametrize(("name", "largest"), [("cuda", 4 << 30), ("cpu", (4 << 30) - (256 << 20))])
def test_bytes_that_are_not_free_are_an_error(name: str, largest: int) -> None:
    assert kv_cache_bytes(largest, 4 << 30, name) == largest
    with pytest.raises(KVMemoryError, match=r"should have .* but only .* MILLRACE_KV_CACHE_MEMORY to less"):
        kv_cache_bytes(largest + 1, 4 << 30, name)


def test_the_runner_raises_before_loading_the_model_if_the_memory_is_not_free() -> None:
    config = EngineConfig(Path("nowhere"), device="cpu", dtype="bfloat16", kv_cache_memory=1 << 50)
    with pytest.raises(KVMemoryError, match=r"1048576\.0 GiB"):
        ModelRunner(config, SMOLLM2, 8192)


def test_free_memory_is_limited_by_the_control_group(tmp_path: Path) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    for place in (tmp_path / "proc/self", groups):
        place.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    cpu = torch.device("cpu")
    assert device.free_memory(cpu, tmp_path) == 5000 << 10  # no control group
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("2000000\n")
    (groups / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert device.free_memory(cpu, tmp_path) == 5000 << 10
    (groups / "memory.max").write_text("3000000\n")
    assert device.free_memory(cpu, tmp_path) == 1_500_000
    (groups / "memory.max").write_text("1000\n")
    assert device.free_memory(cpu, tmp_path) == 0


@pytest.mark.parametrize(
    ("line", "root", "names"),
    [
        ("0::/slice/über/service", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu,memory:/slice/über/service", "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)  # fmt: skip
def test_each_parent_of_the_control_group_limits_free_memory(
    tmp_path: Path, line: str, root: str, names: tuple[str, str, str]
) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 5000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"4:pids:/other\n{line}\n", encoding="utf-8")
    limits = {"slice": 3_000_000, "slice/über/service": 4_000_000}  # the group between has no files
    for group, limit in limits.items():
        place = groups / root / group
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text("1000000\n")
        (place / "memory.stat").write_text(f"{names[2]} 500\n")
    cpu = torch.device("cpu")
    assert device.free_memory(cpu, tmp_path) == 2_000_500
    (groups / root / "slice" / names[0]).write_text("9000000000\n")
    assert device.free_memory(cpu, tmp_path) == 3_000_500
    (tmp_path / "proc/self/cgroup").write_text(line.replace("/slice", "/../slice"), encoding="utf-8")
    assert device.free_memory(cpu, tmp_path) == 5000 << 10
