"""Texts of other packages in the language of the page.

The packages below the console create texts as `Text`: in English, with their values. Texts of other origins, such as
messages of an upstream, are shown unchanged.
"""

from __future__ import annotations

import re
from datetime import datetime

from django.utils import timezone
from django.utils.functional import lazy
from django.utils.translation import gettext, ngettext

from frontend.core.languages import day_text, is_german, localize
from inference_worker.contract.texts import Text, text_of

_PERCENTAGE = re.compile(r"-?[\d,]+(\.\d+)?%")


def translate_message(text: str | BaseException) -> str:
    """Return a text, or the message of an error, in the language of the page."""
    found = text_of(text) if isinstance(text, BaseException) else text
    if not isinstance(found, Text):
        return gettext(found) if found else ""
    values = {name: _shown_value(value) for name, value in found.values.items()}
    number = found.values.get("number")
    if found.plural and isinstance(number, int):
        return ngettext(found.message, found.plural, number) % values
    return gettext(found.message) % values


def translate_lazily(text: str) -> str:
    """Return the text in the language in which it is shown. For texts that are created when a module is loaded."""
    return lazy(translate_message, str)(text)


def _shown_value(value: object) -> object:
    if isinstance(value, Text):
        return translate_message(value)
    if isinstance(value, datetime):
        return day_text(timezone.localtime(value), "j M Y, H:i")
    if isinstance(value, str) and _PERCENTAGE.fullmatch(value) and is_german():
        return f"{localize(value[:-1])}\N{NO-BREAK SPACE}%"
    return localize(f"{value:,}") if type(value) is int else value
