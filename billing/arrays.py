"""Columns of values as PostgreSQL reads arrays. NOTE: psycopg's own way took a third of the settler's time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def array(values: Iterable[Any]) -> str:
    """Of numbers and times, for a parameter that is cast to an array of their kind."""
    return f"{{{','.join(['NULL' if value is None else str(value) for value in values])}}}"


def text_array(values: Iterable[str | None]) -> str:
    """Of texts, whatever is in them."""
    return f"{{{','.join(['NULL' if value is None else _quoted(value) for value in values])}}}"


def _quoted(text: str) -> str:
    if '"' in text or "\\" in text:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
