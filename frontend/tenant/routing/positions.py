"""Positions in a JSON text, so that an error of a policy is shown at its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.numbers import exact
from inference_worker.contract.texts import Text, text_of
from tenants.routing_policies import policy
from tenants.stored_text import unstorable_fields

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
# Messages of Python's JSON decoder, which the console translates.
_JSON_ERRORS = (
    Text("Expecting value"),
    Text("Expecting property name enclosed in double quotes"),
    Text("Expecting ',' delimiter"),
    Text("Expecting ':' delimiter"),
    Text("Extra data"),
    Text("Unterminated string starting at"),
    Text("Invalid control character at"),
)
CONTEXT_LINES = 2  # lines shown before and after the error
MAX_LENGTH = 64 * 1024  # characters of a policy


@dataclass(frozen=True)
class RoutingLineItem:
    number: int
    text: str
    is_it: bool


@dataclass(frozen=True)
class PolicyError:
    """An error in a policy, with its position, such as `rules[0].when`, and the lines around it."""

    message: str
    place: str
    line: int
    lines: tuple[RoutingLineItem, ...]


def read(text: str) -> tuple[dict[str, Any], policy.Policy] | PolicyError:
    """Return the body and the policy that the text describes, or the error."""
    if len(text) > MAX_LENGTH:
        return PolicyError(_("Longer than %(limit)s characters.") % {"limit": exact(MAX_LENGTH)}, "", 1, ())
    try:
        body = json.loads(text)
    except json.JSONDecodeError as exc:
        return _at(text, exc.msg, "", exc.lineno)
    except ValueError:
        return PolicyError(_("A number has too many digits."), "", 1, ())
    except RecursionError:
        return PolicyError(_("Nested too deeply."), "", 1, ())
    if place := next(unstorable_fields(body), ""):
        return PolicyError(_("Remove the character NUL and lone surrogates."), place, 1, ())
    if not isinstance(body, dict):
        return _at(text, _("Expected an object: {…}"), "", 1)
    try:
        return body, policy.parse(body)
    except ValueError as exc:
        message, place = text_of(exc), "$"
        if isinstance(message, Text) and "place" in message.values:
            place, message = str(message.values["place"]), cast("str", message.values["error"])
        return _at(text, message, place.removeprefix("$").removeprefix("."), _line(text, place))


def _at(text: str, message: str, place: str, line: int) -> PolicyError:
    lines = text.splitlines() or [""]
    first = max(1, line - CONTEXT_LINES)
    shown = lines[first - 1 : line + CONTEXT_LINES]
    message = translate_message(message)
    message = message[:1].upper() + message[1:]
    return PolicyError(
        message,
        place,
        line,
        tuple(RoutingLineItem(first + i, content, first + i == line) for i, content in enumerate(shown)),
    )


def _line(text: str, place: str) -> int:
    """Return the line of a position, or of its nearest known parent."""
    lines = dict(_lines(text))
    while place not in lines and place != "$":
        place = re.sub(r"(\.[^.\[\]]*|\[[^\]]*\])$", "", place) if re.search(r"[.\[]", place) else "$"
    return lines.get(place, 1)


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Return the line of each value's position, in msgspec's notation. The text must be valid JSON."""
    stack: list[tuple[str, int | None]] = []  # position of each open object or list, with its next index
    place, line, upto, key = "$", 1, 0, ""
    pending = False  # a name was read; the colon follows
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
