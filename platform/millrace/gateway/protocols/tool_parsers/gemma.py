"""Calls of Gemma 4: `<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from millrace.gateway.protocols.tool_parsers.base import (
    SPACE,
    CallHead,
    Piece,
    ToolCallParser,
    encode_arguments,
    match_steps,
)

_CLOSING, _QUOTE = "<tool_call|>", '<|"|>'
_STRING_END = re.compile(r'<\|"\|>')
_CALL = re.compile(r"\s{0,64}call:[\w.-]{1,64}\{")
_CALL_START = re.compile(r"\s{0,64}call:[\w.-]{0,64}")
_KEY_END = re.compile(r'[{}\[\],:]|<\|"\|>|<tool_call\|>')
_VALUE_END = re.compile(r'[{}\[\],]|<\|"\|>|<tool_call\|>')  # a value may have colons, as in 12:30


class GemmaParser(ToolCallParser):
    """A parser of Gemma's calls. A part of the arguments is returned when its string or value is complete."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, ["<|tool_call>"])
        self._steps = [("call:",), [f"{name}{{" for name in names]]
        self._open: list[str] = []  # the brackets around the next token
        self._expected: Literal["key", "colon", "value", "end"] = "key"
        self._prefix = ""  # what precedes the next value in JSON: a comma, a key

    def _begins_call(self, text: str) -> bool:
        return False

    def _in_call(self, pieces: list[Piece]) -> bool:
        head = match_steps(self._pending, self._steps)
        if head is True:
            return False
        if isinstance(head, CallHead):
            self._start_call(pieces, head.found[1][:-1])
            self._add_arguments(pieces, "{")
            self._pending, self._state = self._pending[head.end :], self._in_arguments
            self._open, self._expected, self._prefix, self._scanned = ["}"], "key", "", 0
        elif self.calls and _CALL_START.fullmatch(self._pending):
            return False
        elif self.calls and _CALL.match(self._pending):
            self._space, self._state = "", self._after_arguments  # a call of an unknown tool is dropped
        else:
            self._leave_as_text(pieces)
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        """Translate the next complete token to JSON. A token that is not expected ends the arguments."""
        token = self._next_token()
        if token is None:
            return False
        text, is_mark = token
        if not is_mark:
            self._read_value(pieces, text)
        elif text == ":" and self._expected == "colon":
            self._prefix, self._expected = self._prefix + ": ", "value"
        elif text == "," and self._expected == "end":
            self._prefix = ", "
            self._expected = "key" if self._open[-1] == "}" else "value"
        elif text in "{[" and self._expected == "value":
            self._add_arguments(pieces, self._prefix + text)
            self._open.append("}" if text == "{" else "]")
            self._prefix, self._expected = "", "key" if text == "{" else "value"
        elif text == self._open[-1]:
            self._complete_value(pieces)
            self._add_arguments(pieces, self._open.pop())
        else:
            self._close_brackets(pieces)
            self._pending = text + self._pending
        if not self._open:
            self._state = self._after_arguments
        return True

    def _next_token(self) -> tuple[str, bool] | None:
        """Remove the next token from the pending text. Return its text as JSON or a mark, and whether it is a mark."""
        self._pending = text = self._pending.lstrip(SPACE)
        is_string = text.startswith(_QUOTE)
        ends = _STRING_END if is_string else _VALUE_END if self._expected == "value" else _KEY_END
        found = ends.search(text, max(self._scanned, len(_QUOTE) * is_string))
        if found is None:
            self._scanned = max(0, len(text) - len(_CLOSING))
            return None
        self._scanned = 0
        if is_string:
            self._pending = text[found.end() :]
            return encode_arguments(text[len(_QUOTE) : found.start()]), False
        self._pending = text[found.start() or found.end() :]
        return (self._bare_value(text[: found.start()].strip(SPACE)), False) if found.start() else (found.group(), True)

    def _bare_value(self, text: str) -> str:
        if self._expected == "value":
            try:
                return encode_arguments(json.loads(text))
            except (ValueError, RecursionError):
                pass
        return encode_arguments(text)

    def _read_value(self, pieces: list[Piece], text: str) -> None:
        if self._expected == "key":
            self._prefix, self._expected = self._prefix + text, "colon"
        elif self._expected == "value":
            self._add_arguments(pieces, self._prefix + text)
            self._prefix, self._expected = "", "end"
        else:
            self._close_brackets(pieces)

    def _complete_value(self, pieces: list[Piece]) -> None:
        """Add null for a key without a value, at the end of an object."""
        if self._expected == "value" and self._open[-1] == "}":
            self._add_arguments(pieces, self._prefix + "null")
        self._prefix, self._expected = "", "end"

    def _close_brackets(self, pieces: list[Piece]) -> None:
        self._complete_value(pieces)
        self._add_arguments(pieces, "".join(reversed(self._open)))
        self._open = []

    def _after_arguments(self, pieces: list[Piece]) -> bool:
        mark = self._drop_until((_CLOSING, *self._openings))
        if mark:
            self._pending, self._state = self._pending.removeprefix(_CLOSING), self._in_text
        return bool(mark)

    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        """Leave text that is no call as text. A truncated call is dropped."""
        if is_truncated:
            return
        if self._state == self._in_call:
            self._leave_as_text(pieces, self._pending)
        elif self._state == self._in_arguments:
            self._close_brackets(pieces)
