"""The state of an execution in the answer cache."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from inference_worker.contract.messages import AnswerEvent, Finished, Tokens
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.streams import STREAM_LOST

if TYPE_CHECKING:
    from millrace.gateway.dispatch.execution import Execution

MAX_EVENTS = 4096  # an answer with more events is too long to be stored


@dataclass
class SentPart:
    """The part of one output sequence that the client has received."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    logprobs: int = 0  # number of tokens whose log-probabilities were received
    has_prompt: bool = False  # what the first event tells about the prompt
    is_finished: bool = False

    def add(self, event: Tokens) -> None:
        self.token_ids += event.token_ids
        self.text += event.text
        self.reasoning += event.reasoning
        self.reasoning_tokens += event.reasoning_tokens
        self.logprobs += len(event.logprobs or ())
        self.has_prompt = True

    def trim(self, event: Tokens) -> Tokens:
        """Return the event without its part that the client has received, and forget that part.

        Raises:
            ApiError: the event differs from what the client has received.
        """
        count = min(len(self.token_ids), len(event.token_ids))
        texts = []
        same = self.token_ids[:count] == event.token_ids[:count]
        for sent, new in ((self.text, event.text), (self.reasoning, event.reasoning)):
            size = min(len(sent), len(new))
            same = same and sent[:size] == new[:size]
            texts.append((sent[size:], new[size:]))
        if not same:
            raise ApiError("stream_lost", STREAM_LOST)
        self.token_ids = self.token_ids[count:]
        (self.text, text), (self.reasoning, reasoning) = texts
        repeated = min(self.reasoning_tokens, event.reasoning_tokens)
        self.reasoning_tokens -= repeated
        logprobs = event.logprobs
        if logprobs is not None:
            skipped = min(self.logprobs, len(logprobs))
            self.logprobs -= skipped
            logprobs = logprobs[skipped:]
        event = msgspec.structs.replace(
            event,
            token_ids=event.token_ids[count:],
            text=text,
            reasoning=reasoning,
            reasoning_tokens=event.reasoning_tokens - repeated,
            logprobs=logprobs,
        )
        if self.has_prompt:
            self.has_prompt = False
            event = msgspec.structs.replace(event, prompt=None, prompt_logprobs=None)
        return event


class AnswerSource(Protocol):
    """The cache that may serve an execution."""

    async def end(self, execution: Execution) -> bool:
        """End an execution that the cache serves. Return False if the execution runs and must be cancelled."""

    async def end_flight(self, execution: Execution) -> None:
        """End the flight that the execution leads, if it does."""


@dataclass(eq=False)
class AnswerLookup:
    """The state of an execution in the answer cache."""

    cache: AnswerSource
    answer_id: str
    seconds: int  # lifetime of the answer in the cache; 0: it is not stored
    layer: str = ""  # "exact", "single_flight" or "semantic" if it is served from the cache
    similarity: float | None = None  # similarity of the question that a semantic hit is from
    source: str = ""  # ID of the request that the answer is from
    leader: str = ""  # ID of the flight that this execution leads, if any
    usage: TokenCounts | None = None  # token counts of a hit
    events: list[AnswerEvent] = field(default_factory=list)  # events of an answer that may be stored
    sent: dict[int, SentPart] = field(default_factory=dict)  # what a follower's client has received, by output sequence
    repeated: dict[int, SentPart] = field(default_factory=dict)  # the part of it that another execution still repeats
    following: asyncio.Task[None] | None = None

    def accept(self, event: AnswerEvent) -> AnswerEvent | None:
        """Record an event that the client receives. Return it without what the client has received; None if empty.

        Raises:
            ApiError: the answer differs from the part that the client has received.
        """
        if self.seconds and not self.layer and len(self.events) <= MAX_EVENTS:
            self.events.append(event)
        if isinstance(event, Finished):
            if self.following is None:
                return event
            sent = self.sent.setdefault(event.index, SentPart())
            is_repeated, sent.is_finished = sent.is_finished, True
            return None if is_repeated else event
        if not isinstance(event, Tokens):
            return event
        if event.index in self.repeated:
            event = self.repeated[event.index].trim(event)
            if not (event.token_ids or event.text or event.reasoning or event.reasoning_tokens or event.logprobs):
                return None
        if self.following is not None:
            self.sent.setdefault(event.index, SentPart()).add(event)
        return event

    def restart(self) -> None:
        """Expect the answer again from its start, computed by another execution."""
        self.repeated = {index: dataclasses.replace(sent) for index, sent in self.sent.items()}
