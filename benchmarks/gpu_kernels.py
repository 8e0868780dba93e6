"""The kernels on a GPU: results compared with the references, and rates compared with the machine's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from kernels import reference
from kernels import triton as kernels

BLOCK_SIZE = 32
TOLERANCE = 0.02  # bf16 has 8 bits of mantissa; results are about 1 and less


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


LLAMA_8B = Heads("8B", 32, 8, 128)
LLAMA_1B = Heads("1B", 32, 8, 64)
SMOL = Heads("SmolLM2-135M", 9, 3, 64)
PLAIN = Heads("7B without GQA", 32, 32, 128)
TINY = Heads("tiny", 3, 1, 16)


class AttentionBatch:
    """Sequences of given lengths in a shuffled paged cache, and the queries of their newest tokens."""

    def __init__(self, bench: Bench, shape: Heads, lengths: list[int], new: list[int]) -> None:
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(blocks)).to(torch.int32)
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in zip(table, order.split(blocks), strict=True):
            row[: len(part)] = part
        pages = (sum(blocks), BLOCK_SIZE, shape.kv_heads, shape.dim)
        self.shape, self.lengths, self.new = shape, lengths, new
        self.key_cache, self.value_cache = bench.random(*pages), bench.random(*pages)
        self.block_table = table.to(bench.device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
        self.starts = torch.tensor([0, *new], device=bench.device).cumsum(0).to(torch.int32)
        self.query = bench.random(sum(new), shape.heads, shape.dim)

    def decode(self, plan: kernels.DecodePlan) -> Callable[[], torch.Tensor]:
        """Return a function that decodes the batch, with preallocated buffers."""
        num_seqs, num_heads, head_dim = self.query.shape
        workspace = kernels.decode_workspace(num_seqs, num_heads, head_dim, plan, self.query.device)
        out = torch.empty_like(self.query)
        return lambda: kernels.paged_decode(
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.shape.scale, plan,
            out=out, workspace=workspace,
        )  # fmt: skip

    def prefill(self, config: kernels.PrefillConfig | None = None) -> Callable[[], torch.Tensor]:
        """Return a function that prefills the batch."""
        out = torch.empty_like(self.query)
        return lambda: kernels.paged_prefill(
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.starts,
            self.shape.scale, max(self.new), out=out, config=config,
        )  # fmt: skip

    def compute_reference(self) -> torch.Tensor:
        """Return the reference's result."""
        return reference.paged_attention(
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.starts, self.shape.scale
        )

    @property
    def bytes(self) -> int:
        """Return the bytes that attention must move: keys, values, queries and results once."""
        per_token = 2 * self.shape.kv_heads * self.shape.dim
        return (sum(self.lengths) * per_token + 2 * self.query.numel()) * self.query.element_size()

    @property
    def operations(self) -> int:
        """Return the floating-point operations of causal attention: two products, of visible pairs only."""
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for length, n in zip(self.lengths, self.new, strict=True))
        return 4 * self.shape.heads * self.shape.dim * pairs


def checks(bench: Bench) -> list[dict[str, Any]]:
    """Compare every kernel with its reference on the device."""
    shapes = [TINY] if bench.dry_run else [SMOL, LLAMA_1B, LLAMA_8B, PLAIN]
    results = []
    for shape in shapes:
        results += [_compare(f"{name} {shape.name}", got, want) for name, got, want in _attention_cases(bench, shape)]
        results += [_compare(f"{name} {shape.name}", got, want) for name, got, want in _rope_cases(bench, shape)]
    for width in [48] if bench.dry_run else [576, 4096, 14_336]:
        x, residual, weight = bench.random(37, width), bench.random(37, width), bench.random(width)
        want = reference.rms_norm(x + residual, weight, 1e-5)
        results.append(_compare(f"rms_norm {width}", kernels.rms_norm(x, weight, 1e-5, residual=residual), want))
        x = bench.random(37, 2 * width)
        results.append(_compare(f"silu_mul {width}", kernels.silu_mul(x), reference.silu_mul(x)))
    return results


def _attention_cases(bench: Bench, shape: Heads) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    lengths = [1, 33, 70] if bench.dry_run else [1, 31, 32, 33, 64, 65, 1000, 5000]
    batch = AttentionBatch(bench, shape, lengths, [1] * len(lengths))
    want = batch.compute_reference()
    for splits in (1, 5):
        yield f"decode {splits} splits", batch.decode(kernels.DecodePlan(splits))(), want
    together = batch.decode(_fixed_plan(batch))()
    yield "decode fixed splits", together, want
    alone = AttentionBatch(bench, shape, lengths[-2:-1], [1])
    alone.key_cache, alone.value_cache, alone.query = batch.key_cache, batch.value_cache, batch.query[-2:-1]
    alone.block_table = batch.block_table[-2:-1]
    yield "decode, alone as in a batch, bit by bit", alone.decode(_fixed_plan(alone))(), together[-2:-1]
    new = [min(length, 40 if bench.dry_run else 700) for length in lengths]
    batch = AttentionBatch(bench, shape, lengths, new)
    yield "prefill", batch.prefill()(), batch.compute_reference()
    batch = AttentionBatch(bench, shape, lengths, [1] * len(lengths))
    yield "prefill of single tokens", batch.prefill()(), batch.compute_reference()


