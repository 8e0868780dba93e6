"""Messages and content blocks of Anthropic's API, and their translation to the format of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from inference_worker.contract.request import document
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import Breakpoint
from millrace.gateway.protocols.foreign_tools import read_text
from millrace.gateway.protocols.openai.messages import image_part, media_error

SECONDS = {"5m": 300, "1h": 3600}


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        return SECONDS[self.ttl or "5m"]


class AnthropicText(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


# Blocks that no served model takes. They are read, so that the refusal names what is wrong.
class ImageBlock(msgspec.Struct, tag="image"):
    source: Any = None


class DocumentBlock(msgspec.Struct, tag="document"):
    """A document, which is read if its source is text."""

    source: Any = None
    title: Any = None

    def texts(self) -> list[Any]:
        text = read_text(self.source) if isinstance(self.source, dict) and self.source.get("type") != "url" else ""
        return [self.title, text] if text else []


class SearchResultBlock(msgspec.Struct, tag="search_result"):
    """The result of a client's search, as text."""

    source: Any = None
    title: Any = None
    content: Any = None

    def texts(self) -> list[Any]:
        return [self.title, self.source, read_text(self.content)] if self.content else []


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, tag="redacted_thinking"):
    data: str


class ToolUse(msgspec.Struct, forbid_unknown_fields=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


Media = ImageBlock | DocumentBlock | SearchResultBlock
MEDIA: Mapping[type[Any], str] = {ImageBlock: "images", DocumentBlock: "documents", SearchResultBlock: "search results"}


class ToolResult(msgspec.Struct, forbid_unknown_fields=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[AnthropicText | Media] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicUser(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | Annotated[list[AnthropicText | ToolResult | Media], document(minItems=1)]


class AnthropicAssistant(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[AnthropicText | ToolUse | ThinkingBlock | RedactedThinkingBlock]


class AnthropicSystem(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | Annotated[list[AnthropicText], document(minItems=1)]


Message = AnthropicUser | AnthropicAssistant | AnthropicSystem


class Conversation:
    """The messages of a conversation in the template's format, with their cache breakpoints."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[Breakpoint] = []
        self.parts = 0  # number of content blocks so far
        self._names: dict[str, str] = {}  # call ID -> tool name, of the calls so far
        self._texts: list[str] = []  # texts of the last message, joined to its content when it is complete
        self._length = 0  # characters of these texts
        self._images: list[tuple[int, dict[str, Any]]] = []  # the last message's, with the number of texts before each

    def add(self, path: str, role: str, content: str | list[Any]) -> None:
        """Add one message, whose blocks may become several template messages.

        Raises:
            ApiError: 400 that names the block.
        """
        blocks = [AnthropicText(content)] if isinstance(content, str) else content
        if not blocks and role == "assistant":  # an empty answer
            self._begin({"role": role})
        elif not blocks:
            raise invalid(path, f"{path} must have at least one block.")
        self.parts += len(blocks)
        has_message = False  # whether the next block belongs to the last message
        for number, block in enumerate(blocks):
            block_path = f"{path}[{number}]"
            if isinstance(block, ToolResult):
                self._add_result(block_path, block)
                has_message = False
                continue
            if not has_message:
                self._begin({"role": role})
                has_message = True
            if isinstance(block, Media):
                self._add_media(block_path, block)
                continue
            if isinstance(block, ThinkingBlock):
                self.messages[-1]["reasoning_content"] = block.thinking
            if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
                continue
            if isinstance(block, ToolUse):
                self._add_call(block)
            else:
                self._add_text(block.text)
            self._mark(block_path, block)
        self._complete()

    def _begin(self, message: dict[str, Any]) -> None:
        self._complete()
        self.messages.append({**message, "content": ""})

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _add_media(self, path: str, block: Media) -> None:
        if isinstance(block, ImageBlock):
            self._add_image(path, block)
        elif texts := block.texts():
            self._add_text("\n".join(text for text in texts if isinstance(text, str)) + "\n")
        else:
            raise media_error(MEDIA[type(block)], path)

    def _add_image(self, path: str, block: ImageBlock) -> None:
        source = block.source if isinstance(block.source, dict) else {}
        url = source.get("url") if source.get("type") == "url" else None  # a file belongs to the provider's account
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        self._images.append((len(self._texts), image_part(url, path)))

    def _complete(self) -> None:
        if self._texts:
            self.messages[-1]["content"] = "".join(self._texts)
        if self._images:
            parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in self._texts]
            for position, image in reversed(self._images):
                parts.insert(position, image)
            self.messages[-1]["parts"] = parts
        self._texts, self._length, self._images = [], 0, []

    def _add_call(self, block: ToolUse) -> None:
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": block.id, "type": "function", "function": function})

    def _add_result(self, path: str, block: ToolResult) -> None:
        if block.tool_use_id not in self._names:
            raise invalid(f"{path}.tool_use_id", "A tool result must refer to a tool use of an earlier message.")
        parts = block.content if isinstance(block.content, list) else [AnthropicText(block.content or "")]
        prefix = "Error: " if block.is_error else ""  # templates have no field for errors
        name, id_ = self._names[block.tool_use_id], block.tool_use_id
        self._begin({"role": "tool", "tool_call_id": id_, "name": name})
        self._add_text(prefix)
        self.parts += len(parts)
        for number, part in enumerate(parts):
            if isinstance(part, Media):
                self._add_media(f"{path}.content[{number}]", part)
                continue
            self._add_text(part.text)
            self._mark(f"{path}.content[{number}]", part)
        self._mark(path, block)

    def _mark(self, path: str, block: AnthropicText | ToolUse | ToolResult) -> None:
        if block.cache_control is None:
            return
        if isinstance(block, AnthropicText) and not block.text:
            raise invalid(f"{path}.cache_control", "An empty text block cannot be cached.")
        last = self.messages[-1]
        # Calls come after the text, so with calls the breakpoint is at the end of the message.
        characters = None if "tool_calls" in last else self._length
        self.breakpoints.append(
            Breakpoint(block.cache_control.seconds, messages=len(self.messages), characters=characters)
        )
