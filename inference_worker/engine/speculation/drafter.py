"""The interface of drafters. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from inference_worker.engine.sequences.sequence import Sequence

MAX_DEPTH = 8  # draft tokens of a sequence in one step


class DraftToken(NamedTuple):
    """A draft of a sequence's next token, or of one of the tokens after it."""

    token_id: int
    drafter: str  # name of the drafter
    evidence: int = 0  # a drafter's measure of its confidence, from 0 to MAX_EVIDENCE


MAX_EVIDENCE = 8
MODEL_EVIDENCE = 6  # evidence of each draft of a draft model
MODEL_DRAFTER = "model"  # its name in metrics


class DraftRequest(NamedTuple):
    """A sequence, and the number of its next tokens that the draft model drafts."""

    seq: Sequence
    depth: int


def model_draft(token_id: int) -> DraftToken:
    """Return a draft of the draft model."""
    return DraftToken(token_id, MODEL_DRAFTER, MODEL_EVIDENCE)


class Drafter(Protocol):
    """A source of drafts. A drafter must be fast, because it runs between the steps."""

    @property
    def name(self) -> str:
        """Return the name in metrics."""

    def propose(self, seq: Sequence, drafts: Items[int], limit: int) -> list[DraftToken]:
        """Return at most `limit` tokens that may follow the sequence's tokens and `drafts`."""
