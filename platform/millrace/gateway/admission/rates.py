"""How limits are told to callers: in headers and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from millrace.gateway.admission.limits import ENFORCED
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from tenants.limits.token_buckets import DAY, MINUTE

Headers = list[tuple[bytes, bytes]]
COUNTED = ("requests", "input", "output", "total")
_FAMILIES = (("requests", ("requests",)), ("tokens", ("input", "output", "total")))
_FINER = (*_FAMILIES, ("input-tokens", ("input",)), ("output-tokens", ("output",)))
_PERIODS = {MINUTE: "minute", DAY: "day"}
_WHOSE = {"key": "this API key", "project": "this project", "tenant": "this account"}


def headers(limit_statuses: Iterable[LimitStatus]) -> Headers:
    """`x-ratelimit-…` for requests and for tokens, each of the limit with the least left. Without a limit, none."""
    found: Headers = []
    for family, least in _least(limit_statuses, _FAMILIES):
        values = {"limit": least.check.limit, "remaining": least.remaining, "reset": duration(least.reset_ms)}
        found += [(f"x-ratelimit-{name}-{family}".encode(), str(value).encode()) for name, value in values.items()]
    return found


def anthropic_headers(limit_statuses: Iterable[LimitStatus], now: datetime) -> Headers:
    """Return the same as `anthropic-ratelimit-…`; resets are points in time."""
    found: Headers = []
    for family, least in _least(limit_statuses, _FINER):
        full_at = now + timedelta(milliseconds=least.reset_ms + 999)
        values = {"limit": least.check.limit, "remaining": least.remaining, "reset": f"{full_at:%Y-%m-%dT%H:%M:%SZ}"}
        found += [
            (f"anthropic-ratelimit-{family}-{name}".encode(), str(value).encode()) for name, value in values.items()
        ]
    return found


def _least(
    limit_statuses: Iterable[LimitStatus], families: Iterable[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[str, LimitStatus]]:
    """Of each family that has limits, the one with the least left."""
    enforced = [standing for standing in limit_statuses if standing.check.group == ENFORCED]
    for family, counts in families:
        of_family = [standing for standing in enforced if standing.check.counts in counts]
        if of_family:
            yield family, min(of_family, key=lambda standing: standing.share)


def duration(milliseconds: int) -> str:
    """`120ms`, `1s`, `6m0s`, `23h59m59s`: whole seconds from one second on, rounded up."""
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def describe(check: LimitCheck) -> str:
    """Return the limit in words: `10 requests per minute for this API key and the model 'm'`."""
    whose = _WHOSE[check.set.scope] + (f" and the model {check.set.model!r}" if check.set.model else "")
    if check.name == "concurrency":
        return f"{check.limit} requests at once (concurrency) for {whose}"
    if check.name == "long_prompt_concurrency":
        return f"{check.limit} long jobs at once (concurrency) for {whose}"
    what = {"requests": "requests", "input": "input tokens", "output": "output tokens", "total": "tokens"}
    return f"{check.limit} {what[check.counts]} per {_PERIODS[check.period]} for {whose}"
