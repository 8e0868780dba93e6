"""Limits of a request's body and prompt, which are checked before the prompt is decoded and tokenized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest

SMALL_BODY_BYTES = 4 * 2**10  # a body up to this size is decoded on the event loop
SMALL_PROMPT_COST = 6_000  # a prompt up to this cost, in bytes, is tokenized on the event loop
MESSAGE_COST = 32  # rendering one message in the template costs as much as tokenizing this many bytes
FORM_BODY_BYTES = 32 * 2**10  # bodies of endpoints without a prompt
MAX_TOOLS_BYTES = 256 * 2**10  # a request's tools, as JSON
ALLOWANCE_BYTES = 512 * 2**10  # for tools, schemas and parameters, in addition to the prompt
ESCAPE_BYTES = 6  # JSON may encode one byte as \u00xx
MIN_TOKEN_BYTES = (
    64  # for tokenizers that drop or merge characters, whose tokens cover more bytes than their vocabulary shows
)


def max_characters(model: ServedModel, context_length: int | None = None) -> int:
    """Return the number of characters above which no prompt fits the context (default: the model's)."""
    context = model.context_length if context_length is None else context_length
    return context * max(model.tokenizer.longest_token_bytes, MIN_TOKEN_BYTES)


def max_body_bytes(models: Iterable[ServedModel], prompts: int, max_bytes: int) -> int:
    """Return the maximum size of a request's body for any of the models.

    Args:
        models: the models that the key may use.
        prompts: the maximum number of prompts in the request.
        max_bytes: the maximum size of any body.
    """
    longest = max((max_characters(model) for model in models), default=0)
    return min(max_bytes, ALLOWANCE_BYTES + ESCAPE_BYTES * longest * prompts)


def prompt_cost(request: InferenceRequest, body_bytes: int) -> int:
    """Return the maximum cost of rendering and tokenizing the request's prompts, in bytes."""
    cost = body_bytes + MESSAGE_COST * message_count(request)
    if len(request.encoder.queries) == 1:  # it is repeated for each input
        cost += len(request.encoder.queries[0]) * len(request.encoder.inputs)
    return cost * (1 + len(request.breakpoints))  # the prompt is rendered again for each breakpoint


def message_count(request: InferenceRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else 0


def characters(request: InferenceRequest) -> int:
    """Return the number of characters, or of token IDs, in all of the request's prompts."""
    prompt: Any = request.prompt
    if message_count(request):
        return sum(len(message["content"]) for message in prompt)
    return sum(map(len, (request.prompt, *request.more_prompts, *request.encoder.inputs)))


def check_bounds(request: InferenceRequest, context_length: int, max_chars: int) -> None:
    """Check the number of messages, content parts, tools and characters before the prompt is rendered.

    Raises:
        ApiError: 400, the prompt cannot fit the context, or the tools are too large.
    """
    counts = {"messages": message_count(request), "content parts": request.analysis.parts}
    for name, count in counts.items():
        if count > context_length:  # the template writes at least one token for each
            raise too_long(context_length, f"your prompt has {count} {name}", request.prompt_param)
    if len(request.tools) and len(msgspec.json.encode(request.tools)) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"Tools may have at most {MAX_TOOLS_BYTES} bytes as JSON.")
    prompts = [request.prompt] if isinstance(request.prompt, str) else []
    texts = [*prompts, *(prompt_text for prompt_text in request.more_prompts if isinstance(prompt_text, str))]
    longest = characters(request) if message_count(request) else max(map(len, texts), default=0)
    if longest > max_chars:
        raise too_long(context_length, f"your prompt has {longest} characters", request.prompt_param)


def too_long(context_length: int, excess: str, param: str) -> ApiError:
    """Return the error of a prompt that does not fit the context, whatever the output limit."""
    message = f"This model's maximum context length is {context_length} tokens. However, {excess}. Shorten the prompt."
    return ApiError("context_length_exceeded", message, param)
