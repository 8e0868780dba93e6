"""Tool calls in a model's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write them.

Found in the text as it comes, so that arguments can be streamed; what looks like a call and is none stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from inference_worker.contract.request import StructuredSpec
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CHOICES = ("auto", "any", "none", "required")  # what a tool_choice may be otherwise
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class AnswerText:
    """Words of the answer outside of tool calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    number: int  # of the answer's calls, from 0 on
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are complete."""

    number: int
    text: str


Piece = AnswerText | CallStart | CallArguments


def call_id(request_id: str, index: int, number: int, prefix: str = "call_") -> str:
    """Return a call's name: the same however often its stream is written."""
    return prefix + hashlib.sha256(f"{request_id}/{index}/{number}".encode()).hexdigest()[:24]


class ToolCallParser:
    """Splits one answer's text into words and calls of the tools `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # not told yet
        self._state = self._in_text
        self._depth = 0  # of the arguments' braces
        self._in_string = self._escaped = False
        self.calls = 0  # so far

    def push(self, text: str) -> list[Piece]:
        """Return what the next text of the answer brings."""
        self._held += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """Return what is left when the answer has ended."""
        pieces = self.push("")
        if self._state == self._in_head:
            pieces.append(AnswerText(OPEN + self._held))
        elif self._state == self._in_text and self._held and not (self.calls and self._held.isspace()):
            pieces.append(AnswerText(self._held))
        self._held = ""
        return pieces

    # Each state takes what it can of the held text; whether another state may go on with the rest.

    def _in_text(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            if before := before.rstrip(_SPACE):
                pieces.append(AnswerText(before))
            self._held, self._state = after, self._in_head
            return True
        told = _without_beginning_of(OPEN, self._held).rstrip(_SPACE)  # blanks before a call are no words
        if told:
            pieces.append(AnswerText(told))
            self._held = self._held[len(told) :]
        return False

    def _in_head(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None and (name := _string(head.group(1))) in self._names:
            pieces.append(CallStart(self.calls, name))
            self._held, self._state = self._held[head.end() :], self._in_arguments
            self.calls += 1
            return True
        body, tag, after = self._held.partition(CLOSE)
        if not tag:
            return False
        call = _whole_call(body)
        if call is not None and call[0] in self._names:
            pieces += [CallStart(self.calls, call[0]), CallArguments(self.calls, call[1])]
            self.calls += 1
        else:
            pieces.append(AnswerText(OPEN + body + CLOSE))
        self._held, self._state = after, self._in_text
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        end = next((at for at, char in enumerate(self._held, 1) if self._closes(char)), None)
        if text := self._held[:end]:
            pieces.append(CallArguments(self.calls - 1, text))
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._state = self._after_arguments
        return True

    def _closes(self, char: str) -> bool:
        """Read one character of the arguments; whether their object ends with it."""
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
        _, tag, after = self._held.partition(CLOSE)
        if tag:
            self._held, self._state = after, self._in_text
        return bool(tag)


class PlainTextParser:
    """In a `ToolCallParser`'s place, where there are no tools: all is words."""

    calls = 0

    def push(self, text: str) -> list[Piece]:
        return [AnswerText(text)] if text else []

    def close(self) -> list[Piece]:
        return []


def answer_parser(names: Collection[str]) -> ToolCallParser | PlainTextParser:
    """Return what splits an answer's text where these tools may be called."""
    return ToolCallParser(names) if names else PlainTextParser()


def check_tools(tools: Sequence[Tool], name_path: str, longest_name: int) -> None:
    """Check how many there are and what they are called.

    Raises:
        ApiError: 400 that names the parameter; `name_path` is where the name of tool number {} stands.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"At most {MAX_TOOLS} tools are allowed, not {len(tools)}.")
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name) or len(tool.name) > longest_name or tool.name in _CHOICES:
            told = f"A tool's name takes 1 to {longest_name} letters, digits, _ and -; some are reserved."
            raise invalid(name_path.format(number), told)
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "Two tools have the same name.")


def spec(request: InferenceRequest) -> StructuredSpec | None:
    """Return the form that the request's tool calls must have, and what is no call."""
    if not request.tools or request.tool_choice == "none":
        return None
    content: dict[str, Any] = {
        "tools": [{"name": t.name, "parameters": t.parameters, "strict": t.strict} for t in request.tools],
        "choice": request.tool_choice,
        "parallel": request.parallel_tools and request.tool_choice in ("auto", "required"),  # a named one: once
    }
    answer = request.structured
    if answer is not None:
        content["answer"] = json.loads(answer.text) if answer.constraint_type == "json_schema" else {"type": "object"}
    return StructuredSpec("tools", msgspec.json.encode(content).decode(), "tools")


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as models' chat templates take it."""
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


def in_words(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that knows nothing of tools: told in the system message, calls and results as
    text."""
    plain = [_plain(message) for message in messages]
    if tools:
        told = _INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            # Tools first, as in templates that know them: their change changes all that comes after.
            plain[0] = {"role": "system", "content": f"{told}\n\n{plain[0]['content']}"}
        else:
            plain.insert(0, {"role": "system", "content": told})
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
    """Return the text without an end that may turn out to be the tag's beginning."""
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
    """Name and arguments of a call whose keys come in another order."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
