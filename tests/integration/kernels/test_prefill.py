"""Chunked prefill over a paged prefix: results in Triton's interpreter, and invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.triton import PrefillConfig, paged_prefill, prefill_config
from tests.support.kernels.compiler import recorded_launches
from tests.support.kernels.interpreter import Interpreter
from tests.support.kernels.paged_caches import Paged, paged

SCALE = 0.2


def chunks_for(cache: Paged, new_tokens: list[int], num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random queries for each sequence's last tokens, and their start positions."""
    starts = torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(new_tokens), num_heads, cache.key_cache.shape[-1], generator=generator), starts


def prefill(
    interpreter: Interpreter, query: torch.Tensor, starts: torch.Tensor, cache: Paged, **kwargs: Any
) -> torch.Tensor:
    longest = int(starts.diff().max())
    result: torch.Tensor = interpreter.paged_prefill(
        query, cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens, starts, SCALE, longest, **kwargs
    )
    return result


def expected(query: torch.Tensor, starts: torch.Tensor, cache: Paged, **limits: Any) -> torch.Tensor:
    return reference.paged_attention(
        query, cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens, starts, SCALE, **limits
    )


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 64), (12, 64), (1, 96), (4, 80)])
def test_attention_equals_the_reference(interpreter: Interpreter, group: int, head_dim: int) -> None:
    cache = paged([90, 33], num_kv_heads=2, head_dim=head_dim)
    query, starts = chunks_for(cache, [40, 33], 2 * group)
    torch.testing.assert_close(prefill(interpreter, query, starts, cache), expected(query, starts, cache))


@pytest.mark.parametrize("config", [PrefillConfig(16, 64, 4, 1), PrefillConfig(64, 64, 4, 1), None])
def test_mixed_lengths_and_prefixes(interpreter: Interpreter, config: PrefillConfig | None) -> None:
    # A first token, decodes, a draft, whole prompts, chunks whose prefix ends at, before and after a boundary.
    new = [1, 1, 4, 16, 17, 40, 30, 64, 65]
    prefix = [0, 100, 30, 0, 0, 64, 63, 65, 15]
    cache = paged([a + b for a, b in zip(new, prefix, strict=True)], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, new, 3)
    torch.testing.assert_close(
        prefill(interpreter, query, starts, cache, config=config), expected(query, starts, cache)
    )


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (30, 3.0), (65, 0.0), (400, 3.0)])
def test_windows_and_soft_caps(interpreter: Interpreter, window: int, soft_cap: float) -> None:
    new, prefix = [1, 17, 70, 65], [100, 130, 0, 63]
    cache = paged([a + b for a, b in zip(new, prefix, strict=True)], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, new, 3)
    limits = {"window": window, "soft_cap": soft_cap}
    torch.testing.assert_close(
        prefill(interpreter, query, starts, cache, **limits), expected(query, starts, cache, **limits)
    )


def test_a_short_chunk_over_a_long_prefix(interpreter: Interpreter) -> None:
    cache = paged([3000], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [5], 4)
    torch.testing.assert_close(prefill(interpreter, query, starts, cache), expected(query, starts, cache))


def test_more_sequences_than_one_search_step(interpreter: Interpreter) -> None:
    new = [1] * 130
    cache = paged(new, num_kv_heads=1, head_dim=16)
    query, starts = chunks_for(cache, new, 1)
    torch.testing.assert_close(prefill(interpreter, query, starts, cache), expected(query, starts, cache))


def test_a_sequence_without_new_tokens(interpreter: Interpreter) -> None:
    cache = paged([20, 50, 8, 0], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [20, 0, 8, 0], 2)
    torch.testing.assert_close(prefill(interpreter, query, starts, cache), expected(query, starts, cache))


def test_int64_indices(interpreter: Interpreter) -> None:
    cache = paged([40, 90], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [10, 70], 4)
    cache.block_table, cache.seq_lens = cache.block_table.long(), cache.seq_lens.long()
    torch.testing.assert_close(prefill(interpreter, query, starts.long(), cache), expected(query, starts, cache))


