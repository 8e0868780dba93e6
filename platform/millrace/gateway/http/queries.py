"""The query strings of lists: known parameters, each once, in range."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from millrace.gateway.core.errors import ApiError, invalid


def read_query(scope: Any, *known: str) -> dict[str, str]:
    """Return the parameters.

    Raises:
        ApiError: 400, another one, or one twice.
    """
    found: dict[str, str] = {}
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in known:
            raise ApiError("unknown_parameter", f"Unrecognized request argument supplied: {name}", name)
        if name in found:
            raise invalid(name, f"{name} was given twice.")
        found[name] = value
    return found


def read_limit(query: dict[str, str], default: int, most: int) -> int:
    """How many the page is to have.

    Raises:
        ApiError: 400.
    """
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise invalid("limit", f"limit must be from 1 to {most}.")
    return int(text)
