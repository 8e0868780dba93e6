"""The interface of runners, which execute the steps of the scheduler. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.request import TokenLogprobs
from inference_worker.engine.capacity.roofline import Roofline
from inference_worker.engine.sequences.step import SchedulerOutput

if TYPE_CHECKING:
    from inference_worker.engine.attention.base import BackendChoice


@dataclass(slots=True)
class StepResult:
    """The result of a step."""

    # Of each sampled entry, in order: the accepted drafts and the token after them.
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in `tokens`, if requested
    # By index in the batch, if requested: of the prompt tokens after the computed ones.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A step on the device."""

    def sample(self) -> None:
        """Sample the tokens, unless `launch` has. The tokens of earlier steps must be in their sequences."""

    def read(self) -> StepResult:
        """Wait for the step and return its result."""


class Runner(Protocol):
    """The interface of runners."""

    @property
    def num_blocks(self) -> int:
        """Return the number of KV cache blocks that can be allocated; their ids start at 1."""

    @property
    def num_host_blocks(self) -> int:
        """Return the number of blocks that fit into CPU memory."""

    @property
    def restore_seconds(self) -> float:
        """Return the seconds to restore one block from CPU memory."""

    @property
    def async_scheduling(self) -> bool:
        """Return whether a step may be launched before the previous one has finished."""

    @property
    def attention_choice(self) -> BackendChoice:
        """Return the name of the attention backend, and why it replaces the default."""

    @property
    def slow(self) -> SlowReason | None:
        """Return why the model uses a slower backend than the machine's default, or None."""

    @property
    def computes_with(self) -> str:
        """Return the log's line about instruction sets, threads, weights, kernels, attention and KV cache."""

    @property
    def roofline(self) -> Roofline:
        """Return the costs of a step on the device."""

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start a scheduled step without waiting for it."""
