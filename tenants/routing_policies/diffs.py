"""Routing policies as text, and the differences between two of them, line by line. Does not import Django."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

# A list or object without nested ones.
_INNERMOST = re.compile(r'([\[{])\n\s*((?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*?)\n\s*([\]}])')
_NAMES = (
    *("models", "rules", "name", "when", "prompt_tokens", "at_least", "at_most", "tools", "schema", "images", "task"),
    *("metadata", "keys", "projects", "hours", "start", "end", "zone", "days", "budget_left", "strategy", "targets"),
    *("model", "weight", "escalate", "on", "pattern", "max", "fallback_on", "first_token_ms", "retries"),
    *("max_per_request", "max_percent", "context_overflow", "semantic_cache", "shadow", "percent"),
)

DiffLine = tuple[str, str]  # "+", "-" or a space, and the text


def pretty(body: Mapping[str, Any]) -> str:
    """Return a body as text: in one order, with one line for each target and condition."""
    text = json.dumps(_in_order(body), indent=2, ensure_ascii=False)
    return _INNERMOST.sub(lambda found: found[1] + re.sub(r"\s*\n\s*", " ", found[2]) + found[3], text)


def diff(old: str, new: str) -> list[DiffLine]:
    """Return all lines with removed and added ones; empty if the texts are equal."""
    if old == new:
        return []
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    return [(line[0], line[2:]) for line in lines if line[0] != "?"]


def _in_order(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_order(item) for item in value]
    if not isinstance(value, dict):
        return value
    # PostgreSQL orders the names of JSON objects by length.
    names = sorted(value, key=lambda name: (_NAMES.index(name) if name in _NAMES else len(_NAMES), name))
    return {name: _in_order(value[name]) for name in names}
