"""Input items of the Responses API, and their translation to the format of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.protocols.foreign_tools import adapt_items
from millrace.gateway.protocols.openai.messages import call_arguments, image_part, media_error
from millrace.gateway.protocols.openai.parameters import converted_leniently
from millrace.gateway.protocols.unknown_fields import IgnoredFields

_STATUS = Literal["in_progress", "completed", "incomplete"]
_ROLES = {"developer": "system"}  # `developer` is OpenAI's newer name of `system`


class InputText(msgspec.Struct, forbid_unknown_fields=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, forbid_unknown_fields=True, tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(msgspec.Struct, forbid_unknown_fields=True, tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


# Parts that no served model takes. They are read, so that the refusal names what is wrong.
class InputImage(msgspec.Struct, tag="input_image"):
    image_url: Any = None
    detail: Any = None


class InputFile(msgspec.Struct, tag="input_file"):
    file_id: Any = None


class InputAudio(msgspec.Struct, tag="input_audio"):
    input_audio: Any = None


Part = InputText | OutputText | Refusal | InputImage | InputFile | InputAudio
MEDIA: Mapping[type[Any], str] = {InputImage: "images", InputFile: "files", InputAudio: "audio"}


class ResponseMessage(msgspec.Struct, forbid_unknown_fields=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    # Fields that the SDK returns unchanged from a response.
    id: str | None = None
    status: _STATUS | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _STATUS | None = None
    namespace: str | None = None
    caller: Any = None


class FunctionCallOutput(msgspec.Struct, forbid_unknown_fields=True, tag="function_call_output"):
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: _STATUS | None = None
    caller: Any = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, tag="reasoning"):
    """The reasoning before an earlier answer, which some templates render."""

    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: _STATUS | None = None


Item = ResponseMessage | FunctionCall | FunctionCallOutput | Reasoning
ITEM_SCHEMA = {
    "anyOf": [
        {"$ref": f"#/components/schemas/{item.__name__}"}
        for item in (ResponseMessage, FunctionCall, FunctionCallOutput, Reasoning)
    ]
}


def template_messages(
    instructions: str | None, value: str | list[dict[str, Any]], ignored: IgnoredFields
) -> list[dict[str, Any]]:
    """Return the messages in the format of chat templates. Unknown fields are added to `ignored`.

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
    present = [
        {"type": "message", **{name: field for name, field in raw.items() if field is not None}} for raw in value
    ]
    for number, fields in enumerate(present):
        if fields["type"] == "item_reference":
            message = "Responses are not stored. Send complete items. Clients do so with their option store: false."
            raise ApiError("unsupported_parameter", message, f"input[{number}].type")
    items = converted_leniently(present, list[Item], "input", ignored, adapt_items)
    names: dict[str, str] = {}  # call ID -> tool name, of the calls so far
    for number, item in enumerate(items):
        _add(messages, f"input[{number}]", item, names)
    return [message for message in messages if not _is_only_reasoning([message])]


def count_parts(value: str | list[dict[str, Any]]) -> int:
    """Return the number of content parts in all items."""
    contents = (item.get("content") or item.get("output") for item in value if isinstance(item, dict))
    return sum(len(content) for content in contents if isinstance(content, list))


def _add(messages: list[dict[str, Any]], path: str, item: Item, names: dict[str, str]) -> None:
    if isinstance(item, Reasoning):
        _add_reasoning(messages, item)
    elif isinstance(item, ResponseMessage) and item.role == "assistant" and _is_only_reasoning(messages):
        messages[-1]["content"] = _text(f"{path}.content", item.content)
    elif isinstance(item, ResponseMessage):
        text, parts = _text(f"{path}.content", item.content), _parts(f"{path}.content", item.content)
        messages.append({"role": _ROLES.get(item.role, item.role), "content": text, **parts})
    elif isinstance(item, FunctionCall):
        names[item.call_id] = item.name
        function = {"name": item.name, "arguments": call_arguments(item.arguments)}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, FunctionCallOutput):
        if item.call_id not in names:
            raise invalid(f"{path}.call_id", "A function call output must refer to an earlier function call.")
        output, name = _text(f"{path}.output", item.output), names[item.call_id]
        parts = _parts(f"{path}.output", item.output)
        messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id, "name": name, **parts})


def _add_reasoning(messages: list[dict[str, Any]], item: Reasoning) -> None:
    """Begin the assistant's message that follows with its reasoning, if the item has its text."""
    parts = [part for part in item.content or () if isinstance(part, dict)]
    text = "".join(text for part in parts if isinstance(text := part.get("text"), str))
    if text:
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _is_only_reasoning(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is the reasoning of an answer that follows."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def _text(path: str, content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if type(part) in MEDIA and not isinstance(part, InputImage):
            raise media_error(MEDIA[type(part)], f"{path}[{number}]")
    return "".join(part.text for part in content if not isinstance(part, InputImage))


def _parts(path: str, content: str | list[Any]) -> dict[str, Any]:
    """Return the field `parts` of a message with images."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return {}
    parts = [
        image_part(part.image_url, f"{path}[{number}]", part.detail)
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for number, part in enumerate(content)
    ]
    return {"parts": parts}
