"""The pieces of a parsed completion, and the states that parsers of different formats share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from inference_worker.checkpoints.reasoning import beginning_length
from inference_worker.contract.messages import Tokens
from inference_worker.contract.request import ToolCallDelta

SPACE = " \t\r\n"
MAX_SPACE = 64  # whitespace characters at one place of a call's head, or dropped before it
_SEGMENT = 4096  # characters that are parsed at a time, which bounds the cost of a text with many marks


@dataclass(frozen=True)
class AnswerText:
    """A part of the completion's text outside tool calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    number: int  # place of the call in this completion, from 0
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments. The complete arguments are a JSON object."""

    number: int
    text: str


Piece = AnswerText | CallStart | CallArguments
State = Callable[[list[Piece]], bool]


class ToolCallParser(ABC):
    """Splits one completion's text into text and calls of the tools `names`.

    Each state consumes what it can of the pending text. It returns whether the next state can continue.

    Args:
        openings: marks before calls.
        at_start: whether a call may also begin the completion without a mark.
    """

    def __init__(self, names: Collection[str], openings: Sequence[str], *, at_start: bool = False) -> None:
        self._names = names
        self._openings = openings
        self._opening = ""  # the mark before the current calls
        self._space = ""  # the whitespace before that mark
        self._pending = ""  # not parsed yet
        self._scanned = 0  # the index in the pending text before which nothing that is searched for begins
        self._state: State = self._at_start if at_start else self._in_text
        self.calls = 0  # number of calls so far
        self.max_calls = 0  # further calls are dropped; 0: no limit
        # JSON types of each tool's parameters, for formats that do not distinguish a string from other values
        self.parameter_types: Mapping[str, Mapping[str, Collection[str]]] = {}
        self.expects_json = False  # the text of an answer is JSON by the request, so it is no call without a mark

    def read(self, *events: Tokens) -> list[Piece]:
        """Parse the next events and return the new pieces."""
        return self.push("".join([event.text for event in events]))

    def push(self, text: str) -> list[Piece]:
        """Parse the next part of the text and return the new pieces."""
        pieces: list[Piece] = []
        for start in range(0, len(text), _SEGMENT):
            self._pending += text[start : start + _SEGMENT]
            while self._state(pieces):
                pass
        return self._limit_calls(pieces)

    def close(self, *, is_truncated: bool = False) -> list[Piece]:
        """Return the remaining pieces at the end of the completion.

        Args:
            is_truncated: whether the length limit has ended the completion, so that it may end within a mark.
        """
        pieces: list[Piece] = []
        if self._state == self._in_text:
            part = beginning_length(self._pending, self._openings) if is_truncated else 0
            text = self._pending[: len(self._pending) - part]
            if text and not ((self.calls or part) and text.isspace()):
                pieces.append(AnswerText(text))
        elif self._state == self._at_start:
            if self._pending.isspace() and not is_truncated:
                pieces.append(AnswerText(self._pending))
        else:
            self._close_call(pieces, is_truncated)
        self._pending = ""
        return self._limit_calls(pieces)

    def _limit_calls(self, pieces: list[Piece]) -> list[Piece]:
        if not self.max_calls or self.calls <= self.max_calls:
            return pieces
        return [piece for piece in pieces if isinstance(piece, AnswerText) or piece.number < self.max_calls]

    @abstractmethod
    def _in_call(self, pieces: list[Piece]) -> bool:
        """Parse the text after a mark, or the first text of the completion."""

    @abstractmethod
    def _close_call(self, pieces: list[Piece], is_truncated: bool) -> None:
        """Add the pieces of a completion that ends within a call. Truncated markup is no text."""

    @abstractmethod
    def _begins_call(self, text: str) -> bool:
        """Return whether a completion that begins with `text` may begin with a call."""

    def _at_start(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        is_call = len(self._pending) - len(text) <= MAX_SPACE
        if is_call and not text:
            return False
        self._state = self._in_call if is_call and self._begins_call(text) else self._in_text
        return True

    def _in_text(self, pieces: list[Piece]) -> bool:
        found = find_first(self._pending, self._openings)
        end = len(self._pending) - beginning_length(self._pending, self._openings) if found is None else found[0]
        # Whitespace before a call is dropped.
        before = max(len(self._pending[:end].rstrip(SPACE)), end - MAX_SPACE)
        if before > 0:
            pieces.append(AnswerText(self._pending[:before]))
        if found is None:
            self._pending = self._pending[max(0, before) :]
            return False
        self._space, self._opening, self._scanned = self._pending[max(0, before) : end], found[1], 0
        self._pending, self._state = self._pending[end + len(self._opening) :], self._in_call
        return True

    def _start_call(self, pieces: list[Piece], name: str) -> None:
        pieces.append(CallStart(self.calls, name))
        self.calls += 1
        self._space = ""

    def _add_arguments(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(CallArguments(self.calls - 1, text))

    def _leave_as_text(self, pieces: list[Piece], text: str = "") -> None:
        """Treat the mark, `text` after it and the pending text as text, because they are no call."""
        if text := self._space + self._opening + text:
            pieces.append(AnswerText(text))
        self._space, self._opening, self._state = "", "", self._in_text

    def _drop_until(self, marks: Sequence[str]) -> str:
        """Drop the pending text before the first of the marks. Return the mark, or "" if there is none yet."""
        found = find_first(self._pending, marks)
        kept = len(self._pending) - beginning_length(self._pending, marks) if found is None else found[0]
        self._pending = self._pending[kept:]
        return "" if found is None else found[1]


class PlainTextParser:
    """A parser for completions without tools: everything is text."""

    calls = 0

    def read(self, *events: Tokens) -> list[Piece]:
        return self.push("".join([event.text for event in events]))

    def push(self, text: str) -> list[Piece]:
        return [AnswerText(text)] if text else []

    def close(self, *, is_truncated: bool = False) -> list[Piece]:
        return []


class UpstreamCallParser(PlainTextParser):
    """A parser for completions of an upstream, which has parsed the calls."""

    def __init__(self, max_calls: int) -> None:
        self.calls = 0
        self._max_calls = max_calls  # 0: no limit
        self._without_arguments: set[int] = set()

    def read(self, *events: Tokens) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            pieces += self.push(event.text)
            for call in event.calls:
                self._add(pieces, call)
        return pieces

    def close(self, *, is_truncated: bool = False) -> list[Piece]:
        if is_truncated:
            return []
        return [CallArguments(number, "{}") for number in sorted(self._without_arguments)]

    def _add(self, pieces: list[Piece], call: ToolCallDelta) -> None:
        if self._max_calls and call.number >= self._max_calls:
            return
        if call.name:
            # The arguments of a call end before the next call.
            pieces += self.close()
            self._without_arguments = {call.number}
            self.calls += 1
            pieces.append(CallStart(call.number, call.name))
        if call.arguments:
            self._without_arguments.discard(call.number)
            pieces.append(CallArguments(call.number, call.arguments))


class BraceCounter:
    """The nesting of a JSON object that is read character by character."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Read `text` up to the end of the object. Return the index after it; None if all was read."""
        for index, char in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{}":
                self.depth += 1 if char == "{" else -1
                if self.depth == 0:
                    return index
        return None


