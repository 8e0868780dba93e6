"""How limits are told to callers: in headers and in words."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.gateway.limits import DAY, ENFORCED, MINUTE, Check, Standing

Headers = list[tuple[bytes, bytes]]
COUNTED = ("requests", "input", "output", "total")
_FAMILIES = (("requests", ("requests",)), ("tokens", ("input", "output", "total")))
_PERIODS = {MINUTE: "minute", DAY: "day"}
_WHOSE = {"key": "this API key", "project": "this project", "tenant": "this account"}


def headers(standings: Iterable[Standing]) -> Headers:
    """`x-ratelimit-…` for requests and for tokens, each of the limit with the least left. Without a limit, none."""
    enforced = [standing for standing in standings if standing.check.group == ENFORCED]
    found: Headers = []
    for family, counts in _FAMILIES:
        of_family = [standing for standing in enforced if standing.check.counts in counts]
        if not of_family:
            continue
        least = min(of_family, key=lambda standing: standing.share)
        values = {"limit": least.check.limit, "remaining": least.remaining, "reset": duration(least.reset_ms)}
        found += [(f"x-ratelimit-{name}-{family}".encode(), str(value).encode()) for name, value in values.items()]
    return found


def duration(milliseconds: int) -> str:
    """`120ms`, `1s`, `6m0s`, `23h59m59s`: whole seconds from one second on, rounded up."""
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def describe(check: Check) -> str:
    """The limit in words: `10 requests per minute for this API key and the model 'm'`."""
    whose = _WHOSE[check.set.scope] + (f" and the model {check.set.model!r}" if check.set.model else "")
    if check.name == "concurrency":
        return f"{check.limit} requests at once (concurrency) for {whose}"
    if check.name == "long_cap":
        return f"{check.limit} long jobs at once (concurrency) for {whose}"
    what = {"requests": "requests", "input": "input tokens", "output": "output tokens", "total": "tokens"}
    return f"{check.limit} {what[check.counts]} per {_PERIODS[check.period]} for {whose}"
