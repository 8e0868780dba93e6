"""Calls of Llama 3.2, Llama 4 and Gemma 3 in Python's syntax: `[weather(city="Paris"), time()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection

from millrace.gateway.protocols.tool_parsers.base import (
    MAX_SPACE,
    SPACE,
    AnswerText,
    Piece,
    Scanner,
    ToolCallParser,
    encode_arguments,
)

_OPENINGS = ("<|python_start|>", "```tool_code", "```python")
_CLOSINGS = ("<|python_end|>", "```")
# In each pattern, whitespace follows another character or the start, so that there is one way to match a text.
_S = rf"[ \t\r\n]{{0,{MAX_SPACE}}}"
_NAME = r"(?P<name>[A-Za-z0-9_-]{1,128})"
_HEAD = re.compile(rf"{_S}(?P<list>\[{_S})?{_NAME}{_S}\({_S}(?=[A-Za-z_)])")
_HEAD_START = re.compile(rf"{_S}(?:\[{_S})?(?:{_NAME}{_S}(?:\({_S})?)?")
_PARAMETER = r"([A-Za-z_][A-Za-z0-9_]{0,127})"
_KEY = re.compile(rf"(?:,{_S})?{_PARAMETER}{_S}={_S}(?=[^ \t\r\n])")
_KEY_START = re.compile(rf"(?:,{_S})?(?:{_PARAMETER}{_S}(?:={_S})?)?")
_END = re.compile(rf"(?:,{_S})?\)")
_MAX_DEPTH = 64  # nesting of a value


class PythonicParser(ToolCallParser):
    """A parser of calls with keyword arguments. An argument is returned when its value is complete."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, _OPENINGS, at_start=True)
        self._is_list = False  # the calls are in a list
        self._has_argument = False  # the current call has an argument
        self._key = ""  # name of the current argument
        self._scanner = _value_scanner()

    def _begins_call(self, text: str) -> bool:
        return text.startswith("[")

    def _in_call(self, pieces: list[Piece]) -> bool:
        head = self._match_head()
        if head is True:
            return False
        if head and (head["list"] or self._opening):
            self._is_list = bool(head["list"])
            self._begin_call(pieces, head)
        else:
            self._leave_as_text(pieces)
        return True

    def _in_next_call(self, pieces: list[Piece]) -> bool:
        head = self._match_head()
        if head is True:
            return False
        if head and not head["list"]:
            self._begin_call(pieces, head)
        else:
            self._skip_calls()
        return True

    def _match_head(self) -> re.Match[str] | bool:
        """Return the head of a call in the pending text. Return True if the text may be its beginning, else False."""
        head = _HEAD.match(self._pending)
        if head is not None:
            return head["name"] in self._names and head
        start = _HEAD_START.fullmatch(self._pending)
        return start is not None and any(name.startswith(start["name"] or "") for name in self._names)

    def _begin_call(self, pieces: list[Piece], head: re.Match[str]) -> None:
        self._start_call(pieces, head["name"])
        self._add_arguments(pieces, "{")
        self._pending, self._state = self._pending[head.end() :], self._in_arguments
        self._has_argument = False

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        self._pending = text = self._pending.lstrip(SPACE)
        if end := _END.match(text):
            self._add_arguments(pieces, "}")
            self._pending, self._state = text[end.end() :], self._after_call
        elif key := _KEY.match(text):
            self._key, self._pending, self._state = key.group(1), text[key.end() :], self._in_value
            self._scanner = _value_scanner()
        elif _KEY_START.fullmatch(text):
            return False
        else:  # no keyword argument
            self._add_arguments(pieces, "}")
            self._skip_calls()
        return True

    def _in_value(self, pieces: list[Piece]) -> bool:
        end = self._scanner.end(self._pending)
        if end is None:
            return False
        separator = ", " if self._has_argument else ""
        value = _value(self._pending[:end].strip(SPACE))
        self._add_arguments(pieces, f"{separator}{json.dumps(self._key)}: {value}")
        self._pending, self._state, self._has_argument = self._pending[end:], self._in_arguments, True
        return True

    def _after_call(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        is_near = len(self._pending) - len(text) <= MAX_SPACE
        if is_near and not text:
            return False
        if is_near and text.startswith(","):
            self._pending, self._state = text[1:], self._in_next_call
            return True
        if is_near and text.startswith("]"):
            self._pending = text[1:]
        self._state = self._after_calls
        return True

    def _skip_calls(self) -> None:
        self._scanner, self._state = Scanner("]", "[]"), self._in_skipped

    def _in_skipped(self, pieces: list[Piece]) -> bool:
        """Drop the rest of the calls, up to the end of their list, or else to the mark after them."""
        if self._is_list:
            end = self._scanner.end(self._pending)
            self._pending = "" if end is None else self._pending[end + 1 :]
            self._scanner.at = 0
            is_end = end is not None
        else:
            is_end = bool(self._drop_until(_CLOSINGS))
        if is_end:
            self._state = self._after_calls
        return is_end

    def _after_calls(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        if len(self._pending) - len(text) <= MAX_SPACE:
            closing = next((each for each in _CLOSINGS if text.startswith(each)), "")
            if not closing and any(each.startswith(text) for each in _CLOSINGS):
                return False
            if closing:
                self._pending = text[len(closing) :]
        self._opening, self._state = "", self._in_text
        return True

    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        """Drop a truncated call, and a part of the mark after the calls. In other completions they are text."""
        if is_truncated:
            return
        if self._state == self._in_call:
            self._leave_as_text(pieces, self._pending)
        elif self._state in (self._in_arguments, self._in_value):
            self._add_arguments(pieces, "}")
        elif self._state == self._after_calls and self._pending.strip(SPACE):
            pieces.append(AnswerText(self._pending))


def _value_scanner() -> Scanner:
    """Return a search for the comma or bracket after a value."""
    return Scanner(",)]}", "()[]{}")


def _value(text: str) -> str:
    """Return a Python or JSON value as JSON. A text that is neither becomes a string."""
    if text.count("[") + text.count("{") + text.count("(") <= _MAX_DEPTH:
        for read in (json.loads, ast.literal_eval):
            try:
                return encode_arguments(read(text))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                pass
    return encode_arguments(text)