def _fixed_plan(batch: AttentionBatch) -> kernels.DecodePlan:
    return kernels.plan_decode(len(batch.lengths), batch.shape.kv_heads, max(batch.lengths), 1, split_tokens=64)


def _rope_cases(bench: Bench, shape: Heads) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    tensors = _projection(bench, shape, 9)
    turned = tensors.qkv[:, : -shape.kv_heads]
    want = reference.apply_rope(turned.float(), *(table[tensors.positions] for table in tensors.tables))
    kernels.rotate(turned, *tensors.tables, tensors.positions)
    yield "rope of queries and keys", turned, want
    keys, values = (torch.zeros_like(cache) for cache in tensors.caches)
    reference.write_cache(*tensors.new, keys, values, tensors.slots)
    kernels.write_cache(*tensors.new, *tensors.caches, tensors.slots)
    yield "cached keys", tensors.caches[0], keys
    yield "cached values", tensors.caches[1], values


def _compare(name: str, got: torch.Tensor, want: torch.Tensor) -> dict[str, Any]:
    error = (got.float() - want.float()).abs()
    bound = 0.0 if "bit by bit" in name else TOLERANCE
    ok = bool((error <= bound * want.float().abs().clamp(min=1)).all())  # NaN is not
    return {"name": name, "ok": ok, "largest_error": float(error.max())}


def decode(bench: Bench) -> list[dict[str, Any]]:
    """Measure paged decode as a share of the copy bandwidth, over batch sizes and contexts."""
    cases = [(1, 1024), (1, 32_768), (8, 4096), (32, 1024), (32, 8192), (128, 4096), (256, 1024), (256, 4096)]
    shapes = [LLAMA_8B, LLAMA_1B, SMOL]
    if bench.dry_run:
        cases, shapes = [(2, 70)], [TINY]
    rows = []
    for shape in shapes:
        for num_seqs, context in cases:
            rows.append(_decode_row(bench, shape, [context] * num_seqs, str(context)))
        spread = random.Random(0)  # noqa: S311 (lengths, not secrets)
        top = 100 if bench.dry_run else 8192
        rows.append(_decode_row(bench, shape, [spread.randint(1, top) for _ in range(64 if top > 100 else 2)], "mixed"))
    return rows


def _decode_row(bench: Bench, shape: Heads, lengths: list[int], label: str) -> dict[str, Any]:
    batch = AttentionBatch(bench, shape, lengths, [1] * len(lengths))
    plan = kernels.plan_decode(len(lengths), shape.kv_heads, max(lengths), bench.num_sms)
    seconds = bench.seconds(batch.decode(plan))
    rate = batch.bytes / seconds
    return {
        "model": shape.name, "batch": len(lengths), "context": label, "splits": plan.num_splits,
        "us": round(seconds * 1e6, 1), "gb_s": round(rate / 1e9, 1), "share_of_copy": round(rate / bench.copy_rate, 3),
    }  # fmt: skip


def prefill(bench: Bench) -> list[dict[str, Any]]:
    """Measure prefill as a share of the bf16 matrix rate: whole prompts, chunks after a prefix, and mixed lengths."""
    cases = [
        ("one prompt of 2k", [2048], [2048]),
        ("one prompt of 8k", [8192], [8192]),
        ("one prompt of 32k", [32_768], [32_768]),
        ("16 prompts of 1k", [1024] * 16, [1024] * 16),
        ("512 after 8k", [8704], [512]),
        ("2k after 30k", [32_768], [2048]),
        ("8 drafts of 5 after 4k", [4096] * 8, [5] * 8),
        ("mixed", [100, 3000, 700, 9000, 50, 4000], [100, 3000, 200, 2000, 50, 1000]),
    ]
    shapes = [LLAMA_8B, LLAMA_1B, SMOL]
    if bench.dry_run:
        cases, shapes = [("tiny", [70, 9], [40, 9])], [TINY]
    return [_prefill_row(bench, shape, *case) for shape in shapes for case in cases]


def _prefill_row(bench: Bench, shape: Heads, label: str, lengths: list[int], new: list[int]) -> dict[str, Any]:
    batch = AttentionBatch(bench, shape, lengths, new)
    seconds = bench.seconds(batch.prefill())
    rate = batch.operations / seconds
    return {
        "model": shape.name, "case": label, "us": round(seconds * 1e6, 1), "tflop_s": round(rate / 1e12, 1),
        "share_of_matrix": round(rate / bench.matrix_rate, 3),
    }  # fmt: skip