class Scanner:
    """The search for a character outside strings and brackets. It continues where the last text ended.

    Args:
        ends: the characters. The closing brackets are among them.
        brackets: pairs of brackets.
    """

    def __init__(self, ends: str, brackets: str, quotes: str = "\"'", at: int = 0) -> None:
        self._ends, self._quotes = ends, quotes
        self._opens, self._closes = brackets[::2], brackets[1::2]
        self.at, self._depth = at, 0
        self._quote = self._word = ""  # the quote of the current string; the end of the current word
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return the index of the character; None if it is not in the text yet."""
        for index in range(self.at, len(text)):
            char = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in self._quotes and self._word.lower() in _STRING_PREFIXES:  # not the apostrophe of a word
                self._quote = char
            elif char in self._ends and not self._depth:
                return index
            else:
                self._depth += (char in self._opens) - (char in self._closes)
            self._word = (self._word + char)[-3:] if char.isalnum() and not self._quote else ""
        self.at = len(text)
        return None


_STRING_PREFIXES = ("", "r", "b", "f", "u", "br", "rb", "fr", "rf")


def find_first(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the first of the marks in the text, with its index."""
    return min(((at, mark) for mark in marks if (at := text.find(mark, start)) >= 0), default=None)


def encode_arguments(value: object) -> str:
    """Return a value as JSON that UTF-8 can encode.

    Raises:
        ValueError: the value has a number that JSON does not have.
        TypeError: the value has a type that JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value, allow_nan=False)
    return text


@dataclass(frozen=True)
class CallHead:
    """The beginning of a call: its end in the text, and the alternative that was found at each step."""

    end: int
    found: Sequence[str]


def match_steps(text: str, steps: Sequence[Sequence[str]]) -> CallHead | bool:
    """Match alternative texts in order, with at most `MAX_SPACE` characters of whitespace before each.

    Return True if `text` may still match, else False.
    """
    at, found = 0, []
    for alternatives in steps:
        start = at
        while at < len(text) and text[at] in SPACE:
            at += 1
            if at - start > MAX_SPACE:
                return False
        match = next((each for each in alternatives if text.startswith(each, at)), None)
        if match is None:
            return any(each.startswith(text[at : at + len(each)]) for each in alternatives)
        found.append(match)
        at += len(match)
    return CallHead(at, found)
