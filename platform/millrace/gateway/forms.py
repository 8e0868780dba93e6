"""The one internal form of a request and of its answer. Each public dialect translates into and out of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from inference_worker.engine.request import SamplingParams, TokenUsage
from inference_worker.protocol import End, Tokens


@dataclass(frozen=True)
class InferenceRequest:
    """What a caller wants, whatever API it was asked through."""

    model: str
    prompt: list[dict[str, Any]] | str | list[int]  # chat messages, text or token ids
    sampling: SamplingParams  # its max_tokens is not used: the admission decides
    max_tokens: int | None = None  # None: the caller did not say
    tools: bool = False  # it brings tools
    schema: bool = False  # its answer must follow a schema
    cache_key: str | None = None  # divides the tenant's own prompt cache further
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class Form(msgspec.Struct, frozen=True):
    """What it takes to write an answer's stream: kept with the claim, so that any gateway can go on with it."""

    dialect: str
    request_id: str
    model: str
    created: int  # Unix seconds
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False


encode_form = msgspec.msgpack.Encoder().encode
decode_form = msgspec.msgpack.Decoder(Form).decode


class Writer(Protocol):
    """Turns a leg's events into one dialect. The same events give the same output, so a stream can be resumed by
    writing it again from the start and leaving out what the client has had."""

    def stream(self, event: Tokens | End) -> list[bytes]:
        """The server-sent events' data for this event, in order; maybe none."""

    def whole(self, text: str, end: End) -> dict[str, Any]:
        """The complete answer, for a caller who did not ask for a stream."""


def usage_so_far(form: Form, cached_tokens: int, output_tokens: int) -> TokenUsage:
    """The usage of an answer under way."""
    return TokenUsage(form.prompt_tokens - cached_tokens, cached_tokens, output=output_tokens)
