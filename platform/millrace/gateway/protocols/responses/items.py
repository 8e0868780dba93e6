"""Input items of the Responses API, and their translation to the format of chat templates."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.protocols.openai.messages import call_arguments
from millrace.gateway.protocols.openai.parameters import converted

_STATUS = Literal["in_progress", "completed", "incomplete"]
_ROLES = {"developer": "system"}  # `developer` is OpenAI's newer name of `system`


class InputText(msgspec.Struct, forbid_unknown_fields=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, forbid_unknown_fields=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class ResponseMessage(msgspec.Struct, forbid_unknown_fields=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    # Fields that the SDK returns unchanged from a response.
    id: str | None = None
    status: _STATUS | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _STATUS | None = None


class FunctionCallOutput(msgspec.Struct, forbid_unknown_fields=True, tag="function_call_output"):
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: _STATUS | None = None


Item = ResponseMessage | FunctionCall | FunctionCallOutput
ITEM_SCHEMA = {
    "anyOf": [
        {"$ref": f"#/components/schemas/{item.__name__}"}
        for item in (ResponseMessage, FunctionCall, FunctionCallOutput)
    ]
}


def template_messages(instructions: str | None, value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the format of chat templates.

    Raises:
        ApiError: 400 that names the item.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not value:
        raise invalid("input", "input must have at least one item.")
    names: dict[str, str] = {}  # call ID -> tool name, of the calls so far
    for number, raw in enumerate(value):
        path = f"input[{number}]"
        present = {name: field for name, field in raw.items() if field is not None}
        item: Item = converted({"type": "message", **present}, Item, path)  # type: ignore[arg-type]
        _add(messages, path, item, names)
    return messages


def count_parts(value: str | list[dict[str, Any]]) -> int:
    """Return the number of content parts in all items."""
    contents = (item.get("content") or item.get("output") for item in value if isinstance(item, dict))
    return sum(len(content) for content in contents if isinstance(content, list))


def _add(messages: list[dict[str, Any]], path: str, item: Item, names: dict[str, str]) -> None:
    if isinstance(item, ResponseMessage):
        messages.append({"role": _ROLES.get(item.role, item.role), "content": _text(f"{path}.content", item.content)})
    elif isinstance(item, FunctionCall):
        names[item.call_id] = item.name
        function = {"name": item.name, "arguments": call_arguments(f"{path}.arguments", item.arguments)}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    else:
        if item.call_id not in names:
            raise invalid(f"{path}.call_id", "A function call output must refer to an earlier function call.")
        output, name = _text(f"{path}.output", item.output), names[item.call_id]
        messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id, "name": name})


def _text(path: str, content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if isinstance(part, OutputText) and part.annotations:
            raise ApiError("unsupported_parameter", "Annotations are not supported.", f"{path}[{number}].annotations")
    return "".join(part.text for part in content)
