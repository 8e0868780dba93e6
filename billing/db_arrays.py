"""Encoding of columns as PostgreSQL arrays. NOTE: psycopg's own encoding took a third of the settler's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

# JSON encodes numbers, times and null as PostgreSQL reads them, and texts except for backslash escapes.
_encode = msgspec.json.Encoder().encode


def array(values: Sequence[Any]) -> str:
    """Encode numbers and times, for a parameter that is cast to an array of their type."""
    return f"{{{_encode(values)[1:-1].decode()}}}"


def text_array(values: Sequence[str | None]) -> str:
    """Encode texts with any characters."""
    words = array(values)
    if "\\" not in words:
        return words
    return f"{{{','.join(['NULL' if value is None else _quote_element(value) for value in values])}}}"


def _quote_element(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
