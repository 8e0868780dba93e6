"""The rate limits that upstreams report in the headers of their responses."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from inference_worker.contract.upstream_limits import DIMENSIONS, MAX_LIMIT, MAX_RESET_SECONDS

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_UNITS = (86_400.0, 3600.0, 60.0, 1.0, 0.001)
MAX_CHARACTERS = 64  # characters of a header's value


class ReportedLimit(NamedTuple):
    """One limit as a response reports it."""

    dimension: str  # one of DIMENSIONS
    limit: int
    remaining: int
    reset_seconds: float  # until `remaining` is `limit` again


def reported_limits(headers: Mapping[str, str], now: float | None = None) -> list[ReportedLimit]:
    """Return the limits that the headers report completely.

    OpenAI's format is `x-ratelimit-remaining-requests` with a duration as the reset; Anthropic's is
    `anthropic-ratelimit-requests-remaining` with a time.
    """
    now = time.time() if now is None else now
    found = []
    for dimension in DIMENSIONS:
        limit = _number(_header(headers, dimension, "limit"))
        remaining = _number(_header(headers, dimension, "remaining"))
        reset = _reset_seconds(_header(headers, dimension, "reset"), now)
        if remaining is None or reset is None:
            continue
        # Without a limit, the refill is known only as a whole.
        found.append(ReportedLimit(dimension, max(1, remaining, limit or 0), remaining, reset))
    return found


def _header(headers: Mapping[str, str], dimension: str, part: str) -> str | None:
    # Anthropic has separate limits of input and output tokens, and reports the one that is nearest as "tokens".
    names: tuple[str, ...] = (f"x-ratelimit-{part}-{dimension}", f"anthropic-ratelimit-{dimension}-{part}")
    if dimension == "tokens":
        names += (f"anthropic-ratelimit-input-tokens-{part}",)
    value = next((headers[name] for name in names if name in headers), None)
    return None if value is None or len(value) > MAX_CHARACTERS else value.strip()


def _number(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdigit():
        return None
    return min(int(text), MAX_LIMIT)


def _reset_seconds(text: str | None, now: float) -> float | None:
    """Return the seconds of a duration such as `6m0s` or `20ms`, of a number of seconds, or until a time."""
    if not text:
        return None
    seconds: float
    if (match := _DURATION.fullmatch(text)) is not None:
        seconds = sum(float(part) * unit for part, unit in zip(match.groups(), _UNITS, strict=True) if part)
    else:
        try:
            seconds = float(text)
        except ValueError:
            try:
                at = datetime.fromisoformat(text)
            except ValueError:
                return None
            if at.tzinfo is None:
                return None
            seconds = at.timestamp() - now
    return min(max(0.0, seconds), MAX_RESET_SECONDS) if math.isfinite(seconds) else None
