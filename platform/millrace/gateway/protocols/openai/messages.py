"""Chat messages of OpenAI's API, and their translation to the format of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint

CACHE_SECONDS = 3600  # OpenAI's "30m" is a minimum; this is the next longer class
MAX_BREAKPOINTS = 4


class CacheMark(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["explicit"] = "explicit"


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    text: str
    prompt_cache_breakpoint: CacheMark | None = None


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


# Parts that no served model takes. They are read, so that the refusal names what is wrong.
class ImagePart(msgspec.Struct, tag="image_url"):
    image_url: Any = None


class AudioPart(msgspec.Struct, tag="input_audio"):
    input_audio: Any = None


class VideoPart(msgspec.Struct, tag="video_url"):
    video_url: Any = None


class FilePart(msgspec.Struct, tag="file"):
    file: Any = None


Part = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart
MEDIA: Mapping[type[Any], str] = {ImagePart: "images", AudioPart: "audio", VideoPart: "videos", FilePart: "files"}


class ChatFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str
    provider_specific_fields: Any = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: ChatFunctionCall
    type: Literal["function"] = "function"
    # Fields that clients return unchanged from a response or a stream.
    index: int | None = None
    provider_specific_fields: Any = None


class ChatMessageFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    content: str | list[Part]
    name: str | None = None  # name of the participant


class ChatSystem(ChatMessageFields, tag="system"):
    pass


class Developer(ChatMessageFields, tag="developer"):
    pass


class ChatUser(ChatMessageFields, tag="user"):
    pass


class ChatToolResult(ChatMessageFields, tag="tool"):
    tool_call_id: str


class ChatAssistant(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    # Fields that clients return unchanged from a response.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    provider_specific_fields: Any = None


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
            if isinstance(part, TextPart):
                length += len(part.text)
                if part.prompt_cache_breakpoint is not None:
                    breakpoints.append(Breakpoint(CACHE_SECONDS, messages=number, characters=length))
    return breakpoints


def media_error(kind: str, path: str) -> ApiError:
    """Return the error of a content part, at `path`, that the model cannot take."""
    return ApiError("unsupported_parameter", f"This model takes no {kind}. Send text only.", f"{path}.type")


def _text(path: str, content: str | list[Part] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, ImagePart):
            continue
        if not isinstance(part, TextPart | RefusalPart):
            raise media_error(MEDIA[type(part)], f"{path}.content[{number}]")
        texts.append(part.text)
    return "".join(texts)


def _parts(path: str, content: str | list[Part] | None) -> dict[str, Any]:
    """Return the field `parts` of a message with images.

    Raises:
        ApiError: 400, an image has no URL.
    """
    if not isinstance(content, list) or not any(isinstance(part, ImagePart) for part in content):
        return {}
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        part_path = f"{path}.content[{number}]"
        if isinstance(part, ImagePart):
            image = part.image_url
            fields = image if isinstance(image, dict) else {"url": image}
            parts.append(image_part(fields.get("url"), part_path, fields.get("detail")))
        elif isinstance(part, TextPart | RefusalPart):
            parts.append({"type": "text", "text": part.text})
    return {"parts": parts}


def image_part(url: Any, path: str, detail: Any = None) -> dict[str, Any]:
    """Return an image of a message in the internal form.

    Raises:
        ApiError: 400, it has no URL.
    """
    if not isinstance(url, str) or not url:
        raise invalid(path, "The image needs a URL.")
    image = {"type": "image", "url": url, "path": path}
    return {**image, "detail": detail} if detail in ("low", "high", "auto") else image


def _template_message(path: str, message: Message, names: dict[str, str]) -> dict[str, Any]:
    return {**_text_message(path, message, names), **_parts(path, message.content)}


def _text_message(path: str, message: Message, names: dict[str, str]) -> dict[str, Any]:
    text = _text(path, message.content)
    if isinstance(message, ChatToolResult):
        if message.tool_call_id not in names:
            raise invalid(f"{path}.tool_call_id", "A tool message must refer to a tool call of an earlier message.")
        name = message.name or names[message.tool_call_id]
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, "name": name}
    named = {"name": message.name} if message.name else {}
    if isinstance(message, ChatAssistant):
        text = message.refusal or "" if message.content is None else text
        return {"role": "assistant", "content": text, **named, **_reasoning(message), **_calls(path, message, names)}
    # `developer` is OpenAI's newer name of the role `system`.
    return {"role": "user" if isinstance(message, ChatUser) else "system", "content": text, **named}


def _reasoning(message: ChatAssistant) -> dict[str, str]:
    """Return the reasoning of an earlier answer, which some templates render."""
    reasoning = message.reasoning_content or message.reasoning
    return {"reasoning_content": reasoning} if reasoning and isinstance(reasoning, str) else {}


def _calls(path: str, message: ChatAssistant, names: dict[str, str]) -> dict[str, Any]:
    if not message.tool_calls:
        if message.content is None and message.refusal is None:
            raise invalid(f"{path}.content", "An assistant message must have content or tool calls.")
        return {}
    calls = []
    for call in message.tool_calls:
        names[call.id] = call.function.name
        function = {"name": call.function.name, "arguments": call_arguments(call.function.arguments)}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {"tool_calls": calls}


def call_arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments, or their text if it is no JSON object: `max_tokens` can truncate a call."""
    try:
        return dict(msgspec.json.decode(text or "{}", type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
