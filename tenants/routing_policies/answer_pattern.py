r"""Regular expressions that are matched in linear time: a subset of Python's syntax. Does not import Django.

Supported are characters, `.`, classes such as `[^a-z_]`, `\d \w \s` and their complements, groups, `|` and the
quantifiers `* + ? {m} {m,} {m,n}`. References, look-around and captures do not exist, so a match needs no backtracking.
The complete text must match. `.` matches every character, line breaks too. `^` at the start and `$` at the end are
allowed and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from inference_worker.contract.texts import Text

MAX_PATTERN_LENGTH = 512
MAX_STATES = 4096
MAX_REPEAT = 1000
MAX_DEPTH = 32
MAX_STEPS = 200_000  # visited states of one match
Test = Callable[[str], bool]
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_SPECIAL = "*+?{}|()[]"
_SPACE = " \t\n\r\f\v"


class PatternError(ValueError):
    """An error of a pattern."""


class _State:
    """A state of the automaton. `test` accepts a character and leads to `following`; without one, all are entered."""

    __slots__ = ("following", "test")

    def __init__(self, test: Test | None = None) -> None:
        self.test = test
        self.following: list[int] = []


def _word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CLASSES: dict[str, Test] = {
    "d": lambda character: character.isdecimal(),
    "w": _word,
    "s": lambda character: character in _SPACE,
    "D": lambda character: not character.isdecimal(),
    "W": lambda character: not _word(character),
    "S": lambda character: character not in _SPACE,
}


def _one(expected: str) -> Test:
    return lambda character: character == expected


def _any(character: str) -> bool:
    return True


class AnswerPattern:
    """A compiled pattern."""

    def __init__(self, pattern: str) -> None:
        """Compile a pattern.

        Raises:
            PatternError: it is too long or uses a syntax that is not supported.
        """
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise PatternError(
                Text(
                    "the pattern has more than %(max_pattern_length)s characters", max_pattern_length=MAX_PATTERN_LENGTH
                )
            )
        self._text = pattern
        self._at = 1 if pattern.startswith("^") else 0
        self._end = len(pattern)
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            self._end -= 1
        self._states: list[_State] = []
        self._depth = 0
        start, end = self._alternatives()
        if self._at < self._end:
            raise PatternError(
                Text("unexpected %(text)s at position %(at)s", text=repr(self._text[self._at]), at=self._at)
            )
        self._start, self._accepted = start, end

    @property
    def num_states(self) -> int:
        return len(self._states)

    def matches(self, text: str) -> bool | None:
        """Return whether the complete text matches; None if that would take too long."""
        states = self._find_entered([self._start])
        following: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        steps = 0
        for character in text:
            place = states, character
            found = following.get(place)
            if found is None:
                steps += len(states)
                if steps > MAX_STEPS:
                    return None
                reached = [
                    target
                    for number in states
                    if (test := self._states[number].test) is not None and test(character)
                    for target in self._states[number].following
                ]
                found = following[place] = self._find_entered(reached)
            if not found:
                return False
            states = found
        return self._accepted in states

    def _find_entered(self, numbers: list[int]) -> frozenset[int]:
        """Return the states with all that are reached without a character."""
        entered: set[int] = set()
        pending = list(numbers)
        while pending:
            number = pending.pop()
            if number in entered:
                continue
            entered.add(number)
            state = self._states[number]
            if state.test is None:
                pending += state.following
        return frozenset(entered)

    # The parser. Each method returns the first and the last state of its part.

    def _alternatives(self) -> tuple[int, int]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(Text("groups are nested more than %(max_depth)s deep", max_depth=MAX_DEPTH))
        parts = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence())
        self._depth -= 1
        if len(parts) == 1:
            return parts[0]
        start, end = self._add_state(), self._add_state()
        for first, last in parts:
            self._link(start, first)
            self._link(last, end)
        return start, end

    def _sequence(self) -> tuple[int, int]:
        start = end = self._add_state()
        while self._peek() not in ("", "|", ")"):
            first, last = self._parse_repetition()
            self._link(end, first)
            end = last
        return start, end

    def _parse_repetition(self) -> tuple[int, int]:
        begin = self._at
        part = self._atom()
        atom_end = self._at
        low, high = self._quantifier()
        if (low, high) == (1, 1):
            return part
        start = end = self._add_state()
        for number in range(low if high is None else high):
            first, last = self._again(begin, atom_end) if number else part
            self._link(end, first)
            if number >= low:
                self._link(end, last)
            end = last
        if high is None:
            first, last = self._again(begin, atom_end) if low else part
            loop = self._add_state()
            self._link(end, loop)
            self._link(loop, first)
            self._link(last, loop)
            end = loop
        return start, end

    def _again(self, begin: int, end: int) -> tuple[int, int]:
        """Parse the same part of the pattern again, for a repetition."""
        at, self._at = self._at, begin
        part = self._atom()
        if self._at != end:
            raise PatternError(
                Text("unexpected %(text)s at position %(at)s", text=repr(self._text[self._at]), at=self._at)
            )
        self._at = at
        return part

    def _quantifier(self) -> tuple[int, int | None]:
        """Return the least and the greatest number of repetitions; None: no limit."""
        character = self._peek()
        if character not in ("*", "+", "?", "{"):
            return 1, 1
        if character == "{":
            close = self._text.find("}", self._at, self._end)
            low_text, comma, high_text = self._text[self._at + 1 : max(close, self._at)].partition(",")
            if close < 0 or not _is_number(low_text) or not (not high_text or _is_number(high_text)):
                raise PatternError(Text("expected a number of repetitions at position %(at)s", at=self._at))
            low = int(low_text)
            high = (int(high_text) if high_text else None) if comma else low
            self._at = close + 1
        else:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
            self._at += 1
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise PatternError(Text("repetitions must be from 0 to %(max_repeat)s", max_repeat=MAX_REPEAT))
        if self._peek() in ("*", "+", "?", "{"):
            raise PatternError(Text("a quantifier follows another at position %(at)s", at=self._at))
        return low, high

    def _atom(self) -> tuple[int, int]:
        character = self._peek()
        self._at += 1
        if character == "(":
            if self._text.startswith("?", self._at):
                if not self._text.startswith("?:", self._at):
                    raise PatternError(Text("unsupported group at position %(at)s", at=self._at - 1))
                self._at += 2
            part = self._alternatives()
            if self._peek() != ")":
                raise PatternError(Text("a group is not closed"))
            self._at += 1
            return part
        if character == "[":
            return self._single(self._character_class())
        if character == "\\":
            return self._single(self._parse_escape())
        if character == ".":
            return self._single(_any)
        if character in _SPECIAL or character in "^$":
            raise PatternError(
                Text("unexpected %(character)s at position %(at)s", character=repr(character), at=self._at - 1)
            )
        return self._single(_one(character))

    def _parse_escape(self) -> Test:
        character = self._peek()
        if not character:
            raise PatternError(Text("the pattern ends with a backslash"))
        self._at += 1
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _ESCAPES:
            return _one(_ESCAPES[character])
        if character.isalnum():
            raise PatternError(
                Text("unsupported escape \\%(character)s at position %(at)s", character=character, at=self._at - 2)
            )
        return _one(character)

    def _character_class(self) -> Test:
        is_negated = self._peek() == "^"
        self._at += is_negated
        tests: list[Test] = []
        ranges: list[tuple[str, str]] = []
        while self._peek() != "]" or not (tests or ranges):
            low = self._class_member(tests)
            if low is None:
                continue
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member(tests) or ""
                if high < low:
                    raise PatternError(Text("a range of characters is reversed at position %(at)s", at=self._at))
            ranges.append((low, high))
        self._at += 1
        return lambda character: (
            is_negated
            != (any(low <= character <= high for low, high in ranges) or any(test(character) for test in tests))
        )

    def _class_member(self, tests: list[Test]) -> str | None:
        r"""Return the next character of a class; None if a class such as \d was added to `tests`."""
        character = self._peek()
        if not character:
            raise PatternError(Text("a class of characters is not closed"))
        self._at += 1
        if character != "\\":
            return character
        escaped = self._peek()
        if not escaped:
            raise PatternError(Text("a class of characters is not closed"))
        self._at += 1
        if escaped in _CLASSES:
            tests.append(_CLASSES[escaped])
            return None
        if escaped.isalnum() and escaped not in _ESCAPES:
            raise PatternError(
                Text("unsupported escape \\%(escaped)s at position %(at)s", escaped=escaped, at=self._at - 2)
            )
        return _ESCAPES.get(escaped, escaped)

    def _single(self, test: Test) -> tuple[int, int]:
        start, end = self._add_state(test), self._add_state()
        self._link(start, end)
        return start, end

    def _add_state(self, test: Test | None = None) -> int:
        if len(self._states) >= MAX_STATES:
            raise PatternError(Text("the pattern has too many repetitions"))
        self._states.append(_State(test))
        return len(self._states) - 1

    def _link(self, start: int, end: int) -> None:
        self._states[start].following.append(end)

    def _peek(self) -> str:
        return self._text[self._at] if self._at < self._end else ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> AnswerPattern:
    """Return the compiled pattern, from a cache."""
    return AnswerPattern(pattern)
