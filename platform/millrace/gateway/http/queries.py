"""Query strings of list endpoints."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from millrace.gateway.core.errors import ApiError, invalid


def read_query(scope: Any, *allowed: str) -> dict[str, str]:
    """Return the query parameters.

    Raises:
            ApiError: 400, a parameter is unknown or repeated.
    """
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in allowed:
            raise ApiError("unknown_parameter", f"Unrecognized request argument supplied: {name}", name)
        if name in parameters:
            raise invalid(name, f"{name} was given twice.")
        parameters[name] = value
    return parameters


def read_limit(query: dict[str, str], default: int, max_limit: int) -> int:
    """Return the page size.

    Raises:
        ApiError: 400, it is not a number from 1 to `max_limit`.
    """
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= max_limit):
        raise invalid("limit", f"limit must be from 1 to {max_limit}.")
    return int(text)
