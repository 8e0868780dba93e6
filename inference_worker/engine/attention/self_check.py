"""The comparison of an attention backend with the reference on random data, at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from inference_worker.engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    CacheShape,
    ReferenceBackend,
    StepMetadata,
)

BackendFactory = Callable[[CacheShape, int, Sequence[AttentionSpec]], AttentionBackend]

# New tokens of three sequences in each step: two prompts, decodes beside chunks, only decodes. The first sequence has
# several key blocks of each backend.
_STEPS = ((300, 40, 0), (1, 20, 33), (1, 1, 1))
_MAX_WINDOW = 48  # a larger window is checked with this one, so that sequences are longer than the window
_MAX_ERRORS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class BackendMismatchError(Exception):
    """An error: a backend's results differ from those of the reference."""


def check_backend(make: BackendFactory, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> float:
    """Return the largest difference between the backend and the reference, in one layer of each kind.

    Raises:
        BackendMismatchError: the difference is too large.
    """
    distinct = [replace(spec, window=min(spec.window, _MAX_WINDOW)) for spec in dict.fromkeys(specs)]
    tables = _block_tables(shape.block_size)
    small = replace(shape, num_layers=len(distinct), num_blocks=max(map(max, tables)) + 1, places=())
    tested, reference = make(small, num_heads, distinct), ReferenceBackend(small, num_heads, distinct)
    heads = [num_heads, small.num_kv_heads, small.num_kv_heads]
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for metadata in _steps(tables, small):
        tested.prepare(metadata)
        for layer in range(len(distinct)):
            qkv = torch.randn(metadata.num_tokens, sum(heads), small.head_dim, generator=generator)
            query, key, value = torch.split(qkv.to(small.device, small.dtype), heads, dim=1)
            want = reference.attend(layer, query, key, value, metadata)
            difference = tested.attend(layer, query, key, value, metadata).float() - want.float()
            largest = max(largest, float(difference.abs().nan_to_num(float("inf")).max()))
    if largest > _MAX_ERRORS[small.dtype]:
        raise BackendMismatchError(f"the results differ from the reference by up to {largest:.2g}")
    return largest


def _block_tables(block_size: int) -> list[list[int]]:
    """Return the blocks of each sequence, interleaved, from block 1."""
    counts = [-(-sum(lens) // block_size) for lens in zip(*_STEPS, strict=True)]
    order = sorted((place, seq) for seq, count in enumerate(counts) for place in range(count))
    tables: list[list[int]] = [[] for _ in counts]
    for block, (_, seq) in enumerate(order, start=1):
        tables[seq].append(block)
    return tables


def _steps(tables: list[list[int]], shape: CacheShape) -> Iterator[StepMetadata]:
    """Yield the metadata of each step."""
    size, device = shape.block_size, shape.device
    starts = [0] * len(tables)
    for news in _STEPS:
        seqs = [seq for seq, count in enumerate(news) if count]  # decodes are the first ones
        spans = [range(starts[seq], starts[seq] + news[seq]) for seq in seqs]
        places = [(seq, position) for seq, span in zip(seqs, spans, strict=True) for position in span]
        lens = torch.tensor([len(span) for span in spans])
        used = [-(-span.stop // size) for span in spans]
        rows = [tables[seq][:count] + [0] * (max(used) - count) for seq, count in zip(seqs, used, strict=True)]

        def index(values: list[Any], device: torch.device = device) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        yield StepMetadata(
            num_seqs=len(seqs),
            num_tokens=len(places),
            num_decodes=sum(len(span) == 1 for span in spans),
            query_lens=lens.tolist(),
            lengths=[span.stop for span in spans],
            query_start_loc=index([0, *lens.cumsum(0).tolist()]),
            seq_lens=index([span.stop for span in spans]),
            block_table=index(rows),
            slot_mapping=index([tables[s][p // size] * size + p % size for s, p in places]),
            positions=index([position for _, position in places]),
        )
        starts = [start + count for start, count in zip(starts, news, strict=True)]
