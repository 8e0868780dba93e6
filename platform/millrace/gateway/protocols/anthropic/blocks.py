"""Messages and their blocks as Anthropic writes them, as models' templates take them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import Breakpoint

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
    citations: None = None


class ToolUse(msgspec.Struct, forbid_unknown_fields=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResult(msgspec.Struct, forbid_unknown_fields=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[AnthropicText] = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicUser(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[AnthropicText | ToolResult]


class AnthropicAssistant(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[AnthropicText | ToolUse]


class AnthropicSystem(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[AnthropicText]


Message = AnthropicUser | AnthropicAssistant | AnthropicSystem


class Conversation:
    """Collects the messages for a template, and where in them the caller wants the cache to reach."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[Breakpoint] = []
        self.parts = 0  # blocks so far
        self._names: dict[str, str] = {}  # of the calls so far, by id
        self._texts: list[str] = []  # of the last message, which become its content when it is complete
        self._length = 0  # of these

    def add(self, path: str, role: str, content: str | list[Any]) -> None:
        """One message, whose blocks may become several.

        Raises:
            ApiError: 400 that names the block.
        """
        blocks = [AnthropicText(content)] if isinstance(content, str) else content
        if not blocks:
            raise invalid(path, f"{path} must hold at least one block.")
        self.parts += len(blocks)
        begun = False  # a message of this role that the next block belongs to
        for number, block in enumerate(blocks):
            here = f"{path}[{number}]"
            if isinstance(block, ToolResult):
                self._add_result(here, block)
                begun = False
                continue
            if not begun:
                self._begin({"role": role})
                begun = True
            if isinstance(block, ToolUse):
                self._add_call(block)
            else:
                self._say(block.text)
            self._mark(here, block)
        self._complete()

    def _begin(self, message: dict[str, Any]) -> None:
        self._complete()
        self.messages.append({**message, "content": ""})

    def _say(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _complete(self) -> None:
        if self._texts:
            self.messages[-1]["content"] = "".join(self._texts)
        self._texts, self._length = [], 0

    def _add_call(self, block: ToolUse) -> None:
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": block.id, "type": "function", "function": function})

    def _add_result(self, path: str, block: ToolResult) -> None:
        if block.tool_use_id not in self._names:
            raise invalid(f"{path}.tool_use_id", "A tool's result must answer a tool use of a message before it.")
        parts = [AnthropicText(block.content)] if isinstance(block.content, str) else block.content
        said = "Error: " if block.is_error else ""  # templates have no other place for it
        name, id_ = self._names[block.tool_use_id], block.tool_use_id
        self._begin({"role": "tool", "tool_call_id": id_, "name": name})
        self._say(said)
        self.parts += len(parts)
        for number, part in enumerate(parts):
            self._say(part.text)
            self._mark(f"{path}.content[{number}]", part)
        self._mark(path, block)

    def _mark(self, path: str, block: AnthropicText | ToolUse | ToolResult) -> None:
        if block.cache_control is None:
            return
        if isinstance(block, AnthropicText) and not block.text:
            raise invalid(f"{path}.cache_control", "An empty text block cannot be cached.")
        last = self.messages[-1]
        # With calls, which come after the words, it reaches over all of the message.
        characters = None if "tool_calls" in last else self._length
        self.breakpoints.append(
            Breakpoint(block.cache_control.seconds, messages=len(self.messages), characters=characters)
        )
