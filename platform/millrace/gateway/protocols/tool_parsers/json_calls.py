"""Calls as JSON objects with the name and the arguments, single or in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from millrace.gateway.protocols.tool_parsers.base import (
    MAX_SPACE,
    SPACE,
    AnswerText,
    BraceCounter,
    CallHead,
    Piece,
    Scanner,
    ToolCallParser,
    encode_arguments,
    find_first,
    match_steps,
)

_SEPARATOR = re.compile(r"[ \t\r\n,;]*")
# Without marks, calls may be in blocks of code.
_UNMARKED_SEPARATOR = re.compile(r"(?:[ \t\r\n,;]|`{1,3}(?:json)?)*")
_FENCE = re.compile(rf"```(?:json)?[ \t\r\n]{{1,{MAX_SPACE}}}")
_FENCE_START = re.compile(rf"`{{0,3}}|```(?:j|js|jso|json)?[ \t\r\n]{{0,{MAX_SPACE}}}")
_KEYS = ('"arguments"', '"parameters"')


class JsonCallParser(ToolCallParser):
    """A parser of JSON calls.

    Some models omit the marks, or write calls in a block of code instead. A completion that is nothing but calls of the
    tools is therefore parsed at its end.

    Args:
        closing: the mark after each call; empty: further calls follow directly or after a separator.
        separators: texts between calls without marks.
        at_start: the first call has no mark in this format, so it is parsed as it arrives.
    """

    def __init__(
        self,
        names: Collection[str],
        openings: Sequence[str],
        *,
        closing: str = "",
        separators: Sequence[str] = (),
        at_start: bool = False,
    ) -> None:
        super().__init__(names, openings, at_start=True)
        self._has_marks = not at_start
        self._is_complete_head = False  # a completion without marks begins with a call
        self._closing = closing
        self._separators = separators
        named = [('"name"',), (":",), [json.dumps(name) for name in names], (",",), _KEYS, (":",), ("{",)]
        self._steps: list[list[Sequence[str]]] = [
            [("{",), *named],
            [("{",), ('"type"',), (":",), ('"function"',), (",",), *named],
        ]
        self._unmarked_steps: list[list[Sequence[str]]] = [*self._steps, [("{",), _KEYS, (":",), ("{",)]]
        self._braces = BraceCounter()
        self._scanner = Scanner("", "")
        self._is_list = False  # the calls are in a list

    def _begins_call(self, text: str) -> bool:
        if not self._has_marks:
            return self._match_head(text) is not False
        return not self.expects_json and self._match_unmarked(text) is not False

    def _match_unmarked(self, text: str) -> CallHead | bool:
        """Return the head of a call without marks, in a list or a block of code or neither."""
        if (fence := _FENCE.match(text)) is not None:
            text = text[fence.end() :]
        elif text.startswith("`"):
            return _FENCE_START.fullmatch(text) is not None
        return _match_any(text.removeprefix("["), self._unmarked_steps)

    def _match_head(self, text: str) -> CallHead | bool:
        """Return the head of a call. Return True if `text` may be its beginning, else False."""
        return _match_any(text, self._steps)

    def _in_call(self, pieces: list[Piece]) -> bool:
        if self._is_unmarked:
            return self._in_unmarked_calls(pieces)
        text = self._pending.lstrip(SPACE)
        is_list = bool(self._opening) and not self._closing and text.startswith("[")
        if is_list:
            text = text[1:].lstrip(SPACE)
        if len(self._pending) - len(text) > 2 * MAX_SPACE:
            self._leave_as_text(pieces)
            return True
        head = self._match_head(text)
        if isinstance(head, CallHead):
            self._is_list = is_list
            self._begin_call(pieces, head, text)
            return True
        if self._closing:
            return self._in_closed_call(pieces)
        if head or (self._opening and text[0] in "{["):
            return False  # a call whose keys are in another order is parsed at the end of the completion
        self._leave_as_text(pieces)
        return True

    @property
    def _is_unmarked(self) -> bool:
        """Whether the completion so far may be nothing but calls without their marks."""
        return self._has_marks and self._state == self._in_call and not self._opening

    def _in_unmarked_calls(self, pieces: list[Piece]) -> bool:
        """Wait for the end of a completion that begins as a call without marks."""
        if self._is_complete_head:
            return False
        head = self._match_unmarked(self._pending.lstrip(SPACE))
        if head is False:
            self._leave_as_text(pieces)
            return True
        self._is_complete_head = isinstance(head, CallHead)
        return False

    def close(self, *, is_truncated: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        if self._is_unmarked and self._add_unmarked_calls(pieces, is_truncated):
            self._pending = ""
            return self._limit_calls(pieces)
        if self._is_unmarked or (self._has_marks and self._state == self._at_start):
            self._state = self._in_text
            while self._state(pieces):
                pass
        return self._limit_calls(pieces) + super().close(is_truncated=is_truncated)

    def _add_unmarked_calls(self, pieces: list[Piece], is_truncated: bool) -> bool:
        """Add the calls of a completion without marks. Return False, without a change, if a part of it is no call."""
        values, rest = _leading_values(self._pending, _UNMARKED_SEPARATOR)
        if rest and not is_truncated:
            return False
        head = self._match_head(rest.removeprefix("["))
        calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
        if rest and not isinstance(head, CallHead):
            return bool(head) and self._add_calls(pieces, calls)
        if not (self._add_calls(pieces, calls) or (rest and not calls)):
            return False
        if isinstance(head, CallHead):  # a truncated call
            rest = rest.removeprefix("[")
            self._start_call(pieces, json.loads(head.found[-5]))
            arguments = rest[head.end - 1 :]
            self._add_arguments(pieces, arguments[: BraceCounter().end(arguments)])
        return True

    def _begin_call(self, pieces: list[Piece], head: CallHead, text: str) -> None:
        self._start_call(pieces, json.loads(head.found[-5]))
        self._pending, self._state = text[head.end - 1 :], self._in_arguments
        self._braces, self._scanned = BraceCounter(), 0

    def _in_closed_call(self, pieces: list[Piece]) -> bool:
        """Parse a call up to its closing mark, because its arguments cannot be streamed."""
        marks = (self._closing, *self._openings)
        found = find_first(self._pending, marks, self._scanned)
        if found is None:
            self._scanned = max(0, len(self._pending) - max(map(len, marks)))
            return False
        end, mark = found
        body, after = self._pending[:end], end + len(mark) if mark == self._closing else end
        text, self._pending = self._pending[:after], self._pending[after:]
        if self._add_block(pieces, body):
            self._leave_calls()
        else:
            self._leave_as_text(pieces, text)
        return True

    def _add_block(self, pieces: list[Piece], body: str) -> bool:
        """Add the calls between two marks: one object, several, or a list. Return False if these are text.

        After another call, a call of an unknown tool is dropped.
        """
        try:
            values = _json_values(body)
        except (ValueError, RecursionError):
            return False
        calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
        if self.calls and calls and all(map(_is_call, calls)):
            calls = [call for call in calls if call["name"] in self._names]
            return self._add_calls(pieces, calls) or not calls
        return self._add_calls(pieces, calls)

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        end = self._braces.end(self._pending)
        self._add_arguments(pieces, self._pending[:end])
        self._pending = "" if end is None else self._pending[end:]
        if end is None:
            return False
        self._braces.depth = 1  # the call's own object
        self._state = self._after_arguments
        return True

    def _after_arguments(self, pieces: list[Piece]) -> bool:
        if self._closing:
            return self._in_rest_of_block(pieces)
        end = self._braces.end(self._pending)
        self._pending = "" if end is None else self._pending[end:]
        if end is not None:
            self._state = self._between_calls
        return end is not None

    def _in_rest_of_block(self, pieces: list[Piece]) -> bool:
        """Parse the text between a call and its closing mark, which may have further calls."""
        marks = (self._closing, *self._openings)
        found = find_first(self._pending, marks, self._scanned)
        if found is None:
            self._scanned = max(0, len(self._pending) - max(map(len, marks)))
            return False
        end, _ = found
        body, self._pending, self._scanned = self._pending[:end], self._pending[end:].removeprefix(self._closing), 0
        self._add_block(pieces, body.strip(SPACE).removeprefix("}"))
        self._leave_calls()
        return True

    def _between_calls(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        if len(self._pending) - len(text) > MAX_SPACE:
            self._leave_calls()
            return True
        if not text:
            return False
        separators = (",",) if self._is_list else self._separators
        separator = next((each for each in separators if text.startswith(each)), "")
        if separator or (text.startswith("{") and self._separators):
            return self._in_next_call(pieces, text[len(separator) :])
        if self._is_list and text.startswith("]"):
            self._pending = text[1:]
        self._leave_calls()
        return True

    def _in_next_call(self, pieces: list[Piece], text: str) -> bool:
        """Parse the text after a call and a separator."""
        head, stripped = self._match_head(text), text.lstrip(SPACE)
        if isinstance(head, CallHead):
            self._begin_call(pieces, head, text)
        elif head:
            return False
        elif stripped.startswith("{") and len(text) - len(stripped) <= MAX_SPACE:
            self._pending, self._state = stripped, self._in_object
            self._scanner = Scanner("}", "{}", '"', at=1)
        elif self._is_list:
            self._pending, self._state = text, self._in_rest_of_list
            self._scanner = Scanner("]", "[]", '"')
        else:
            self._leave_calls()
        return True

    def _in_object(self, pieces: list[Piece]) -> bool:
        """Parse a complete object after a call. It is dropped if it is no call."""
        end = self._scanner.end(self._pending)
        if end is None:
            return False
        self._add_whole(pieces, self._pending[: end + 1])
        self._pending, self._state = self._pending[end + 1 :], self._between_calls
        return True

    def _in_rest_of_list(self, pieces: list[Piece]) -> bool:
        end = self._scanner.end(self._pending)
        self._pending = "" if end is None else self._pending[end + 1 :]
        self._scanner.at = 0
        if end is not None:
            self._leave_calls()
        return end is not None

    def _leave_calls(self) -> None:
        self._space, self._opening, self._state, self._is_list = "", "", self._in_text, False

    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        if self._state == self._in_object and not self._is_list and not is_truncated:
            pieces.append(AnswerText(self._pending))
        if self._closing and self._state == self._after_arguments and not is_truncated:
            self._add_block(pieces, self._pending.strip(SPACE).removeprefix("}"))
        if self._state != self._in_call:
            return
        body = self._pending.strip(SPACE)
        if self._opening and (self._add_block if self._closing else self._add_whole)(pieces, body):
            return
        if not is_truncated or (body and (body[0] not in "{[" or _is_json(body))):
            self._leave_as_text(pieces, self._pending)

    def _add_whole(self, pieces: list[Piece], body: str) -> bool:
        """Add the calls in a complete body. Return False if it is not a valid call, or list of calls."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return False
        return self._add_calls(pieces, value if isinstance(value, list) else [value])

    def _add_calls(self, pieces: list[Piece], calls: Sequence[Any]) -> bool:
        """Add decoded calls. Return False, without a change, if there are none or one of them is no valid call."""
        found = []
        for call in calls:
            if not _is_call(call) or call["name"] not in self._names:
                return False
            try:
                found.append((call["name"], encode_arguments(call.get("arguments", call.get("parameters")))))
            except (ValueError, RecursionError):
                return False
        for name, encoded in found:
            self._start_call(pieces, name)
            self._add_arguments(pieces, encoded)
        return bool(found)


def _match_any(text: str, heads: Sequence[Sequence[Sequence[str]]]) -> CallHead | bool:
    """Return the first head that matches. Return True if `text` may be the beginning of one, else False."""
    found = [match_steps(text, steps) for steps in heads]
    return next((head for head in found if isinstance(head, CallHead)), any(found))


def _is_call(value: Any) -> bool:
    """Return whether a JSON value has the form of a call, of any tool."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return isinstance(value.get("arguments", value.get("parameters")), dict)


def _json_values(text: str) -> list[Any]:
    """Return the JSON values in a text, which whitespace, commas or semicolons separate.

    Raises:
        ValueError: the text has something else.
    """
    values, rest = _leading_values(text)
    if rest:
        raise ValueError("the text has more than JSON values")
    return values


def _leading_values(text: str, separator: re.Pattern[str] = _SEPARATOR) -> tuple[list[Any], str]:
    """Return the JSON values at the beginning of a text, and the text after them."""
    decoder, at = json.JSONDecoder(), 0
    values: list[Any] = []
    while True:
        match = separator.match(text, at)
        at = at if match is None else match.end()
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return values, text[at:]
        values.append(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
