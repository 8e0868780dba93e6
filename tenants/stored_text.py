"""Texts that PostgreSQL cannot store: with the character NUL, or with half of a surrogate pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

REFUSED = "Remove the character NUL and lone surrogates."


def is_storable(text: str) -> bool:
    """Return whether PostgreSQL can store the text."""
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unstorable_fields(data: Any) -> Iterator[str]:
    """Yield the path of each text in decoded JSON that PostgreSQL cannot store, such as `targets.0.model`.

    Of a field whose name cannot be stored, the path is that of its object, or `request`.
    """
    waiting = [("", data)]  # no recursion: the nesting of the JSON has no limit
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and not is_storable(value):
            yield path or "request"
        elif isinstance(value, dict):
            if not all(map(is_storable, value)):
                yield path or "request"
            waiting += [(f"{path}.{name}" if path else name, each) for name, each in value.items() if is_storable(name)]
        elif isinstance(value, list):
            waiting += [(f"{path}.{place}" if path else str(place), each) for place, each in enumerate(value)]
