"""Shortening of a conversation that has outgrown the context of its model: messages in the middle are dropped.

A summary of them can precede the first message that stays after the gap.

The system messages at the start stay, and the last messages, which begin with one of the user. So no result of a tool
is left without its call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from inference_worker.contract.request import SamplingParams
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.prompt_bounds import message_count, too_long
from millrace.gateway.protocols.prompts import tokenize_here

SUMMARY_TOKENS = 256  # maximum output of the model that summarizes
SUMMARY_ROOM = SUMMARY_TOKENS + 64  # tokens of the context that are left to the summary and its label
_CHARACTERS_PER_TOKEN = 4  # characters per token of a transcript, at first
_INSTRUCTION = (
    "Summarize the following part of a conversation in at most 150 words. Keep names, numbers, decisions and open"
    " questions. Write only the summary."
)
MAX_OVERFLOW = 8  # a longer conversation than this multiple of the context is rejected before it is tokenized


def output_room(model: ServedModel, request: InferenceRequest) -> int:
    """Return the number of tokens of the context that are left to the completion."""
    default = min(model.default_max_output, model.context_length // 4)
    return max(1, default if request.max_tokens is None else request.max_tokens)


def can_shorten(model: ServedModel, request: InferenceRequest) -> bool:
    """Return whether messages can be dropped: it is a conversation for a model whose prompts are tokenized here."""
    is_conversation = request.prompt_param == "messages" and not request.more_prompts
    return is_conversation and model.upstream is None and not request.echo


def shorten_prompt(model: ServedModel, request: InferenceRequest, max_tokens: int, summary: str = "") -> Prompt:
    """Return the prompt without as few messages as necessary in the middle of its conversation.

    Args:
        summary: of the dropped messages; it precedes the first message after the gap.

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
        kept = [*messages[:start], *_with_summary(messages[cut:], summary)]
        # Positions of cache breakpoints after the gap are those of other messages.
        breakpoints = tuple(point for point in request.breakpoints if point.messages <= start)
        prompt = tokenize_here(model, msgspec.structs.replace(request, prompt=kept, breakpoints=breakpoints))
        return dataclasses.replace(prompt, dropped_messages=cut - start)

    found = _first_that_fits(cuts, prompt_from, max_tokens)
    if found is None:
        raise too_long(max_tokens, "even the last message of your conversation does not fit", request.prompt_param)
    return found


def summary_request(request: InferenceRequest, text: str = "") -> InferenceRequest:
    """Return the request for the summary of a transcript."""
    return InferenceRequest(
        request.model,
        [{"role": "user", "content": f"{_INSTRUCTION}\n\n{text}"}],
        SamplingParams(temperature=0.0),
        SUMMARY_TOKENS,
        service_class=request.service_class,
        priority=request.priority,
        metadata=request.metadata,
        user=request.user,
    )


def summary_prompt(model: ServedModel, request: InferenceRequest, dropped: int) -> Prompt:
    """Return the prompt that requests the summary of the first `dropped` messages after the system messages.

    If they do not fit the context of the model that summarizes, the end of their text is used.

    Raises:
        ApiError: 400, the model cannot summarize.
    """
    messages: list[dict[str, Any]] = [message for message in request.prompt if isinstance(message, dict)]
    start = _system_messages(messages)
    text = "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages[start:][:dropped])
    room = model.context_length - SUMMARY_TOKENS
    characters = max(1, room * _CHARACTERS_PER_TOKEN)
    while True:
        prompt = tokenize_here(model, summary_request(request, text[-characters:]))
        if prompt.num_tokens <= room or characters <= max(1, room // _CHARACTERS_PER_TOKEN):
            return prompt
        characters //= 2


def _with_summary(messages: list[dict[str, Any]], summary: str) -> list[dict[str, Any]]:
    """Return messages whose first one, which is of the user, begins with the summary of earlier messages."""
    if not summary:
        return messages
    first = messages[0]
    content = f"[Summary of earlier messages: {summary}]\n\n{first['content'] or ''}"
    return [{**first, "content": content}, *messages[1:]]


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
