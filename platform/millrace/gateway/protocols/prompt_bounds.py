"""Bounds of a request's body and of its prompt, which are checked before the prompt is decoded and tokenized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest

SMALL_BODY_BYTES = 4 * 2**10  # a body up to this size is decoded on the event loop
SMALL_PROMPT_COST = 6_000  # a prompt up to this cost, in bytes, is tokenized on the event loop
MESSAGE_COST = 32  # the bytes whose tokenization takes as long as the template's rendering of one message
FORM_BODY_BYTES = 32 * 2**10  # of endpoints that take no prompt
MAX_TOOLS_BYTES = 256 * 2**10  # of a request's tools, as JSON
ALLOWANCE_BYTES = 512 * 2**10  # for tools, schemas and parameters, beside the prompt
ESCAPE_BYTES = 6  # JSON can write one byte as \u00xx
MIN_TOKEN_BYTES = 64  # tokenizers that drop or merge characters make fewer tokens than their vocabulary suggests


def max_characters(model: ServedModel, context_length: int | None = None) -> int:
    """Return the number of characters above which no prompt fits the context, which is the model's own by default."""
    context = model.context_length if context_length is None else context_length
    return context * max(model.tokenizer.longest_token_bytes, MIN_TOKEN_BYTES)


def max_body_bytes(models: Iterable[ServedModel], prompts: int, cap: int) -> int:
    """Return the largest body of a request for one of the models.

    Args:
        models: the models that the caller may use.
        prompts: the number of prompts in one request.
        cap: the largest body of any request.
    """
    longest = max((max_characters(model) for model in models), default=0)
    return min(cap, ALLOWANCE_BYTES + ESCAPE_BYTES * longest * prompts)


def prompt_cost(request: InferenceRequest, body_bytes: int) -> int:
    """Return what rendering and tokenizing the request's prompts costs at most, in bytes."""
    cost = body_bytes + MESSAGE_COST * message_count(request)
    return cost * (1 + len(request.breakpoints))  # the prompt is rendered again for each breakpoint


def message_count(request: InferenceRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else 0


def characters(request: InferenceRequest) -> int:
    """Return the number of characters, or of token ids, in all of the request's prompts."""
    prompt: Any = request.prompt
    if message_count(request):
        return sum(len(message["content"]) for message in prompt)
    return sum(map(len, (request.prompt, *request.more_prompts, *request.inputs)))


def check_bounds(request: InferenceRequest, context_length: int, max_chars: int) -> None:
    """Check the prompt's messages, content parts, tools and characters, before anything is rendered.

    Raises:
        ApiError: 400, the prompt cannot fit the context, or the tools are too large.
    """
    counts = {"messages": message_count(request), "content parts": request.parts}
    for name, count in counts.items():
        if count > context_length:  # the template writes at least one token for each
            raise too_long(context_length, f"your prompt has {count} {name}", request.prompt_param)
    if len(request.tools) and len(msgspec.json.encode(request.tools)) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"Tools may have {MAX_TOOLS_BYTES} bytes in all, as JSON.")
    prompts = [request.prompt] if isinstance(request.prompt, str) else []
    texts = [*prompts, *(each for each in request.more_prompts if isinstance(each, str))]
    longest = characters(request) if message_count(request) else max(map(len, texts), default=0)
    if longest > max_chars:
        raise too_long(context_length, f"your prompt has {longest} characters", request.prompt_param)


def too_long(context_length: int, found: str, param: str) -> ApiError:
    """Return the error of a prompt that does not fit, whatever the length of its answer."""
    message = f"This model's maximum context length is {context_length} tokens. However, {found}. Shorten the prompt."
    return ApiError("context_length_exceeded", message, param)
