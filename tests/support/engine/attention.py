"""Random batches for tests of attention backends."""

from __future__ import annotations

import random

import torch
from torch.nn import functional

from inference_worker.engine.attention.base import AttentionBackend, CacheShape, StepMetadata
from kernels import reference

BLOCK, HEADS, KV_HEADS, DIM, BLOCKS = 4, 6, 2, 8, 200


def shape(dtype: torch.dtype) -> CacheShape:
    return CacheShape(2, BLOCKS, BLOCK, KV_HEADS, DIM, dtype, torch.device("cpu"))


class Batch:
    """Sequences in random pages that grow in each step."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.pages = self.random.sample(range(1, BLOCKS), BLOCKS - 1)
        self.lengths = [0] * count
        self.tables: list[list[int]] = [[] for _ in range(count)]
        cos, sin = reference.rope_tables(10_000.0 ** (-torch.arange(0, DIM, 2) / DIM), 600)
        self.cos, self.sin = cos, sin

    def grow(self, news: dict[int, int]) -> StepMetadata:
        """Return the metadata of a step in which sequence i gets news[i] tokens."""
        order = sorted(news, key=lambda i: news[i] != 1)
        positions, slots = [], []
        for i in order:
            new = range(self.lengths[i], self.lengths[i] + news[i])
            while len(self.tables[i]) * BLOCK < new.stop:
                self.tables[i].append(self.pages.pop())
            positions += new
            slots += [self.tables[i][p // BLOCK] * BLOCK + p % BLOCK for p in new]
            self.lengths[i] = new.stop
        lens = torch.tensor([news[i] for i in order])
        widest = max(len(self.tables[i]) for i in order)
        places = torch.tensor(positions)
        return StepMetadata(
            num_seqs=len(order),
            num_tokens=len(positions),
            num_decodes=sum(news[i] == 1 for i in order),
            query_lens=lens.tolist(),
            lengths=[self.lengths[i] for i in order],
            query_start_loc=functional.pad(lens.cumsum(0), (1, 0)),
            seq_lens=torch.tensor([self.lengths[i] for i in order]),
            block_table=torch.tensor([self.tables[i] + [0] * (widest - len(self.tables[i])) for i in order]),
            slot_mapping=torch.tensor(slots),
            cos=self.cos[places],
            sin=self.sin[places],
        )


def step(backend: AttentionBackend, qkv: list[torch.Tensor], metadata: StepMetadata) -> list[torch.Tensor]:
    backend.prepare(metadata)
    return [backend.attend(layer, x.clone(), metadata) for layer, x in enumerate(qkv)]
