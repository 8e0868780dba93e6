"""A request inside the engine: its answers, how far they are computed, the blocks they hold. Free of torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from enum import Enum

from inference_worker.contract.detokenizer import Detokenizer
from inference_worker.contract.request import CacheReport, FinishReason, Request, TokenLogprobs, TokenUsage
from inference_worker.contract.validation import needs_history
from inference_worker.engine.structured_output.grammars import Grammar


class SequenceStatus(Enum):
    WAITING = "waiting"  # also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Timeline:
    """How one answer's tokens came; kept by the engine's metrics."""

    last_token_at: float | None = None  # the engine's clock
    gaps: int = 0  # between one token and the next
    gap_sum: float = 0.0  # seconds
    longest_gap: float = 0.0
    steps: int = 0  # that it was part of


class RequestGroup:
    """What the `n` answers to one prompt share: the prompt is computed and billed once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        self.prompt_usage: TokenUsage | None = None  # fixed when first scheduled
        self.cache_report = CacheReport()
        self.pins: dict[bytes, int] = {}  # hashes it pinned, or read by a pin that others know of -> seconds
        self.scheduled_at: float | None = None  # the engine's clock at its first step
        self.arrived_at = 0.0  # the same; this and what follows is kept by the engine's metrics
        self.first_token_at: float | None = None  # of any answer
        self.reused_tokens = 0  # of the prompt, found in the cache and not computed

    def usage(self) -> TokenUsage:
        """Tokens by billing class. A request that was never scheduled used nothing."""
        if self.prompt_usage is None:
            return TokenUsage()
        return replace(self.prompt_usage, output=sum(seq.num_output_tokens for seq in self.sequences))

    @property
    def finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


class Sequence:
    """One answer's state. Its tokens are the prompt and what was generated; `num_computed_tokens` of them, from the
    start, have their keys and values in the cache. The scheduler moves that number toward `num_tokens`."""

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, group: RequestGroup | None = None, index: int = 0
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.group = RequestGroup(request) if group is None else group
        self.group.sequences.append(self)
        self.index = index  # which of the request's answers
        self.detokenizer = detokenizer
        self.grammar: Grammar | None = None  # where the answer stands in it, if it is held to one
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_in_flight = 0  # tokens that steps under way will bring
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as they were needed
        self.num_published = 0  # leading blocks whose hashes need no publishing any more
        self.awaited: bytes | None = None  # hash of the block another request is computing for both
        self.new_pins: list[bytes] = []  # pins this request made, and nobody had paid for before
        self.status = SequenceStatus.WAITING
        self.epoch = 0  # grows with every preemption, so that a step under way knows that its work is void
        self.preemptions = 0
        self.yields = 0  # of the preemptions, those for the sake of a tenant under its share
        self.number = 0  # the scheduler's: order of submission
        self.rank: int = request.service_class  # the class it counts as, bettered by age
        self.waiting_since = 0.0
        seed = request.params.seed
        self.seed = secrets.randbits(63) if seed is None else (seed + index) & (2**63 - 1)
        self.timeline = Timeline()
        self.prompt_logprobs: list[TokenLogprobs] = []  # collected until the first output takes them along
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens, those in flight counted."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def needs_history(self) -> bool:
        """Whether its next token cannot be chosen before the host knows the ones before it."""
        return self.grammar is not None or needs_history(self.params)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed: one for a request that is decoding."""
        return len(self.tokens) + self.num_in_flight - self.num_computed_tokens

    @property
    def cache_read(self) -> int | None:
        """Prompt tokens billed as read from the cache; None before the first step."""
        usage = self.group.prompt_usage
        return None if usage is None else usage.cache_read

    @property
    def scheduled_at(self) -> float | None:
        return self.group.scheduled_at

    def usage(self) -> TokenUsage:
        """Return the request's tokens by billing class, all its answers together."""
        return self.group.usage()

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"
