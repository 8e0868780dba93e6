"""Calls in tags, of Qwen3-Coder and GLM 4.5: `<function=weather><parameter=city>Paris</parameter></function>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from inference_worker.checkpoints.reasoning import beginning_length
from inference_worker.contract.output_formats import ToolFormat
from inference_worker.contract.schema_keywords import type_name
from millrace.gateway.protocols.tool_parsers.base import (
    MAX_SPACE,
    SPACE,
    AnswerText,
    CallHead,
    Piece,
    Scanner,
    ToolCallParser,
    encode_arguments,
    find_first,
    match_steps,
)

_S = rf"[ \t\r\n]{{0,{MAX_SPACE}}}"
_MAX_HEAD = 256  # characters of a parameter's name with its tags
_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates write them
_WIDER = {"integer": "number"}  # the type that includes another one


class TagsParser(ToolCallParser):
    """A parser of calls in tags. The text of a string is returned as it arrives, another value when it is complete."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        tags = form.tags
        assert tags is not None  # noqa: S101  (the registry has a format of this syntax)
        before_name, after_name = (text.strip() for text in tags.name)
        # Some models omit the mark before a call.
        super().__init__(names, [form.opening, before_name] if before_name else [form.opening])
        self._key_start = tags.key[0]
        before_value, after_value = (text.strip() for text in tags.value)
        self._key_head = re.compile(
            rf"{re.escape(tags.key[0])}([^<>\r\n]{{1,128}}){re.escape(tags.key[1])}"
            + (_S + re.escape(before_value) if before_value else "")
        )
        self._has_lines = not before_value  # a value has lines of its own
        self._ends = (f"\n{after_value}", after_value) if self._has_lines else (after_value,)  # ends of a value
        self._end, self._closing = tags.end.strip() or form.closing, form.closing
        ends = (after_name,) if after_name else (*SPACE, self._key_start, self._end)
        # The alternatives after the mark: a name and the text after it, of which a tag belongs to the arguments.
        self._heads = {name + end: (name, "" if after_name else end) for name in names for end in ends}
        self._steps = [(before_name,), tuple(self._heads)] if before_name else [tuple(self._heads)]
        self._has_argument = False  # the current call has an argument
        self._name = self._key = ""  # name of the current call, and of its current argument
        self._types: Collection[str] = ()  # JSON types of its value; empty: any
        self._is_first = True  # no text of the value was read
        self._scanner: Scanner | None = None  # the search for the end of a JSON object or list

    def _begins_call(self, text: str) -> bool:
        return False

    def _in_call(self, pieces: list[Piece]) -> bool:
        head = match_steps(self._pending, self._steps if self._opening == self._openings[0] else self._steps[1:])
        if head is True:
            return False
        if isinstance(head, CallHead):
            self._name, rest = self._heads[head.found[-1]]
            self._start_call(pieces, self._name)
            self._add_arguments(pieces, "{")
            self._pending, self._state = rest + self._pending[head.end :], self._in_arguments
            self._has_argument = False
        else:
            self._leave_as_text(pieces)
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        self._pending = text = self._pending.lstrip(SPACE)
        if text.startswith(self._key_start):
            return self._read_key(pieces, text)
        if text.startswith(self._end):
            self._add_arguments(pieces, "}")
            self._pending, self._state = text[len(self._end) :], self._after_call
            return True
        if self._key_start.startswith(text) or self._end.startswith(text):
            return False
        self._skip_call(pieces)
        return True

    def _read_key(self, pieces: list[Piece], text: str) -> bool:
        head = self._key_head.match(text)
        if head is None:
            if len(text) < _MAX_HEAD:
                return False
            self._skip_call(pieces)
            return True
        self._key, self._pending = head.group(1), text[head.end() :]
        self._types = self.parameter_types.get(self._name, {}).get(self._key, ())
        separator = ", " if self._has_argument else ""
        self._add_arguments(pieces, f"{separator}{encode_arguments(self._key)}: ")
        self._has_argument, self._is_first, self._scanner, self._scanned = True, True, None, 0
        self._state = self._in_string if set(self._types) == {"string"} else self._in_value
        return True

    def _in_string(self, pieces: list[Piece]) -> bool:
        """Return the text of a string so far, without a part of the tag that may end it."""
        if self._is_first and not self._begin_value():
            return False
        if self._is_first:
            self._add_arguments(pieces, '"')
            self._is_first = False
        found = find_first(self._pending, self._ends)
        withheld = beginning_length(self._pending, self._ends)
        end = len(self._pending) - withheld if found is None else found[0]
        self._add_arguments(pieces, encode_arguments(self._pending[:end])[1:-1])
        self._pending = self._pending[end:] if found is None else self._pending[end + len(found[1]) :]
        if found is not None:
            self._add_arguments(pieces, '"')
            self._state = self._in_arguments
        return found is not None

    def _in_value(self, pieces: list[Piece]) -> bool:
        """Return a value that may not be a string when its text is complete."""
        if self._is_first:
            if not self._begin_value():
                return False
            self._is_first = False
            if self._pending[:1] in ("{", "[") and self._types and "string" not in self._types:
                self._scanner = Scanner("<", "{}[]", '"')  # a string in JSON may include the tag
        start = self._scanned
        if self._scanner is not None:
            end = self._scanner.end(self._pending)
            if end is None:
                return False
            start = end
        end = self._pending.find(self._ends[-1], start)
        if end < 0:
            self._scanned = max(start, len(self._pending) - len(self._ends[-1]))
            return False
        self._add_arguments(pieces, self._value(self._pending[:end]))
        self._pending, self._state = self._pending[end + len(self._ends[-1]) :], self._in_arguments
        return True

    def _begin_value(self) -> bool:
        """Remove the whitespace before a value. Return whether the value has begun."""
        if self._types and "string" not in self._types:
            self._pending = self._pending.lstrip(SPACE)
        elif self._pending and self._has_lines:
            self._pending = self._pending.removeprefix("\n")
            return True
        return bool(self._pending)

    def _value(self, text: str) -> str:
        """Return the text of a value as JSON. A text that has none of the parameter's types is a string."""
        text = text.removesuffix("\n") if self._has_lines else text
        stripped = text.strip(SPACE)
        try:
            value = _CONSTANTS[stripped] if stripped in _CONSTANTS else json.loads(stripped)
            found = type_name(value)
            if found != "string" and (not self._types or {found, _WIDER.get(found)} & set(self._types)):
                return encode_arguments(value)
        except (ValueError, RecursionError):
            pass
        return encode_arguments(text)

    def _after_call(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        is_near = self._end != self._closing and len(self._pending) - len(text) <= MAX_SPACE
        if is_near and text != self._closing and self._closing.startswith(text):
            return False
        if is_near and text.startswith(self._closing):
            self._pending = text[len(self._closing) :]
        self._opening, self._state = "", self._in_text
        return True

    def _skip_call(self, pieces: list[Piece]) -> None:
        self._add_arguments(pieces, "}")
        self._state = self._in_skipped

    def _in_skipped(self, pieces: list[Piece]) -> bool:
        """Drop the rest of a malformed call."""
        mark = self._drop_until((self._end, self._closing, *self._openings))
        if mark == self._end:
            self._pending, self._state = self._pending[len(mark) :], self._after_call
        elif mark:
            self._pending = self._pending.removeprefix(self._closing)
            self._opening, self._state = "", self._in_text
        return bool(mark)

    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        """Leave text that is no call as text. A truncated call is dropped."""
        if is_truncated:
            return
        if self._state == self._in_value and self._scanner is not None:
            self._scanner, self._scanned = None, 0  # brackets that do not match: the first tag ends the value
            while self._state(pieces):
                pass
        if self._state == self._in_call:
            self._leave_as_text(pieces, self._pending)
        elif self._state == self._in_string:
            quote = '"' if self._is_first else ""
            self._add_arguments(pieces, quote + encode_arguments(self._pending)[1:] + "}")
        elif self._state == self._in_value:
            self._add_arguments(pieces, self._value(self._pending) + "}")
        elif self._state == self._in_arguments:
            self._add_arguments(pieces, "}")
        elif self._state == self._after_call and self._pending.strip(SPACE):
            pieces.append(AnswerText(self._pending))
