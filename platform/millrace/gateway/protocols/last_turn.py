"""The last turn of a conversation, in which similar requests may differ."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import msgspec

from millrace.gateway.core.types import InferenceRequest, LastTurn

_encode = msgspec.msgpack.Encoder().encode


def find_last_turn(request: InferenceRequest) -> LastTurn | None:
    """Return the last turn of the request's conversation; None if the user did not write it, as a text."""
    if request.analysis.last_turn is not None or request.prompt_param != "messages" or request.more_prompts:
        return request.analysis.last_turn
    *earlier, last = cast("list[dict[str, Any]]", request.prompt)
    text = last.get("content")
    if last.get("role") != "user" or "parts" in last or not isinstance(text, str) or not text.strip():
        return None
    fields = {name: value for name, value in last.items() if name != "content"}
    tools = (request.tools, request.tool_choice, request.allowed_tools, request.parallel_tools)
    try:
        context = _encode((earlier, fields, tools, request.template, request.reasoning))
    except OverflowError:  # an integer of more than 64 bits
        return None
    return LastTurn(text, hashlib.sha256(context).digest())