def test_padding_rows_are_unchanged(interpreter: Interpreter) -> None:
    cache = paged([20], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [20], 2)
    out = torch.full((50, 2, 64), 7.0)
    padded = torch.cat((query, torch.full((30, 2, 64), float("nan"))))
    prefill(interpreter, padded, starts, cache, out=out)
    torch.testing.assert_close(out[:20], expected(query, starts, cache))
    assert (out[20:] == 7).all()


def test_chunks_equal_the_whole_prompt(interpreter: Interpreter) -> None:
    cache = paged([100], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [100], 3)
    whole = prefill(interpreter, query, starts, cache)
    pieces = []
    for begin, end in ((0, 37), (37, 64), (64, 100)):
        cache.seq_lens[0] = end
        pieces.append(prefill(interpreter, query[begin:end], torch.tensor([0, end - begin], dtype=torch.int32), cache))
    torch.testing.assert_close(torch.cat(pieces), whole)


def test_scores_far_apart_neither_overflow_nor_vanish(interpreter: Interpreter) -> None:
    cache = paged([150], num_kv_heads=1, head_dim=64)
    query, starts = chunks_for(cache, [60], 2)
    torch.testing.assert_close(prefill(interpreter, 300 * query, starts, cache), expected(300 * query, starts, cache))


def test_views_into_larger_tensors(interpreter: Interpreter) -> None:
    cache = paged([40, 90], num_kv_heads=2, head_dim=64)
    query, starts = chunks_for(cache, [10, 70], 4)
    fused = torch.full((80, 8, 64), float("nan"))
    fused[:, :4] = query
    wide = torch.zeros(80, 6, 64)
    prefill(interpreter, fused[:, :4], starts, cache, out=wide[:, 1:5])
    torch.testing.assert_close(wide[:, 1:5], expected(query, starts, cache))
    assert not wide[:, 0].any()
    assert not wide[:, 5].any()


@pytest.mark.parametrize(
    ("max_query_len", "group", "rows", "warps"), [(1, 8, 16, 4), (8, 4, 32, 4), (20, 3, 64, 4), (500, 4, 128, 8)]
)
def test_small_chunks_use_small_tiles(max_query_len: int, group: int, rows: int, warps: int) -> None:
    config = prefill_config(max_query_len, group, 128)
    assert (config.tile_rows, config.num_warps) == (rows, warps)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(9, 4, 48)}, ValueError, "head_dim"),
        ({"key_cache": torch.zeros(1, 12, 2, 64), "value_cache": torch.zeros(1, 12, 2, 64)}, ValueError, "block_size"),
        ({"key_cache": torch.zeros(1, 16, 64, 2).transpose(2, 3)}, ValueError, "packed"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, ValueError, "query_start_loc must be"),
        ({"query_start_loc": torch.zeros(3)}, TypeError, "query_start_loc must be int32 or int64"),
        ({"block_table": torch.zeros(2, 8, dtype=torch.int32)[:, ::2]}, ValueError, "block_table must be contiguous"),
        ({"out": torch.zeros(9, 2, 64)}, ValueError, "shaped like query"),
        ({"config": PrefillConfig(1, 64, 4, 1)}, ValueError, "cannot hold 2 heads"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = paged([5, 9], num_kv_heads=2, head_dim=64)
    query, starts = chunks_for(cache, [4, 5], 4)
    arguments: dict[str, Any] = {
        "query": query, "key_cache": cache.key_cache, "value_cache": cache.value_cache, "seq_lens": cache.seq_lens,
        "block_table": cache.block_table, "query_start_loc": starts, "scale": SCALE, "max_query_len": 5,
    }  # fmt: skip
    with recorded_launches() as launches, pytest.raises(error, match=message):
        paged_prefill(**(arguments | change))
    assert not launches


def test_an_empty_batch_launches_nothing() -> None:
    cache = paged([5], num_kv_heads=1, head_dim=64)
    with recorded_launches() as launches:
        out = paged_prefill(
            torch.zeros(0, 2, 64), cache.key_cache, cache.value_cache, cache.block_table, cache.seq_lens,
            torch.zeros(2, dtype=torch.int32), SCALE, 0,
        )  # fmt: skip
    assert out.shape == (0, 2, 64)
    assert not launches
