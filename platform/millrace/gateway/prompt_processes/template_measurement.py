"""The measurement of a chat template: whether it is so cheap that the event loop may render small prompts.

A prompt process measures each template once, when its model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from inference_worker.checkpoints.chat_template import ChatTemplateError, ChatTemplateWorkError
from inference_worker.checkpoints.template_work import WorkBudget
from inference_worker.checkpoints.tokenizer import Tokenizer
from millrace.gateway.protocols.prompts import LOOP_UNITS

MAX_SECONDS = 0.01  # CPU seconds
REPETITIONS = 3  # the fastest counts

_CALL = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"text": "é<&>", "n": 3}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a text in the documents.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The text."}, "n": {"type": "integer"}},
            "required": ["text"],
        },
    },
}
_SYSTEM = [{"role": "system", "content": "Be brief."}]
_USER = [{"role": "user", "content": "When do you open?"}]
_TURN = [*_USER, {"role": "assistant", "content": "At nine.", "reasoning_content": "Hm."}]
_TOOL_TURN: list[dict[str, Any]] = [
    *_USER,
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "content": "9:00", "tool_call_id": "call00000", "name": "find"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nAt nine."},
]


def is_template_cheap(tokenizer: Tokenizer) -> bool:
    """Return whether small conversations of each kind are rendered within the budget and the time of the event loop.

    A conversation that the template rejects costs nothing.
    """
    return all(_is_cheap(tokenizer, *conversation) for conversation in _conversations())


def _conversations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any]]]:
    """Yield messages, tools and variables."""
    for variables in ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}):
        yield _USER, None, variables
        yield [*_SYSTEM, *_TURN * 3, *_USER], None, variables
        yield [*_SYSTEM, *_TOOL_TURN * 2, *_USER], [_TOOL, _TOOL], variables
        yield [*_SYSTEM, *_USER], [_TOOL], variables
    yield [{"role": "user", "content": "Some words, and more.\n" * 150}], None, {}
    yield (
        [*_SYSTEM, {"role": "query", "content": "Words"}, {"role": "document", "content": "Some words. " * 99}],
        None,
        {},
    )


def _is_cheap(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> bool:
    seconds = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        try:
            tokenizer.render_chat(messages, tools, True, variables, WorkBudget(LOOP_UNITS))
        except ChatTemplateWorkError:
            return False
        except ChatTemplateError:
            pass
        seconds.append(time.thread_time() - start)
    return min(seconds) <= MAX_SECONDS
