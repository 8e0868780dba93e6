"""The languages of the console: the choice of a language, and the formats of its dates and numbers.

The management API and all other paths are in English.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import cast

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import dateformat, translation
from django.utils.translation import gettext_lazy
from django.utils.translation.trans_real import parse_accept_lang_header

COOKIE = "language"
_ENGLISH_PATHS = ("/api/", "/v1/", "/static/")
_SWAPPED = str.maketrans(",.", ".,")


def lazy_text(text: str) -> str:
    """Return the text in the language in which it is shown. For texts that are created when a module is loaded."""
    return cast("str", gettext_lazy(text))


def language_of(request: HttpRequest) -> str:
    """Return the language that the user has chosen, or the browser's first one that exists."""
    known = [code for code, _ in settings.LANGUAGES]
    wanted = request.COOKIES.get(COOKIE, "")
    if wanted in known:
        return wanted
    for code, _ in parse_accept_lang_header(request.headers.get("accept-language", "")):
        if code.partition("-")[0] in known:
            return str(code.partition("-")[0])
    return settings.LANGUAGE_CODE


class ConsoleLanguage:
    """Middleware that activates the user's language for the pages of the console."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path.startswith(_ENGLISH_PATHS):
            return self.get_response(request)
        with translation.override(language_of(request)):
            return self.get_response(request)


def is_german() -> bool:
    return translation.get_language() == "de"


def in_sentence(label: str) -> str:
    """Return a label inside a sentence: `API key` stays, `Deployment` becomes `deployment`; German nouns stay."""
    return label if is_german() or label[1:2].isupper() else label[:1].lower() + label[1:]


def in_english(text: str) -> str:
    """Return a text of `lazy_text` in English, for exports."""
    with translation.override("en"):
        return str(text)


def localize(number: str) -> str:
    """Return a number that is written in English with the separators of the language: `1,234.5` as `1.234,5`."""
    return number.translate(_SWAPPED) if is_german() else number


def month_text(month: str) -> str:
    """Return a month such as 2026-10 in words: `Oct 2026`."""
    return day_text(date(int(month[:4]), int(month[5:]), 1), "M Y")


def day_text(at: date, form: str = "j M Y") -> str:
    """Return a day in the language: `24 Nov 2026`, or in German `24. Nov 2026`. `form` is that of Django."""
    return dateformat.format(at, form.replace("j", "j.") if is_german() else form)
