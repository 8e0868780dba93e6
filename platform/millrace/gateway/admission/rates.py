"""Rate limits in responses: headers and error texts."""

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
_SCOPE_NAMES = {"key": "this API key", "project": "this project", "tenant": "this account"}


def headers(limit_statuses: Iterable[LimitStatus]) -> Headers:
    """Return `x-ratelimit-…` headers for requests and tokens, each of the limit with the least left."""
    found: Headers = []
    for family, status in _most_used(limit_statuses, _FAMILIES):
        values = {"limit": status.check.limit, "remaining": status.remaining, "reset": duration(status.reset_ms)}
        found += [(f"x-ratelimit-{name}-{family}".encode(), str(value).encode()) for name, value in values.items()]
    return found


def anthropic_headers(limit_statuses: Iterable[LimitStatus], now: datetime) -> Headers:
    """Return the `anthropic-ratelimit-…` headers. Reset times are absolute."""
    found: Headers = []
    for family, status in _most_used(limit_statuses, _FINER):
        full_at = now + timedelta(milliseconds=status.reset_ms + 999)
        values = {"limit": status.check.limit, "remaining": status.remaining, "reset": f"{full_at:%Y-%m-%dT%H:%M:%SZ}"}
        found += [
            (f"anthropic-ratelimit-{family}-{name}".encode(), str(value).encode()) for name, value in values.items()
        ]
    return found


def _most_used(
    limit_statuses: Iterable[LimitStatus], families: Iterable[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[str, LimitStatus]]:
    """Yield the limit with the least left of each family that has enforced limits."""
    enforced = [status for status in limit_statuses if status.check.group == ENFORCED]
    for family, counts in families:
        of_family = [status for status in enforced if status.check.counts in counts]
        if of_family:
            yield family, min(of_family, key=lambda status: status.share)


def duration(milliseconds: int) -> str:
    """Return a duration such as `120ms`, `1s`, `6m0s` or `23h59m59s`. From one second on, seconds are rounded up."""
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def describe(check: LimitCheck) -> str:
    """Return the limit in words, such as `10 requests per minute for this API key and the model 'm'`."""
    scope = _SCOPE_NAMES[check.set.scope] + (f" and the model {check.set.model!r}" if check.set.model else "")
    if check.name == "concurrency":
        return f"{check.limit} concurrent requests (concurrency) for {scope}"
    if check.name == "long_prompt_concurrency":
        return f"{check.limit} concurrent long prompts (concurrency) for {scope}"
    nouns = {"requests": "requests", "input": "input tokens", "output": "output tokens", "total": "tokens"}
    return f"{check.limit} {nouns[check.counts]} per {_PERIODS[check.period]} for {scope}"
