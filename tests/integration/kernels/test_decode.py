"""Paged decode: results in Triton's interpreter, the plan, and invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.triton import DecodePlan, decode_workspace, paged_decode, plan_decode
from tests.support.kernels.compiler import recorded_launches
from tests.support.kernels.interpreter import Interpreter
from tests.support.kernels.paged_caches import Paged, paged

SCALE = 0.2


def query_for(cache: Paged, num_heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(cache.seq_lens), num_heads, cache.key_cache.shape[-1], generator=generator)


def decode(
    interpreter: Interpreter, query: torch.Tensor, cache: Paged, plan: DecodePlan, **kwargs: Any
) -> torch.Tensor:
    result: torch.Tensor = interpreter.paged_decode(
        query, cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens, SCALE, plan, **kwargs
    )
    return result


def expected(query: torch.Tensor, cache: Paged, **limits: Any) -> torch.Tensor:
    used = cache.seq_lens > 0
    starts = torch.arange(int(used.sum()) + 1)
    out = torch.zeros_like(query)
    out[used] = reference.paged_attention(
        query[used], cache.key_cache, cache.value_cache, cache.block_table[used], cache.seq_lens[used], starts, SCALE,
        **limits,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 128), (24, 64), (1, 96), (4, 80)])
def test_attention_equals_the_reference(interpreter: Interpreter, group: int, head_dim: int, splits: int) -> None:
    cache = paged([1, 130, 200], num_kv_heads=2, head_dim=head_dim)
    query = query_for(cache, 2 * group)
    torch.testing.assert_close(decode(interpreter, query, cache, DecodePlan(splits)), expected(query, cache))


@pytest.mark.parametrize("plan", [DecodePlan(1), DecodePlan(3), DecodePlan(4, 64)])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (50, 3.0), (65, 0.0), (400, 3.0)])
def test_windows_and_soft_caps(interpreter: Interpreter, plan: DecodePlan, window: int, soft_cap: float) -> None:
    cache = paged([0, 1, 64, 130, 200], num_kv_heads=1, head_dim=64)
    query = query_for(cache, 3)
    limits = {"window": window, "soft_cap": soft_cap}
    torch.testing.assert_close(decode(interpreter, query, cache, plan, **limits), expected(query, cache, **limits))


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_at_the_boundaries_of_blocks_and_tiles(interpreter: Interpreter, splits: int) -> None:
    cache = paged([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129], num_kv_heads=1, head_dim=64)
    query = query_for(cache, 3)
    torch.testing.assert_close(decode(interpreter, query, cache, DecodePlan(splits)), expected(query, cache))


@pytest.mark.parametrize("plan", [DecodePlan(1), DecodePlan(20), DecodePlan(6, 64)])
def test_empty_splits_and_padding_rows(interpreter: Interpreter, plan: DecodePlan) -> None:
    cache = paged([0, 70, 1, 0, 320], num_kv_heads=1, head_dim=64)
    query = query_for(cache, 2)
    workspace = decode_workspace(5, 2, 64, plan, "cpu")
    for part in workspace:
        part.fill_(float("nan"))  # the output of an empty split must not be read
    out = decode(interpreter, query, cache, plan, workspace=workspace)
    torch.testing.assert_close(out, expected(query, cache))


@pytest.mark.parametrize("plan", [DecodePlan(20), DecodePlan(24, 128)])
def test_a_long_sequence_beside_a_short_one(interpreter: Interpreter, plan: DecodePlan) -> None:
    cache = paged([3000, 5], num_kv_heads=1, head_dim=64)
    query = query_for(cache, 4)
    torch.testing.assert_close(decode(interpreter, query, cache, plan), expected(query, cache))


def test_scores_far_apart_neither_overflow_nor_vanish(interpreter: Interpreter) -> None:
    cache = paged([200], num_kv_heads=1, head_dim=64)
    query = 300 * query_for(cache, 2)
    torch.testing.assert_close(decode(interpreter, query, cache, DecodePlan(3)), expected(query, cache))


def test_views_into_larger_tensors(interpreter: Interpreter) -> None:
    cache = paged([40, 90], num_kv_heads=2, head_dim=64)
    query = query_for(cache, 4)
    fused = torch.full((2, 8, 64), float("nan"))
    fused[:, :4] = query
    layers = torch.full((2, *cache.key_cache.shape[:2], 4, 64), float("nan"))
    layers[0, :, :, :2], layers[1, :, :, :2] = cache.key_cache, cache.value_cache
    cache.key_cache, cache.value_cache = layers[0, :, :, :2], layers[1, :, :, :2]
    torch.testing.assert_close(decode(interpreter, fused[:, :4], cache, DecodePlan(2)), expected(query, cache))


def test_fixed_splits_make_a_row_independent_of_its_neighbors(interpreter: Interpreter) -> None:
    cache = paged([150, 700, 20], num_kv_heads=1, head_dim=64)
    query = query_for(cache, 3)
    together = decode(interpreter, query, cache, plan_decode(3, 1, 700, 132, split_tokens=64))
    alone = Paged(cache.key_cache, cache.value_cache, cache.block_table[:1], cache.seq_lens[:1])
    assert torch.equal(
        together[:1], decode(interpreter, query[:1], alone, plan_decode(1, 1, 150, 132, split_tokens=64))
    )


def test_int64_indices(interpreter: Interpreter) -> None:
    cache = paged([40, 90], num_kv_heads=1, head_dim=64)
    cache.block_table, cache.seq_lens = cache.block_table.long(), cache.seq_lens.long()
    query = query_for(cache, 4)
    torch.testing.assert_close(decode(interpreter, query, cache, DecodePlan(2)), expected(query, cache))


def test_the_grid_does_not_depend_on_the_lengths() -> None:
    grids = []
    for lengths in ([1, 1], [500, 3]):
        cache = paged(lengths, num_kv_heads=2, head_dim=64)
        with recorded_launches() as launches:
            paged_decode(
                query_for(cache, 4), cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens, SCALE,
                DecodePlan(4),
            )  # fmt: skip
        grids.append([(launch.name, launch.grid) for launch in launches])
    assert grids[0] == grids[1] == [("_decode_kernel", (2, 4, 2)), ("_combine_kernel", (4, 2))]


def test_one_split_requires_no_combining() -> None:
    cache = paged([5], num_kv_heads=1, head_dim=64)
    with recorded_launches() as launches:
        paged_decode(
            query_for(cache, 2), cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens, SCALE,
            DecodePlan(1),
        )  # fmt: skip
    assert [launch.name for launch in launches] == ["_decode_kernel"]


@pytest.mark.parametrize(
    ("num_seqs", "max_seq_len", "split_tokens", "splits"),
    [
        (256, 1024, 0, 1),  # the batch itself fills the device many times
        (1, 64, 0, 1),  # too short to split
        (1, 1_000_000, 0, 45),  # 8 programs: 45 splits of each fill nine tenths of the 396 slots
        (40, 4096, 0, 5),  # 320 programs would leave a fifth of them idle, 1600 make four waves
        (4, 1000, 256, 4),
        (4, 1025, 256, 5),
        (4, 0, 256, 1),
    ],
)
def test_the_plan(num_seqs: int, max_seq_len: int, split_tokens: int, splits: int) -> None:
    assert plan_decode(num_seqs, 8, max_seq_len, 132, split_tokens=split_tokens) == DecodePlan(splits, split_tokens)


def test_a_plan_never_makes_splits_shorter_than_two_tiles() -> None:
    for max_seq_len in (1, 127, 128, 256, 1000, 5000):
        assert (plan_decode(1, 1, max_seq_len, 132).num_splits - 1) * 128 <= max_seq_len


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 5, 64)}, ValueError, "5 query heads are not a multiple of 2"),
        ({"query": torch.zeros(2, 4, 32)}, ValueError, "head_dim"),
        ({"query": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, TypeError, "key_cache must be bfloat16"),
        ({"query": torch.zeros(2, 64, 4).transpose(1, 2)}, ValueError, "packed"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "block_table must have 2 rows"),
        ({"block_table": torch.zeros(2, 1)}, TypeError, "block_table must be int32 or int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, "seq_lens must be"),
        ({"value_cache": torch.zeros(1, 16, 2, 64)}, ValueError, "one shape"),
        ({"out": torch.zeros(2, 4, 128)}, ValueError, "out must be contiguous"),
        ({"workspace": decode_workspace(2, 4, 64, DecodePlan(3), "cpu")}, ValueError, "another plan"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = paged([5, 9], num_kv_heads=2, head_dim=64)
    arguments: dict[str, Any] = {
        "query": query_for(cache, 4), "key_cache": cache.key_cache, "value_cache": cache.value_cache,
        "block_table": cache.block_table, "seq_lens": cache.seq_lens, "scale": SCALE, "plan": DecodePlan(2),
    }  # fmt: skip
    with recorded_launches() as launches, pytest.raises(error, match=message):
        paged_decode(**(arguments | change))
    assert not launches


def test_an_empty_batch_launches_nothing() -> None:
    cache = paged([5], num_kv_heads=1, head_dim=64)
    with recorded_launches() as launches:
        out = paged_decode(
            torch.zeros(0, 2, 64), cache.key_cache, cache.value_cache, cache.block_table[:0], cache.seq_lens[:0], SCALE,
            DecodePlan(1),
        )  # fmt: skip
    assert out.shape == (0, 2, 64)
    assert not launches
