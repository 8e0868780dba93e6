"""The cost of formats in chat templates: the operator % and the method `format` of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

from inference_worker.checkpoints.template_work import CALL_UNITS, WorkBudget

MAX_WIDTH = 1000  # characters to which a format pads a value
# A width and a precision in a format of the operator %. A star is an argument's.
_PERCENT = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_NESTED_KEY = re.compile(r"%\([^()]*\(")
_BRACKETED_BRACE = re.compile(r"\{[^{}\[]*\[[^\]]*[{}]")  # in the name of a value, where a brace has no meaning
_BRACES = re.compile(r"\{[^{}]*:([^{}]*\{?)")  # the specification of a value in `str.format`, up to a nested one
_WIDTHS = re.compile(r"\d+|\{")


class TextFormat:
    """The method `format` of a text."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self._text = text
        self._function = function

    def charge(self, budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        text = self._text
        budget.process(text)
        if _BRACKETED_BRACE.search(text):
            raise jinja2.TemplateError("a format in the chat template has a brace in brackets")
        _check_widths(width for spec in _BRACES.findall(text) for width in _WIDTHS.findall(spec))
        _charge_fields(budget, text, text.count("{"), (*args, *kwargs.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return str(self._function(*args, **kwargs))


def charge_percent(budget: WorkBudget, form: str, values: tuple[Any, ...] | Mapping[str, Any]) -> None:
    budget.process(form)
    if _NESTED_KEY.search(form):
        raise jinja2.TemplateError("a key of a format in the chat template has parentheses")
    found = _PERCENT.findall(form)
    _check_widths(width for pair in found for width in pair if width)
    _charge_fields(budget, form, len(found), values.values() if isinstance(values, Mapping) else values)


def _charge_fields(budget: WorkBudget, form: str, fields: int, values: Iterable[Any]) -> None:
    """Charge a format whose fields may each have the longest of the values."""
    values = list(values)
    if all(isinstance(value, str) for value in values):
        budget.measure(*values)
        longest = max(map(len, values), default=0)
    else:  # the text of other values has escapes
        count, characters = budget.measure(*values)
        longest = 8 * (count + characters)
    budget.charge(CALL_UNITS * fields)
    budget.copy(len(form) + fields * (MAX_WIDTH + longest))


def _check_widths(widths: Iterable[str]) -> None:
    for width in widths:
        if not width.isdecimal() or len(width) > 4 or int(width) > MAX_WIDTH:
            raise jinja2.TemplateError(f"a format in the chat template pads to {width[:9]}; at most {MAX_WIDTH}")
