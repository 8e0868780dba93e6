"""Translation of texts that other packages create in English.

They are messages of rejected actions, health issues, descriptions of webhook events, texts of tenant settings, reasons
why endpoints are disabled and labels of price components. They stay in English in the API, in logs and in the database.
frontend/locale/backend_texts.json has their patterns, see `tools/backend_texts.py`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from django.utils.functional import lazy
from django.utils.html import avoid_wrapping
from django.utils.translation import get_language, gettext, ngettext

from frontend.core.languages import localize

PATTERNS = Path(__file__).parents[1] / "locale" / "backend_texts.json"
MAX_LENGTH = 1000  # longer texts are shown as they are
_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_DURATION = re.compile(r"(\d+)\xa0(year|month|week|day|hour|minute)s?")  # units in texts of Django's timesince
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def translate_message(text: str) -> str:
    """Return the text in the language of the page, or unchanged if it is not known.

    A text after a name, such as `web: restarting`, is translated too.
    """
    if get_language() == "en" or len(text) > MAX_LENGTH:
        return text
    for pattern, message in _patterns():
        if match := pattern.fullmatch(text):
            return gettext(message) % {name: _value(value) for name, value in match.groupdict().items()}
    name, separator, rest = text.partition(": ")
    return f"{name}{separator}{translate_message(rest)}" if separator else text


def translate_lazily(text: str) -> str:
    """Return the text in the language in which it is shown. For texts that are created when a module is loaded."""
    return lazy(translate_message, str)(text)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of all texts, those with the most letters of their own first."""
    found = []
    for text in json.loads(PATTERNS.read_text(encoding="utf-8")):
        parts = _PLACEHOLDER.split(text)  # every second one is the name of a placeholder
        literals = [part.replace("%%", "%") for part in parts[::2]]
        names = [f"(?P<{name}>.+?)" for name in parts[1::2]]
        pattern = "".join(re.escape(literal) + name for literal, name in zip(literals, [*names, ""], strict=True))
        found.append((sum(map(len, literals)), re.compile(pattern, re.DOTALL), text))
    found.sort(key=lambda row: -row[0])
    return [(pattern, text) for _, pattern, text in found]


def _value(value: str) -> str:
    if match := _DURATION.fullmatch(value):
        number, unit = int(match.group(1)), match.group(2)
        return avoid_wrapping(ngettext(f"%(num)d {unit}", f"%(num)d {unit}s", number) % {"num": number})
    if _NUMBER.fullmatch(value):
        return localize(value)
    return translate_message(value) if " " in value else value
