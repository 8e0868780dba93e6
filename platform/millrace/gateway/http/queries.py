"""Query strings of list endpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qsl

from millrace.gateway.core.errors import ApiError, invalid

ANTHROPIC_PAGE = ("after_id", "before_id", "limit")
_WITHOUT_EFFECT = "beta"  # Anthropic's SDK adds `beta=true` to the paths of its beta endpoints


def read_query(scope: Any, names: Collection[str]) -> dict[str, str]:
    """Return the query parameters.

    Raises:
        ApiError: 400, a parameter is not one of the names, or is repeated.
    """
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name == _WITHOUT_EFFECT:
            continue
        if name not in names:
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


def read_anthropic_page(query: dict[str, str], default: int) -> int:
    """Return the page size of a list in Anthropic's format.

    Raises:
        ApiError: 400, it is not a number from 1 to 1000, or the page is after one object and before another.
    """
    if len(query.keys() & {"after_id", "before_id"}) == 2:
        raise invalid("before_id", "Send after_id or before_id, not both.")
    return read_limit(query, default, 1000)
