"""Columns with texts that the console translates: a sentence and its values, as JSON.

Rows of earlier releases have finished English texts, which stay as they are.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import models

from inference_worker.contract.texts import Text

MAX_VALUE_LENGTH = 500  # characters of a value, and of a text without values
_START = '{"text":'


def encode_text(text: str) -> str:
    """Return what the column contains for a text."""
    if isinstance(text, Text):
        return json.dumps(_pack_text(text))  # ASCII: any character can be stored
    if text.startswith(_START):
        return encode_text(Text("%(text)s", text=text))
    return text[:MAX_VALUE_LENGTH]


def decode_text(stored: str) -> str:
    """Return the text of a column's content."""
    if not stored.startswith(_START):
        return stored
    try:
        return _unpack_text(json.loads(stored))
    except (ValueError, TypeError, KeyError):  # the sentence of another release
        return stored


if TYPE_CHECKING:
    BaseField = models.TextField[str, str]
else:
    BaseField = models.TextField


class UserTextField(BaseField):
    """A column with a `Text` or a plain text. It reads as an English string in all places but the console."""

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> str | None:
        return None if value is None else decode_text(value)

    def get_prep_value(self, value: Any) -> Any:
        return encode_text(value) if isinstance(value, str) else super().get_prep_value(value)


def _pack_text(text: Text) -> dict[str, Any]:
    values = {name: _stored_value(value) for name, value in text.values.items()}
    return {"text": text.message, "values": values} | ({"plural": text.plural} if text.plural else {})


def _unpack_text(packed: dict[str, Any]) -> Text:
    values = {name: _read_value(value) for name, value in packed["values"].items()}
    return Text(packed["text"], packed.get("plural", ""), **values)


def _stored_value(value: object) -> object:
    if isinstance(value, Text):
        return _pack_text(value)
    if isinstance(value, datetime):
        return {"at": value.isoformat()}
    return value[:MAX_VALUE_LENGTH] if isinstance(value, str) else value


def _read_value(stored: Any) -> object:
    if not isinstance(stored, dict):
        return stored
    return datetime.fromisoformat(stored["at"]) if "at" in stored else _unpack_text(stored)
