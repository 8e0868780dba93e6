"""Columns of values as PostgreSQL reads arrays. NOTE: psycopg's own way took a third of the settler's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

# JSON writes numbers, times and null as PostgreSQL reads them; texts too, but for what it says with a backslash.
_encode = msgspec.json.Encoder().encode


def array(values: Sequence[Any]) -> str:
    """Of numbers and times, for a parameter that is cast to an array of their kind."""
    return f"{{{_encode(values)[1:-1].decode()}}}"


def text_array(values: Sequence[str | None]) -> str:
    """Of texts, whatever is in them."""
    words = array(values)
    if "\\" not in words:
        return words
    return f"{{{','.join(['NULL' if each is None else _quoted(each) for each in values])}}}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
