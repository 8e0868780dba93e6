"""Texts for users: an English sentence together with its values, so that the console can show it in another language.

All other readers get the English sentence: APIs, logs, emails and documents. `make messages` extracts the sentences
from the calls of `Text`, and `frontend/core/backend_messages.py` translates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime


class Text(str):
    """An English sentence that the console translates.

    A value may be a `Text` or a time. Integers are counts and get thousands separators, so IDs and line numbers are
    given as texts.
    """

    message: str  # with placeholders: `%(name)s exists already.`
    plural: str  # the message if the value `number` is not 1; empty: always the same message
    values: Mapping[str, object]

    def __new__(cls, message: str, plural: str = "", /, **values: object) -> Text:
        values = {
            name: value if isinstance(value, str | int | datetime) else str(value) for name, value in values.items()
        }
        shown = {name: _show_in_english(value) for name, value in values.items()}
        text = super().__new__(cls, (plural if plural and values["number"] != 1 else message) % shown)
        text.message, text.plural, text.values = message, plural, values
        return text

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], Mapping[str, object]]:
        """Return the arguments that make a copy."""
        return (self.message, self.plural), self.values


def _show_in_english(value: object) -> object:
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%-d %B %Y, %H:%M} UTC"
    return f"{value:,}" if type(value) is int else value


def text_of(exc: BaseException) -> str:
    """Return the message of an error, as a `Text` if it was raised with one."""
    message = exc.args[0] if len(exc.args) == 1 else None
    return message if isinstance(message, Text) else str(exc)
