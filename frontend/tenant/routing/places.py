"""Where in a JSON text something stands, so that what is wrong with a policy can be said at its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tenants.routing_policies import policy

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `(?P<place>.*)`)?$", re.DOTALL)
# A list or object with no other in it.
_INNERMOST = re.compile(r'([\[{])\n\s*((?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*?)\n\s*([\]}])')
_NAMES = (
    *("models", "rules", "when", "prompt_tokens", "at_least", "at_most", "tools", "schema", "keys"),
    *("hours", "start", "end", "zone", "days", "targets", "model", "weight", "fallback_on"),
)
AROUND = 2  # lines shown before and after
LONGEST = 64 * 1024  # characters of a policy


@dataclass(frozen=True)
class RoutingLineItem:
    number: int
    text: str
    is_it: bool


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where: `place` as `rules[0].when`, the lines around it."""

    said: str
    place: str
    line: int
    lines: tuple[RoutingLineItem, ...]


def read(text: str) -> tuple[dict[str, Any], policy.Policy] | Fault:
    """Return the body that the text is, and the policy it describes; or what is wrong with it."""
    if len(text) > LONGEST:
        return Fault(f"Longer than {LONGEST:,} characters.", "", 1, ())
    try:
        body = json.loads(text)
    except json.JSONDecodeError as exc:
        return _at(text, exc.msg, "", exc.lineno)
    except RecursionError:
        return Fault("Nested too deeply.", "", 1, ())
    if not isinstance(body, dict):
        return _at(text, "Expected an object: {…}", "", 1)
    try:
        return body, policy.parse(body)
    except ValueError as exc:
        found = _PLACE.match(str(exc))
        said, place = (found["said"], found["place"] or "$") if found else (str(exc), "$")
        return _at(text, said, place.removeprefix("$").removeprefix("."), _line(text, place))


def _at(text: str, said: str, place: str, line: int) -> Fault:
    lines = text.splitlines() or [""]
    first = max(1, line - AROUND)
    shown = lines[first - 1 : line + AROUND]
    said = said[:1].upper() + said[1:]
    return Fault(
        said, place, line, tuple(RoutingLineItem(first + i, each, first + i == line) for i, each in enumerate(shown))
    )


def _line(text: str, place: str) -> int:
    """Return the line of a place, or of the nearest one around it."""
    lines = dict(_lines(text))
    while place not in lines and place != "$":
        place = re.sub(r"(\.[^.\[\]]*|\[[^\]]*\])$", "", place) if re.search(r"[.\[]", place) else "$"
    return lines.get(place, 1)


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Each value's place, as msgspec writes it, with its line. The text is JSON."""
    stack: list[tuple[str, int | None]] = []  # the place of each open list (with the next index) or object
    place, line, upto, key = "$", 1, 0, ""
    pending = False  # a name was read, its colon is to come
    for found in _TOKEN.finditer(text):
        line += text.count("\n", upto, found.start())
        upto, mark = found.start(), found[0]
        if mark in "]}":
            stack.pop()
        elif mark == ",":
            if stack[-1][1] is not None:
                stack[-1] = (stack[-1][0], stack[-1][1] + 1)
            pending = False
        elif mark == ":":
            pending = True
        elif stack and stack[-1][1] is None and not pending:
            key = json.loads(mark)
        else:
            place = _under(stack, key)
            yield place, line
            pending = False
            if mark in "[{":
                stack.append((place, 0 if mark == "[" else None))


def _under(stack: list[tuple[str, int | None]], key: str) -> str:
    if not stack:
        return "$"
    around, index = stack[-1]
    return f"{around}.{key}" if index is None else f"{around}[{index}]"


def pretty(body: Mapping[str, Any]) -> str:
    """Return a body as the editor shows it: its parts in one order, each target and condition on a line."""
    text = json.dumps(_in_order(body), indent=2, ensure_ascii=False)
    return _INNERMOST.sub(lambda found: found[1] + re.sub(r"\s*\n\s*", " ", found[2]) + found[3], text)


def _in_order(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_order(each) for each in value]
    if not isinstance(value, dict):
        return value
    # The database keeps names by their length.
    names = sorted(value, key=lambda name: (_NAMES.index(name) if name in _NAMES else len(_NAMES), name))
    return {name: _in_order(value[name]) for name in names}
