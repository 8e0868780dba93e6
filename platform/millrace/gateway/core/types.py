"""The one internal form of a request and of its answer. Each public dialect translates into and out of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from inference_worker.contract.messages import AnswerEvent
from inference_worker.contract.request import CacheBreakpoint, SamplingParams, ServiceClass, StructuredSpec, TokenUsage

if TYPE_CHECKING:
    from millrace.gateway.core.catalog import ServedModel


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # a JSON schema; empty: any object
    strict: bool = False


@dataclass(frozen=True)
class Breakpoint:
    """The prompt up to here is to stay cached for `seconds` after its last use.

    "Here" is after the first `tools` tools, if that is set, and else after all tools and the first `messages`
    messages, of the last of which only `characters` of its content count, if that is set.
    """

    seconds: int  # 300 or 3600
    tools: int | None = None
    messages: int = 0
    characters: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A request's prompt in a model's tokens."""

    ids: list[int]
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    input_lengths: tuple[int, ...] = ()  # of what is to be embedded, the inputs' parts of the ids


class TokenizedPrompts(Protocol):
    """The prompts of a request that was decoded and tokenized by a prompt process."""

    async def prompt(self, model: ServedModel, number: int) -> Prompt:
        """Return the prompt of this number in the model's tokens.

        Raises:
            ApiError: 400, it is no prompt for this model; 503, it cannot be tokenized now.
        """


@dataclass(frozen=True)
class InferenceRequest:
    """What a caller wants, whatever API it was asked through."""

    model: str
    # Chat messages, text or token ids. A message has `role` and `content` (a string), an assistant's maybe
    # `tool_calls` ({"id", "type": "function", "function": {"name", "arguments": dict}}), a tool's its `tool_call_id`.
    prompt: list[Any] | str
    sampling: SamplingParams  # its max_tokens is not used: the admission decides
    max_tokens: int | None = None  # None: the caller did not say
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # or "none", "required", or the name of the one to call
    parallel_tools: bool = True
    structured: StructuredSpec | None = None  # the form the answer must have, but for what its tool calls must have
    breakpoints: tuple[Breakpoint, ...] = ()  # in the order of the prompt
    service_class: ServiceClass = ServiceClass.DEFAULT
    priority: int = 0  # among the tenant's own requests of one class: lower first
    cache_key: str | None = None  # divides the tenant's own prompt cache further
    metadata: dict[str, str] = field(default_factory=dict)  # the caller's own, kept with the record of decisions
    user: str | None = None  # the caller's end user, also stored
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False  # the answer begins with the prompt
    more_prompts: tuple[str | list[int], ...] = ()  # answered after the first, as more answers of one request
    inputs: tuple[str | list[int], ...] = ()  # to be embedded, texts or token ids: then there is no prompt
    asked: dict[str, Any] = field(default_factory=dict)  # what else the dialect's answer repeats of the request
    parts: int = 0  # content parts of all messages
    # Of a request that a prompt process has read: then `prompt`, `more_prompts` and `inputs` are empty placeholders.
    tokenized: TokenizedPrompts | None = None
    number: int = 0  # of this prompt among the prompts of the caller's request

    @property
    def charged(self) -> bool:
        """Whether its tenant's request limits were charged before it was read."""
        return self.tokenized is not None and self.number == 0

    @property
    def prompt_param(self) -> str:
        """What its callers call the prompt."""
        if self.inputs:
            return "input"
        return "messages" if self.prompt and isinstance(self.prompt[0], dict) else "prompt"


class ResponseSpec(msgspec.Struct, frozen=True):
    """What it takes to write an answer's stream: kept with the claim, so that any gateway can go on with it."""

    dialect: str
    request_id: str
    model: str
    created: int  # Unix seconds
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False
    service_class: ServiceClass = ServiceClass.DEFAULT
    n: int = 1  # answers to each prompt
    prompts: int = 1
    tools: list[str] = []  # names of those that the model may call
    echo: list[list[int]] | None = None  # the prompts, if the answers begin with them
    asked: dict[str, Any] = {}

    @property
    def answers(self) -> int:
        return self.n * self.prompts


encode_response_spec = msgspec.msgpack.Encoder().encode
decode_response_spec = msgspec.msgpack.Decoder(ResponseSpec).decode


class Writer(Protocol):
    """Turns an execution's events into one dialect. The same events give the same output, so a stream can be resumed by
    writing it again from the start and leaving out what the client has had. Made of a `ResponseSpec` and its model's
    tokenizer (`writers.make_writer`), for one answer."""

    def stream(self, event: AnswerEvent) -> list[bytes]:
        """Return the server-sent events' data for this event, in order; maybe none."""

    def whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """Return the complete answer, for a caller who did not ask for a stream. The last event is the end."""


def usage_so_far(form: ResponseSpec, prompt: TokenUsage | None, output_tokens: int) -> TokenUsage:
    """Return the usage of an answer under way; `prompt` as its first event told it."""
    return dataclasses.replace(prompt or TokenUsage(uncached=form.prompt_tokens), output=output_tokens)
