"""Chat messages of OpenAI's API, and their translation to the format of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint

CACHE_SECONDS = 3600  # OpenAI's "30m" is a minimum; this is the next longer class
MAX_BREAKPOINTS = 4


class CacheMark(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["explicit"] = "explicit"


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheMark | None = None


class ChatFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessageFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    content: str | list[TextPart]
    name: None = None  # templates have no field for it


class ChatSystem(ChatMessageFields, tag="system"):
    pass


class Developer(ChatMessageFields, tag="developer"):
    pass


class ChatUser(ChatMessageFields, tag="user"):
    pass


class ChatToolResult(ChatMessageFields, tag="tool"):
    tool_call_id: str


class ChatAssistant(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    # Fields that the SDK returns unchanged from a response.
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    name: None = None


Message = ChatSystem | Developer | ChatUser | ChatToolResult | ChatAssistant


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the format of chat templates.

    Raises:
        ApiError: 400 that names the message.
    """
    names: dict[str, str] = {}  # call ID -> tool name, of the calls so far
    return [_template_message(f"messages[{number}]", message, names) for number, message in enumerate(messages)]


def count_parts(messages: Sequence[Message]) -> int:
    """Return the number of content parts in all messages."""
    return sum(len(message.content) for message in messages if isinstance(message.content, list))


def explicit_breakpoints(messages: Sequence[Message]) -> list[Breakpoint]:
    """Return the breakpoints that the request marks explicitly."""
    breakpoints = []
    for number, message in enumerate(messages, 1):
        length = 0
        for part in message.content if isinstance(message.content, list) else ():
            length += len(part.text)
            if part.prompt_cache_breakpoint is not None:
                breakpoints.append(Breakpoint(CACHE_SECONDS, messages=number, characters=length))
    return breakpoints


def _template_message(path: str, message: Message, names: dict[str, str]) -> dict[str, Any]:
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    if isinstance(message, ChatAssistant):
        return {"role": "assistant", "content": text, **_calls(path, message, names)}
    if isinstance(message, ChatToolResult):
        if message.tool_call_id not in names:
            raise invalid(f"{path}.tool_call_id", "A tool message must refer to a tool call of an earlier message.")
        name = names[message.tool_call_id]
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, "name": name}
    # `developer` is OpenAI's newer name of the role `system`.
    return {"role": "user" if isinstance(message, ChatUser) else "system", "content": text}


def _calls(path: str, message: ChatAssistant, names: dict[str, str]) -> dict[str, Any]:
    if message.annotations:
        raise ApiError("unsupported_parameter", "Annotations are not supported.", f"{path}.annotations")
    if not message.tool_calls:
        if message.content is None:
            raise invalid(f"{path}.content", "An assistant message must have content or tool calls.")
        return {}
    calls = []
    for number, call in enumerate(message.tool_calls):
        names[call.id] = call.function.name
        arguments = call_arguments(f"{path}.tool_calls[{number}].function.arguments", call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {"tool_calls": calls}


def call_arguments(path: str, text: str) -> dict[str, Any]:
    """Return a call's arguments. `path` is their path in the body.

    Raises:
        ApiError: 400, they are not a JSON object.
    """
    try:
        return dict(msgspec.json.decode(text or "{}", type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise invalid(path, "A call's arguments must be a JSON object, as a string.") from None
