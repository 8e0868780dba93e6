"""The CPU's attention compared with the reference, and the reference with PyTorch's attention."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from inference_worker.engine.attention.base import AttentionBackend, CacheShape, ReferenceBackend
from inference_worker.engine.attention.batch_invariant import InvariantBackend
from inference_worker.engine.attention.cpu import CpuBackend
from kernels import cpu, reference
from tests.support.engine.attention import BLOCK, DIM, HEADS, KV_HEADS, SPECS, Batch, shape, step


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("seed", range(6))
def test_the_cpu_backend_equals_the_reference(
    seed: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # so that a few tokens are several pieces and groups
        monkeypatch.setattr(cpu, "MAX_QUERY", 3)
        monkeypatch.setattr(cpu, "_GROUP_COST", 0.2)
    ours, oracle = CpuBackend(shape(dtype), HEADS, SPECS), ReferenceBackend(shape(dtype), HEADS, SPECS)
    batch = Batch(7, seed)
    steps = [{0: 1}, {0: 1, 1: 9, 2: 4}, dict.fromkeys(range(7), 1), {0: 1, 3: 40, 4: 13, 5: 1}, {6: 150, 1: 1}, {2: 5}]
    for news in steps:
        metadata = batch.grow(news)
        qkv = [torch.randn(metadata.num_tokens, HEADS + 2 * KV_HEADS, DIM).to(dtype) for _ in SPECS]
        wanted = step(oracle, qkv, metadata)
        for got, want in zip(step(ours, qkv, metadata), wanted, strict=True):
            assert got.shape == want.shape == (metadata.num_tokens, HEADS * DIM)
            assert (got.float() - want.float()).abs().max() < error


def test_the_reference_equals_pytorch() -> None:
    lengths, news = [11, 5, 30], [3, 5, 1]
    keys = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
    values = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
    query = torch.randn(sum(news), HEADS, DIM)
    key_cache, value_cache = torch.zeros(20, BLOCK, KV_HEADS, DIM), torch.zeros(20, BLOCK, KV_HEADS, DIM)
    ids = iter(random.Random(0).sample(range(1, 20), 19))
    table = torch.zeros(3, 8, dtype=torch.int64)
    for i, length in enumerate(lengths):
        table[i, : -(-length // BLOCK)] = torch.tensor([next(ids) for _ in range(-(-length // BLOCK))])
        slots = torch.tensor([int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length)])
        reference.write_cache(keys[i], values[i], key_cache, value_cache, slots)
    starts = torch.tensor([0, 3, 8, 9])
    got = reference.paged_attention(query, key_cache, value_cache, table, torch.tensor(lengths), starts, 0.3)
    for i, (length, new) in enumerate(zip(lengths, news, strict=True)):
        q = query[starts[i] : starts[i + 1]].transpose(0, 1)[None]
        k, v = (x.transpose(0, 1)[None].repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys[i], values[i]))
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        want = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)[0].transpose(0, 1)
        torch.testing.assert_close(got[starts[i] : starts[i + 1]], want, atol=1e-5, rtol=1e-5)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10


@pytest.mark.parametrize("backend", [CpuBackend, InvariantBackend, ReferenceBackend])
def test_a_cache_takes_memory_only_as_it_is_used(backend: type[AttentionBackend]) -> None:
    large = CacheShape(len(SPECS), 1 << 15, BLOCK, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    size = 2 * large.num_layers * large.num_blocks * BLOCK * KV_HEADS * DIM * 4
    assert size == 1 << 26
    before = anonymous_bytes()
    cache = backend(large, HEADS, SPECS)
    assert anonymous_bytes() - before < 1 << 23
    pages = cache.pages()
    assert not any(page[-1].any() for page in pages)
    for page in pages:
        page.fill_(1)
    assert anonymous_bytes() - before > 0.9 * size


def test_pieces_cover_every_new_token_once() -> None:
    pieces = cpu.pieces_of([1, 300, 128], [50, 400, 128])
    assert [(p.first_row, p.queries, p.length, p.table_row) for p in pieces] == [
        (0, 1, 50, 0),
        (1, 128, 228, 1),
        (129, 128, 356, 1),
        (257, 44, 400, 1),
        (301, 128, 128, 2),
    ]


def test_equal_pieces_are_computed_together_and_others_separately() -> None:
    decodes = cpu.pieces_of([1] * 30, [200 + i for i in range(30)])
    assert cpu.split(decodes) == [decodes]
    mixed = cpu.pieces_of([1] * 30 + [1], [200] * 30 + [8000])
    assert [len(group) for group in cpu.split(mixed)] == [30, 1]


def test_rotation_and_norm_equal_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x = torch.randn(5, 3, DIM)
    cos, sin = reference.rope_tables(10_000.0 ** (-torch.arange(0, DIM, 2) / DIM), 5)
    twice = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *twice)
    torch.testing.assert_close(reference.apply_rope(x, cos, sin), want[0].transpose(0, 1))
    norm = LlamaRMSNorm(DIM, eps=1e-5)
    norm.weight.data = torch.randn(DIM)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), norm(x))
    both = torch.randn(4, 2 * DIM)
    torch.testing.assert_close(reference.silu_mul(both), functional.silu(both[:, :DIM]) * both[:, DIM:])
