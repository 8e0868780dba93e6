"""Attention of decoders within the inputs of one pass. Nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata


class PackedAttention(AttentionBackend):
    """Causal attention within each input of a packing. Soft caps are not supported."""

    def __init__(
        self, config: ModelConfig, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = CacheShape(config.num_layers, 0, 1, config.num_kv_heads, config.head_dim, dtype, device)
        super().__init__(shape, config.num_heads, specs)

    def pages(self) -> list[torch.Tensor]:
        return []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        packing: Packing = metadata.plan
        spec = self.specs[layer]
        return packing.attend_causally(query, key, value, spec.scale, spec.window)


def describe(packing: Packing) -> StepMetadata:
    """Return the data of a step that computes the packed inputs."""
    nothing = packing.starts.new_empty(0)
    lengths = packing.lengths.tolist()
    return StepMetadata(
        num_seqs=len(lengths),
        num_tokens=sum(lengths),
        num_decodes=0,
        query_lens=lengths,
        lengths=lengths,
        query_start_loc=nothing,
        seq_lens=packing.lengths,
        block_table=nothing,
        slot_mapping=nothing,
        positions=packing.positions,
        plan=packing,
    )
