"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from inference_worker.engine.attention.base import AttentionBackend, StepMetadata


class CausalModel(Protocol):
    """A decoder: hidden states for a step's tokens, and logits for those that sample."""

    def forward(self, token_ids: torch.Tensor, attention: AttentionBackend, metadata: StepMetadata) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] for the token ids [num_tokens]; fills their places in the KV cache."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, [rows, vocab], of hidden states [rows, hidden]."""
