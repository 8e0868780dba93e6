"""The step that the scheduler plans and the runner executes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from inference_worker.engine.sequences.sequence import Sequence


class BlockOperation(NamedTuple):
    """A copy of a block before a step's forward pass. A step's operations run in the given order.

    "save" copies block `source` to CPU slot `target`. "restore" copies slot `source` to block `target`. "copy" copies a
    block to a block.
    """

    operation_type: Literal["save", "restore", "copy"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens [start, start + num_new_tokens) of a sequence, computed in one step. Drafts are the last of them."""

    seq: Sequence
    start: int
    num_new_tokens: int
    samples: bool  # the tokens reach the sequence's end, so the step samples a token
    epoch: int  # the sequence's epoch when scheduled; a later epoch means that it was preempted since
    in_flight: bool = False  # the last of these tokens is the result of the previous step
    drafts: tuple[int, ...] = ()  # tokens that the step verifies

    @property
    def num_known_tokens(self) -> int:
        """Return the number of new tokens without drafts."""
        return self.num_new_tokens - len(self.drafts)

    @property
    def num_samples(self) -> int:
        """Return the number of tokens whose logits are sampled. They are the last ones."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(slots=True)
class SchedulerOutput:
    """The batch of one step, decodes first."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    operations: list[BlockOperation] = field(default_factory=list)  # copies before the forward pass
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    preempted: list[Sequence] = field(default_factory=list)
    exceeds_kv_cache: list[Sequence] = field(default_factory=list)  # too large for the whole cache
    expired: list[Sequence] = field(default_factory=list)  # waited past their expiry

    @property
    def num_decodes(self) -> int:
        """Return the number of entries that compute one token. They come first."""
        return next((i for i, s in enumerate(self.scheduled) if s.num_new_tokens != 1), len(self.scheduled))
