"""Sequences: the state of a request's outputs in the engine. Does not import torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum

from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.contract.request import CacheReport, FinishReason, Request, TokenCounts, TokenLogprobs
from inference_worker.engine.reasoning import ReasoningTracker
from inference_worker.engine.structured_output.grammars import Grammar


class SequenceStatus(Enum):
    WAITING = "waiting"  # also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Timeline:
    """The times of one sequence's tokens, recorded by the engine's metrics."""

    last_token_at: float | None = None  # the engine's clock
    gaps: int = 0  # number of gaps between tokens
    gap_sum: float = 0.0  # seconds


class RequestGroup:
    """The shared state of the `n` sequences of a request: the prompt is computed and billed once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        self.prompt_usage: TokenCounts | None = None  # fixed when first scheduled
        self.cache_report = CacheReport()
        self.pins: dict[bytes, int] = {}  # hashes that were pinned, or read by a pin of another replica -> seconds
        self.scheduled_at: float | None = None  # the engine's clock at its first step
        self.arrived_at = 0.0  # the same; this and the next fields belong to the engine's metrics
        self.first_token_at: float | None = None  # the engine's clock at the first token of any sequence
        self.reused_tokens = 0  # cached prompt tokens that were not computed

    def usage(self) -> TokenCounts:
        """Return the tokens by billing class. A request that was never scheduled has no usage."""
        if self.prompt_usage is None:
            return TokenCounts()
        return self.prompt_usage + TokenCounts(output=sum(seq.num_output_tokens for seq in self.sequences))

    @property
    def finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


class Sequence:
    """The state of one sequence: the prompt's tokens and the generated ones. The keys and values of the first
    `num_computed_tokens` tokens are in the cache. The scheduler moves this number toward `num_tokens`."""

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, group: RequestGroup | None = None, index: int = 0
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.group = RequestGroup(request) if group is None else group
        self.group.sequences.append(self)
        self.index = index  # number of the sequence in its request
        self.detokenizer = detokenizer
        self.grammar: Grammar | None = None  # the grammar's state, if the output is structured
        self.reasoning: ReasoningTracker | None = (
            None  # the state of the reasoning before the answer, if there may be one
        )
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_in_flight = 0  # tokens of steps in flight
        self.num_computed_tokens = 0
        self.block_tables: list[list[int]] = []  # blocks of each group of layers; 0 in place of a released block
        self.num_released: list[int] = []  # leading blocks of each table that were released, behind a window
        self.block_hashes: list[bytes] = []  # hashes of full blocks, computed on demand
        self.num_published = 0  # number of leading blocks that are published
        self.awaited: bytes | None = None  # hash of a block that another sequence computes
        self.new_pins: list[bytes] = []  # new pins of this request
        self.status = SequenceStatus.WAITING
        self.epoch = 0  # incremented by every preemption, so that results of earlier steps are dropped
        self.preemptions = 0
        self.fairness_preemptions = 0  # preemptions for a tenant under its share
        self.number = 0  # submission order, set by the scheduler
        self.rank: int = request.service_class  # effective class, which improves with age
        self.waiting_since = 0.0
        seed = request.params.seed
        self.seed = secrets.randbits(63) if seed is None else (seed + index) & (2**63 - 1)
        self.timeline = Timeline()
        self.prompt_logprobs: list[TokenLogprobs] = []  # collected until the first output
        self.speculates = False  # whether steps may verify drafts of the sequence's next tokens
        self.accepted_drafts = self.rejected_drafts = 0  # verified draft tokens
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, including those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def needs_history(self) -> bool:
        """Return whether the next token depends on earlier tokens that must be on the host first."""
        may_force = self.reasoning is not None and self.reasoning.may_force(self.num_in_flight)
        return self.grammar is not None or may_force

    @property
    def active_grammar(self) -> Grammar | None:
        """Return the grammar if all further tokens are subject to it."""
        return self.grammar if self.reasoning is None or self.reasoning.has_ended else None

    def max_drafts(self, limit: int) -> int:
        """Return how many tokens, at most `limit`, can be drafts of the tokens after those in flight."""
        if not self.speculates:
            return 0
        limit = min(limit, self.params.max_tokens - self.num_output_tokens - self.num_in_flight)
        if self.reasoning is not None and not self.reasoning.has_ended:
            if self.grammar is not None:  # it may begin with any token
                return 0
            while limit > 0 and self.reasoning.may_force(limit):
                limit -= 1
        return max(0, limit)

    @property
    def num_missing_tokens(self) -> int:
        """Return the number of tokens that are not computed yet; 1 for a decoding sequence."""
        return len(self.tokens) + self.num_in_flight - self.num_computed_tokens

    @property
    def block_ids(self) -> list[int]:
        """Return the KV cache blocks of the sequence, of all groups of layers."""
        return [block_id for table in self.block_tables for block_id in table if block_id]

    @property
    def num_blocks(self) -> int:
        """Return the length of `block_ids`."""
        return sum(map(len, self.block_tables)) - sum(self.num_released)

    @property
    def cache_read(self) -> int | None:
        """Return the prompt tokens billed as read from the cache; None before the first step."""
        usage = self.group.prompt_usage
        return None if usage is None else usage.cache_read

    @property
    def scheduled_at(self) -> float | None:
        return self.group.scheduled_at

    def usage(self) -> TokenCounts:
        """Return the request's tokens by billing class, of all its sequences."""
        return self.group.usage()

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"
