"""A request inside the engine: its tokens, how far it is computed, and the blocks it holds. Free of torch."""

from __future__ import annotations

import secrets
from enum import Enum

from inference_worker.engine.detokenizer import Detokenizer
from inference_worker.engine.request import FinishReason, Request, TokenUsage


class Status(Enum):
    WAITING = "waiting"  # also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's state. Its tokens are the prompt and what was generated; `num_computed_tokens` of them, from the
    start, have their keys and values in the cache. The scheduler moves that number toward `num_tokens`."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.detokenizer = detokenizer
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as they were needed
        self.num_published = 0  # leading blocks whose hashes need no publishing any more
        self.awaited: bytes | None = None  # hash of the block another request is computing for both
        self.status = Status.WAITING
        self.epoch = 0  # grows with every preemption, so that a step under way knows that its work is void
        self.preemptions = 0
        self.seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        self.cache_read: int | None = None  # billed as read; fixed when first scheduled
        self.scheduled_at: float | None = None  # monotonic seconds of its first step
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed: one for a request that is decoding."""
        return len(self.tokens) - self.num_computed_tokens

    def usage(self) -> TokenUsage:
        """Tokens by billing class. A request that was never scheduled used nothing."""
        if self.cache_read is None:
            return TokenUsage()
        return TokenUsage(
            uncached=self.num_prompt_tokens - self.cache_read,
            cache_read=self.cache_read,
            output=self.num_output_tokens,
        )

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"
