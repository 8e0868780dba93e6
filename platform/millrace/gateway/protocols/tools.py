"""Tool calls in a model's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the format of Hermes and Qwen.

They are parsed as the text arrives, so that arguments can be streamed. Text that is not a valid call stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from inference_worker.contract.request import StructuredSpec
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, Tool
from millrace.gateway.protocols.unknown_fields import IgnoredFields

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CHOICES = ("auto", "any", "none", "required")  # values of tool_choice, which tools may not be named
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class AnswerText:
    """A part of the completion's text outside tool calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    number: int  # of the call in this completion, from 0
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments. The complete arguments are a JSON object."""

    number: int
    text: str


Piece = AnswerText | CallStart | CallArguments


def call_id(request_id: str, index: int, number: int, prefix: str = "call_") -> str:
    """Return a call's ID, which is the same whenever its stream is written."""
    return prefix + hashlib.sha256(f"{request_id}/{index}/{number}".encode()).hexdigest()[:24]


class ToolCallParser:
    """Splits one completion's text into text and calls of the tools `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pending = ""  # not parsed yet
        self._state = self._in_text
        self._depth = 0  # nesting depth of the arguments' braces
        self._in_string = self._escaped = False
        self.calls = 0  # number of calls so far

    def push(self, text: str) -> list[Piece]:
        """Parse the next part of the text and return the new pieces."""
        self._pending += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """Return the remaining pieces at the end of the completion."""
        pieces = self.push("")
        if self._state == self._in_head:
            # A call that ends before its function's name is known is omitted. Other text after the tag is text.
            if (head := self._pending.strip(_SPACE)) and not head.startswith("{"):
                pieces.append(AnswerText(OPEN + self._pending))
        elif self._state == self._in_text and self._pending and not (self.calls and self._pending.isspace()):
            pieces.append(AnswerText(self._pending))
        self._pending = ""
        return pieces

    # Each state consumes what it can of the pending text and returns whether another state can continue.

    def _in_text(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._pending.partition(OPEN)
        if tag:
            if before := before.rstrip(_SPACE):
                pieces.append(AnswerText(before))
            self._pending, self._state = after, self._in_head
            return True
        text = _without_beginning_of(OPEN, self._pending).rstrip(_SPACE)  # whitespace before a call is dropped
        if text:
            pieces.append(AnswerText(text))
            self._pending = self._pending[len(text) :]
        return False

    def _in_head(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._pending)
        if head is not None and (name := _string(head.group(1))) in self._names:
            pieces.append(CallStart(self.calls, name))
            self._pending, self._state = self._pending[head.end() :], self._in_arguments
            self.calls += 1
            return True
        body, tag, after = self._pending.partition(CLOSE)
        if not tag:
            return False
        call = _whole_call(body)
        if call is not None and call[0] in self._names:
            pieces += [CallStart(self.calls, call[0]), CallArguments(self.calls, call[1])]
            self.calls += 1
        else:
            pieces.append(AnswerText(OPEN + body + CLOSE))
        self._pending, self._state = after, self._in_text
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        end = next((index for index, char in enumerate(self._pending, 1) if self._closes(char)), None)
        if text := self._pending[:end]:
            pieces.append(CallArguments(self.calls - 1, text))
        self._pending = "" if end is None else self._pending[end:]
        if end is None:
            return False
        self._state = self._after_arguments
        return True

    def _closes(self, char: str) -> bool:
        """Read one character of the arguments. Return whether the arguments' object ends with it."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = char == "\\", char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{}":
            self._depth += 1 if char == "{" else -1
            return self._depth == 0
        return False

    def _after_arguments(self, pieces: list[Piece]) -> bool:
        _, tag, after = self._pending.partition(CLOSE)
        if tag:
            self._pending, self._state = after, self._in_text
        return bool(tag)


class PlainTextParser:
    """A parser for completions without tools: everything is text."""

    calls = 0

    def push(self, text: str) -> list[Piece]:
        return [AnswerText(text)] if text else []

    def close(self) -> list[Piece]:
        return []


def answer_parser(names: Collection[str]) -> ToolCallParser | PlainTextParser:
    """Return a parser for a completion in which these tools may be called."""
    return ToolCallParser(names) if names else PlainTextParser()


def check_tools(tools: Sequence[Tool], name_path: str, max_name_length: int) -> None:
    """Check the number of the tools and their names.

    Raises:
        ApiError: 400 that names the parameter. `name_path` is the path of the name of tool number {}.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"At most {MAX_TOOLS} tools are allowed, not {len(tools)}.")
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name) or len(tool.name) > max_name_length or tool.name in _CHOICES:
            reserved = ", ".join(_CHOICES)
            message = (
                f"A tool's name must have 1 to {max_name_length} letters, digits, _ or -, and not be one of {reserved}."
            )
            raise invalid(name_path.format(number), message)
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "Two tools have the same name. Names must be unique.")


def require_tool(name: object, tools: Sequence[Tool]) -> str:
    """Return the name of a tool that `tool_choice` refers to.

    Raises:
        ApiError: 400, the request has no such tool.
    """
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise invalid("tool_choice", f"There is no tool {str(name)[:64]!r}.")
    return name


def allowed_names(names: Iterable[object], tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return the names of the allowed tools, of which there must be at least one.

    Raises:
        ApiError: 400, the request has no such tool, or none is allowed.
    """
    allowed = tuple(require_tool(name, tools) for name in names)
    if not allowed:
        raise invalid("tool_choice", "allowed_tools must name at least one function of tools.")
    return allowed


def remove_hosted_tools(fields: dict[str, Any], hosted: re.Pattern[str], ignored: IgnoredFields) -> None:
    """Remove the tools that another platform would run from a decoded body, and name their types.

    They are not offered to the model. A `tool_choice` that names one is refused later.
    """
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return
    remaining = []
    for tool in tools:
        type_ = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(type_, str) and hosted.fullmatch(type_):
            ignored.add_known(f"tools[].{type_}")
        else:
            remaining.append(tool)
    fields["tools"] = remaining


def spec(request: InferenceRequest) -> StructuredSpec | None:
    """Return the structure that constrains the request's tool calls, and the text outside them."""
    if not request.tools or request.tool_choice == "none":
        return None
    callable_tools = [
        tool for tool in request.tools if request.allowed_tools is None or tool.name in request.allowed_tools
    ]
    content: dict[str, Any] = {
        "tools": [{"name": tool.name, "parameters": tool.parameters, "strict": tool.strict} for tool in callable_tools],
        "choice": request.tool_choice,
        "parallel": request.parallel_tools
        and request.tool_choice in ("auto", "required"),  # a named tool is called once
    }
    answer_spec = request.structured
    if answer_spec is not None:
        content["answer"] = (
            json.loads(answer_spec.text) if answer_spec.constraint_type == "json_schema" else {"type": "object"}
        )
    return StructuredSpec("tools", msgspec.json.encode(content).decode(), "tools")


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in the format of chat templates."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
    return {"type": "function", "function": function}


_INSTRUCTIONS = """You can call functions. Their signatures stand within <tools></tools>:
<tools>
{}
</tools>

To call a function, answer with its name and its arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def render_tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template without tool support.

    The tools are described in the system message, and calls and results are text.
    """
    plain = [_plain(message) for message in messages]
    if tools:
        instructions = _INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            # Tools come first, as in templates that support them.
            plain[0] = {"role": "system", "content": f"{instructions}\n\n{plain[0]['content']}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}


def _without_beginning_of(tag: str, text: str) -> str:
    """Return the text without a suffix that may be the beginning of the tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call whose keys are in another order."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
