"""Attention of models whose layers are in several groups, each with its own block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from inference_worker.engine.attention.base import AttentionBackend, StepMetadata
from kernels.native.operators import StackAttention


class GroupedBackend(AttentionBackend):
    """A backend that passes each layer the block table of its group. Tables and slots of a step are [groups, …].

    Args:
        backend: computes the attention of all layers.
        groups: the group of each layer.
    """

    def __init__(self, backend: AttentionBackend, groups: Sequence[int]) -> None:
        super().__init__(backend.shape, backend.num_heads, backend.specs)
        self._backend = backend
        self._groups = groups

    def pages(self) -> list[torch.Tensor]:
        return self._backend.pages()

    def prepare(self, metadata: StepMetadata) -> None:
        tables, slots = metadata.block_table.unbind(0), metadata.slot_mapping.unbind(0)
        steps = [replace(metadata, block_table=t, slot_mapping=s) for t, s in zip(tables, slots, strict=True)]
        for step in steps:
            self._backend.prepare(step)
        metadata.plan = [steps[group] for group in self._groups]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        return self._backend.attend(layer, query, key, value, metadata.plan[layer])

    def native(self, metadata: StepMetadata) -> StackAttention | None:
        first = self._backend.native(metadata.plan[0])
        return first and StackAttention(first.caches, [step.plan for step in metadata.plan])