def small(bench: Bench) -> list[dict[str, Any]]:
    """Measure the small kernels as shares of the copy bandwidth. Few tokens stay in the L2 cache."""
    shape, hidden, inner = (TINY, 48, 96) if bench.dry_run else (LLAMA_8B, 4096, 14_336)
    rows = []
    for tokens in [3] if bench.dry_run else [1, 32, 256, 16_384]:
        tensors = _projection(bench, shape, tokens)
        turned = tensors.qkv[:, : -shape.kv_heads]
        call = _bound(kernels.rotate, turned, *tensors.tables, tensors.positions)
        rows.append(_small_row(bench, "rotate", tokens, call, 2 * turned.numel()))
        call = _bound(kernels.write_cache, *tensors.new, *tensors.caches, tensors.slots)
        rows.append(_small_row(bench, "write_cache", tokens, call, 4 * tensors.new[0].numel()))
        x, residual, weight = bench.random(tokens, hidden), bench.random(tokens, hidden), bench.random(hidden)
        out = torch.empty_like(x)
        call = _bound(kernels.rms_norm, x, weight, 1e-5, residual=residual, out=out)
        rows.append(_small_row(bench, "rms_norm", tokens, call, 4 * x.numel()))
        x, out = bench.random(tokens, 2 * inner), bench.random(tokens, inner)
        rows.append(_small_row(bench, "silu_mul", tokens, _bound(kernels.silu_mul, x, out=out), 3 * out.numel()))
    return rows


def _bound(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)


def _small_row(bench: Bench, name: str, tokens: int, call: Callable[[], object], numbers_moved: int) -> dict[str, Any]:
    seconds = bench.seconds(call)
    rate = numbers_moved * bench.dtype.itemsize / seconds
    return {
        "kernel": name, "tokens": tokens, "us": round(seconds * 1e6, 2), "gb_s": round(rate / 1e9, 1),
        "share_of_copy": round(rate / bench.copy_rate, 3),
    }  # fmt: skip


@dataclass(frozen=True)
class _Projection:
    """Queries, keys and values of one layer's new tokens, their rotation, and the layer's cache."""

    qkv: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor]  # keys and values
    tables: tuple[torch.Tensor, torch.Tensor]  # cos and sin
    positions: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor


def _projection(bench: Bench, shape: Heads, tokens: int) -> _Projection:
    qkv = bench.random(tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
    _, key, value = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
    frequencies = 1 / 10_000 ** (torch.arange(0, shape.dim, 2) / shape.dim)
    cos, sin = (table.to(bench.device) for table in reference.rope_tables(frequencies, 4096))
    blocks = -(-tokens // BLOCK_SIZE) + 1
    pages = torch.zeros(2, blocks, BLOCK_SIZE, shape.kv_heads, shape.dim, dtype=bench.dtype, device=bench.device)
    return _Projection(
        qkv=qkv,
        new=(key, value),
        tables=(cos, sin),
        positions=torch.randint(4096, (tokens,), device=bench.device),
        caches=(pages[0], pages[1]),
        slots=torch.randperm(blocks * BLOCK_SIZE, device=bench.device)[:tokens],
    )


def tuning(bench: Bench) -> list[dict[str, Any]]:
    """Measure other tile shapes of prefill and other splits of decode, to choose the defaults."""
    shape = TINY if bench.dry_run else LLAMA_8B
    batch = AttentionBatch(bench, shape, [70] if bench.dry_run else [8192], [40] if bench.dry_run else [8192])
    base = kernels.prefill_config(max(batch.new), shape.heads // shape.kv_heads, shape.dim)
    rows = []
    for config in (
        base, replace(base, num_stages=2), replace(base, num_stages=4), replace(base, tile_keys=128, num_stages=2),
        replace(base, tile_rows=64, num_warps=4), replace(base, tile_rows=64, num_warps=4, num_stages=2),
        replace(base, tile_keys=32),
    ):  # fmt: skip
        share = batch.operations / bench.seconds(batch.prefill(config)) / bench.matrix_rate
        rows.append({"kernel": "prefill", "config": str(config), "share_of_matrix": round(share, 3)})
        if bench.seconds_left() <= 0:
            return rows
    for num_seqs, context in [(2, 70)] if bench.dry_run else [(1, 8192), (8, 8192), (40, 4096)]:
        batch = AttentionBatch(bench, shape, [context] * num_seqs, [1] * num_seqs)
        for splits in (1, 2, 4, 8, 16, 32, 64):
            share = batch.bytes / bench.seconds(batch.decode(kernels.DecodePlan(splits))) / bench.copy_rate
            case = {"kernel": "decode", "batch": num_seqs, "context": context, "splits": splits}
            rows.append(case | {"share_of_copy": round(share, 3)})
    return rows
