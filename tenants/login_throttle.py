"""Login throttling: growing delays per account, per IP address and per known device. State is in Valkey.

Each attempt to guess a secret is counted before the secret is checked, atomically in all its counters, so attempts
that run concurrently cannot pass a limit together. A correct secret takes its count back. A counter that has reached
its free attempts closes for a time that doubles with each further failure. While a counter is closed, the secret is not
checked at all.

An attempt from a device that has signed in to the account before uses only the counter of that device. Failures from
elsewhere therefore never delay it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
import structlog

from inference_worker.contract.script_files import read_script

log = structlog.get_logger(__name__)
UNAVAILABLE_SECONDS = 5  # retry delay while Valkey cannot be reached
IPV6_PREFIX = 64  # the network of one customer


@dataclass(frozen=True)
class Limit:
    """The limit of a counter. After `free` failures, each failure closes it, for `first` and then twice as long."""

    free: int
    first: timedelta
    longest: timedelta
    forget: timedelta = timedelta(hours=24)  # after the last failure


ACCOUNT = Limit(5, timedelta(seconds=5), timedelta(minutes=15))
ADDRESS = Limit(30, timedelta(seconds=5), timedelta(minutes=15))
DEVICE = Limit(10, timedelta(seconds=5), timedelta(minutes=5), timedelta(hours=1))

_LUA = Path(__file__).parent / "lua"
_BEGIN = read_script(_LUA / "begin_attempt.lua")
_UNCOUNT = read_script(_LUA / "uncount_attempt.lua")


class Throttled(Exception):
    """A rejected attempt. The secret was not checked; retry after `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"wait {seconds} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Counter:
    key: str
    limit: Limit


@dataclass(frozen=True)
class Attempt:
    """A counted attempt. Call `succeed` if the secret is correct."""

    client: redis.Redis
    counters: tuple[Counter, ...]
    closed: tuple[int, ...]

    def succeed(self) -> None:
        """Uncount the attempt, and reset the counter of its device."""
        keys = [counter.key for counter in self.counters]
        try:
            if all(counter.limit is DEVICE for counter in self.counters):
                self.client.delete(*keys)
            else:
                self.client.eval(_UNCOUNT, len(keys), *keys, *(str(until) for until in self.closed))
        except redis.RedisError as exc:  # the count remains, so the limit is stricter
            log.warning("broker_unreachable", error=str(exc))


class Throttle:
    """The counters of a platform. `clock` returns Unix seconds."""

    def __init__(self, client: redis.Redis, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock

    def begin(self, step: str, account: str, address: str, device: str = "") -> Attempt:
        """Count an attempt at a step ("password", "code", "reset") before its secret is checked.

        `account` is the user name as entered, which may not exist. `device` is the ID of a device that has signed in as
        this user, or empty.

        Raises:
            Throttled: a counter is closed, or Valkey cannot be reached.
        """
        counters = _counters(step, account.strip().lower(), address, device)
        now = int(self._clock() * 1000)
        try:
            wait, *closed = self._run(now, counters)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise Throttled(UNAVAILABLE_SECONDS) from exc
        if wait > 0:
            raise Throttled(-(-wait // 1000))
        return Attempt(self._client, counters, tuple(closed))

    def _run(self, now: int, counters: Sequence[Counter]) -> list[int]:
        arguments = [_milliseconds(counter.limit) for counter in counters]
        keys = [counter.key for counter in counters]
        answer: Any = self._client.eval(
            _BEGIN, len(keys), *keys, now, *(argument for row in arguments for argument in row)
        )
        return [int(argument) for argument in answer]


def _counters(step: str, account: str, address: str, device: str) -> tuple[Counter, ...]:
    if device:
        return (Counter(_key("device", step, account, device), DEVICE),)
    return (
        Counter(_key("account", step, account), ACCOUNT),
        Counter(_key("address", network_of(address)), ADDRESS),
    )


def _key(kind: str, *of: str) -> str:
    """Return the counter's name in Valkey. Its length does not depend on the input."""
    digest = hashlib.sha256("\0".join(of).encode("utf-8", "replace")).hexdigest()
    return f"millrace:throttle:{kind}:{digest[:32]}"


def network_of(address: str) -> str:
    """Return the address that is counted: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip_address = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip_address.version == 4:
        return str(ip_address)
    if ip_address.ipv4_mapped is not None:
        return str(ip_address.ipv4_mapped)
    return str(ipaddress.ip_network((ip_address, IPV6_PREFIX), strict=False))


def _milliseconds(limit: Limit) -> tuple[int, ...]:
    times = (limit.first, limit.longest, limit.forget)
    return (limit.free, *(duration // timedelta(milliseconds=1) for duration in times))
