"""Shortening of a conversation that has outgrown the context of its model: messages in the middle are dropped.

The system messages at the start stay, and the last messages, which begin with one of the user. So no result of a tool
is left without its call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.prompt_bounds import message_count, too_long
from millrace.gateway.protocols.prompts import tokenize_here

MAX_OVERFLOW = 8  # a longer conversation than this multiple of the context is rejected before it is tokenized


def output_room(model: ServedModel, request: InferenceRequest) -> int:
    """Return the number of tokens of the context that are left to the completion."""
    default = min(model.default_max_output, model.context_length // 4)
    return max(1, default if request.max_tokens is None else request.max_tokens)


def can_shorten(model: ServedModel, request: InferenceRequest) -> bool:
    """Return whether messages can be dropped: it is a conversation for a model whose prompts are tokenized here."""
    is_conversation = request.prompt_param == "messages" and not request.more_prompts
    return is_conversation and model.upstream is None and not request.echo


def shortened(model: ServedModel, request: InferenceRequest, max_tokens: int) -> Prompt:
    """Return the prompt without as few messages as necessary in the middle of its conversation.

    Raises:
        ApiError: 400, it is too long even without all messages that can be dropped.
    """
    if not message_count(request):
        return tokenize_here(model, request, max_tokens)
    if isinstance(request.prompt, str):
        raise TypeError("a prompt with messages is a list")
    messages: list[dict[str, Any]] = list(request.prompt)
    start = _system_messages(messages)
    cuts = [index for index in range(start + 1, len(messages)) if messages[index]["role"] == "user"]

    def prompt_from(cut: int) -> Prompt:
        kept = [*messages[:start], *messages[cut:]]
        # Positions of cache breakpoints after the gap are those of other messages.
        breakpoints = tuple(point for point in request.breakpoints if point.messages <= start)
        prompt = tokenize_here(model, dataclasses.replace(request, prompt=kept, breakpoints=breakpoints))
        return dataclasses.replace(prompt, dropped_messages=cut - start)

    found = _first_that_fits(cuts, prompt_from, max_tokens)
    if found is None:
        raise too_long(max_tokens, "even the last message of your conversation does not fit", request.prompt_param)
    return found


def _system_messages(messages: Sequence[dict[str, Any]]) -> int:
    """Return the number of system messages at the start."""
    roles = ("system", "developer")
    return next((n for n, message in enumerate(messages) if message["role"] not in roles), len(messages))


def _first_that_fits(cuts: Sequence[int], prompt_from: Callable[[int], Prompt], max_tokens: int) -> Prompt | None:
    """Return the prompt of the first cut that fits, by binary search: a later cut gives a shorter prompt."""
    low, high, found = 0, len(cuts), None
    while low < high:
        middle = (low + high) // 2
        prompt = prompt_from(cuts[middle])
        if prompt.num_tokens <= max_tokens:
            high, found = middle, prompt
        else:
            low = middle + 1
    return found
