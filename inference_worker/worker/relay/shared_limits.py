"""The capacity of upstream credentials, shared by the relays of all workers through Valkey.

A request enters its credential's capacity before each attempt. It waits while the upstream's rate limits or the
credential's concurrency limit are reached. Requests of one credential wait in order, and only the first one repeats the
check. Changes are sent in one round trip for all requests that are ready at that time.

If the last check found at least half of each rate limit left, a request does not wait for the reply of its own check.

A running request of a credential with a concurrency limit has a lease. Its worker renews it, and removes it at the end.
If the worker is killed, the lease expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from inference_worker.contract.command_connection import Command, CommandConnection
from inference_worker.contract.script_files import read_script
from inference_worker.contract.upstream_limits import (
    LEASE_MS,
    MAX_RESET_SECONDS,
    RateLimitState,
    leases_key,
    limits_key,
    read_state,
)
from inference_worker.worker.relay.failures import MAX_RETRY_AFTER, MAX_SHARED_RETRY_AFTER
from inference_worker.worker.relay.rate_limit_headers import ReportedLimit

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25  # how often a free place of another worker is looked for
RENEW_SECONDS = LEASE_MS / 3000
UNAVAILABLE_SECONDS = 1.0  # while Valkey is unavailable, until the next check of a concurrency limit
MAX_BATCH = 128  # scripts in one round trip
COLLECT_SECONDS = 0.02  # for changes whose replies no request waits for
MAX_RENEWALS = 1000  # leases in one call
MAX_STATES = 1000  # credentials whose state is in memory

_LUA = Path(__file__).parent / "lua"
_NOW = read_script(_LUA / "limit_state.lua")
ENTER = _NOW + read_script(_LUA / "enter.lua", poll_ms=round(POLL_SECONDS * 1000))
LEARN = _NOW + read_script(_LUA / "learn.lua")
RENEW = _NOW + read_script(_LUA / "renew_leases.lua")
# KEYS leases; ARGV lease.
LEAVE = "redis.call('ZREM', KEYS[1], ARGV[1])"


@dataclass(frozen=True)
class Wait:
    """The time to wait for capacity, and the reason: retry_after, requests, tokens or concurrency."""

    seconds: float
    reason: str


@dataclass(eq=False)
class Entry:
    """A request that has entered the capacity of its credential."""

    credential: int
    lease: str = ""  # empty: the credential has no concurrency limit
    sent: int | None = None  # requests of the credential that were sent before; None: not known yet
    sent_tokens: int | None = None


@dataclass(eq=False)
class _Capacity:
    """The requests of this process that wait for one credential."""

    line: asyncio.Lock = field(default_factory=asyncio.Lock)  # its owner is the first in line
    freed: asyncio.Event = field(default_factory=asyncio.Event)  # a place of this process became free
    users: int = 0


@dataclass(eq=False)
class _Call:
    script: str
    keys: tuple[str, ...]
    args: tuple[str | int | float, ...]
    reply: asyncio.Future[Any]  # None: Valkey was unavailable
    replaces: bool = False  # an earlier call with the same script and keys that was not sent yet


class SharedLimits:
    """The capacity of the credentials of one upstream and model, for one relay. Used only in the relay's loop."""

    def __init__(self, broker: redis.asyncio.Redis, base_url: str, model: str) -> None:
        self._broker = broker
        self._commands = CommandConnection(broker)
        self._base_url = base_url
        self._model = model
        self._capacities: dict[int, _Capacity] = {}
        self._entries: dict[str, Entry] = {}  # lease -> entry
        self._ample: set[int] = set()  # credentials whose last check found much capacity
        self._calls: list[_Call] = []
        self._has_calls = asyncio.Event()
        self._is_urgent = asyncio.Event()  # a request waits for a reply
        self._tasks: list[asyncio.Task[None]] = []
        self.waits: Counter[str] = Counter()  # requests that had to wait, or were rejected, by the first reason
        self.states: dict[int, RateLimitState] = {}  # credential -> the last known state

    def start(self) -> None:
        """Start the tasks that send calls and renew leases. Call it in the loop."""
        self._tasks = [asyncio.create_task(self._send_calls()), asyncio.create_task(self._renew_leases())]

    async def close(self) -> None:
        """Remove the leases, and close the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(RedisError, OSError):
            for entry in self._entries.values():
                await self._broker.zrem(leases_key(entry.credential), entry.lease)
        self._commands.close()
        await self._broker.aclose()

    async def enter(
        self, credential: int, max_concurrency: int | None, tokens: int, deadline: float, *, is_shared: bool = True
    ) -> Entry | Wait:
        """Wait in line until there is capacity, and take it. The caller must then call `leave`.

        Args:
            tokens: the expected number of the prompt's tokens.
            deadline: Unix seconds. In the past: do not wait.
            is_shared: whether several tenants use the credential, so that its headers can pause it only for a minute.

        Returns:
            A wait that would exceed the deadline, instead of an entry.
        """
        longest = round((MAX_SHARED_RETRY_AFTER if is_shared else MAX_RESET_SECONDS) * 1000)
        if max_concurrency is None and credential in self._ample:
            return self._enter_immediately(credential, tokens, longest)
        capacity = self._capacities.setdefault(credential, _Capacity())
        capacity.users += 1
        try:
            if not capacity.line.locked():
                found = await self._try_enter(credential, max_concurrency, tokens, longest)
                if isinstance(found, Wait):
                    self.waits[found.reason] += 1
                if isinstance(found, Entry) or time.time() + found.seconds >= deadline:
                    return found
            elif time.time() >= deadline:
                return Wait(POLL_SECONDS, "queue")
            async with capacity.line:
                while True:
                    capacity.freed.clear()
                    found = await self._try_enter(credential, max_concurrency, tokens, longest)
                    if isinstance(found, Entry) or time.time() + found.seconds >= deadline:
                        return found
                    with suppress(TimeoutError):
                        async with asyncio.timeout(found.seconds):
                            await capacity.freed.wait()
        finally:
            capacity.users -= 1
            if not capacity.users:
                self._capacities.pop(credential, None)

    def _enter_immediately(self, credential: int, tokens: int, longest: int) -> Entry:
        """Take capacity without waiting for the reply, which decides about the next request."""
        entry = Entry(credential)
        keys = limits_key(self._base_url, self._model, credential), leases_key(credential)

        def note(done: asyncio.Future[Any]) -> None:
            if not done.cancelled():
                self._note_entry(entry, done.result())

        self._call(ENTER, keys, (tokens, "", "", LEASE_MS, longest)).add_done_callback(note)
        return entry

    def _note_entry(self, entry: Entry, found: Any) -> None:
        """Record the reply of a check: what was sent before the request, and whether much capacity is left."""
        if found is None or found[0] > 0 or not found[4]:
            self._ample.discard(entry.credential)
        elif len(self._ample) < MAX_STATES:
            self._ample.add(entry.credential)
        if found is not None and found[0] <= 0:  # otherwise the request was not counted
            entry.sent, entry.sent_tokens = int(found[2]), int(found[3])

    def leave(self, entry: Entry) -> None:
        """Free the request's place."""
        if not entry.lease or self._entries.pop(entry.lease, None) is None:
            return
        self._call(LEAVE, (leases_key(entry.credential),), (entry.lease,), is_urgent=True)
        if (capacity := self._capacities.get(entry.credential)) is not None:
            capacity.freed.set()

    def learn(self, entry: Entry, reported: Sequence[ReportedLimit], retry_after: float | None) -> None:
        """Store what a response's headers report, for all relays."""
        if not reported and retry_after is None:
            return
        if retry_after is not None or any(2 * limit.remaining < limit.limit for limit in reported):
            self._ample.discard(entry.credential)
        pause = "" if retry_after is None else round(min(retry_after, MAX_RETRY_AFTER) * 1000)
        sent = ["", ""] if entry.sent is None or entry.sent_tokens is None else [entry.sent, entry.sent_tokens]
        args: list[str | int | float] = [*sent, pause]
        for limit in reported:
            args += [limit.dimension, limit.limit, limit.remaining, round(limit.reset_seconds * 1000)]
        keys = (limits_key(self._base_url, self._model, entry.credential),)
        is_pause = retry_after is not None
        reply = self._call(LEARN, keys, tuple(args), is_urgent=is_pause, replaces=not is_pause)
        reply.add_done_callback(lambda done: self._note_state(entry.credential, done))

    def _note_state(self, credential: int, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or reply.result() is None:
            return
        flat = reply.result()
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        if credential not in self.states and len(self.states) >= MAX_STATES:
            self.states.clear()
        state = self.states[credential] = read_state(fields, float(fields[b"now"]))
        buckets = (state.requests_left, state.requests_limit), (state.tokens_left, state.tokens_limit)
        if any(left is not None and limit is not None and 2 * left < limit for left, limit in buckets):
            self._ample.discard(credential)

    async def _try_enter(self, credential: int, max_concurrency: int | None, tokens: int, longest: int) -> Entry | Wait:
        keys = limits_key(self._base_url, self._model, credential), leases_key(credential)
        lease = "" if max_concurrency is None else secrets.token_hex(8)
        limit = "" if max_concurrency is None else max_concurrency
        try:
            found = await self._call(ENTER, keys, (tokens, lease, limit, LEASE_MS, longest), is_urgent=True)
        except asyncio.CancelledError:
            if lease:
                self._call(LEAVE, keys[1:], (lease,), is_urgent=True)  # it may have been taken
            raise
        if found is None:
            return Entry(credential) if max_concurrency is None else Wait(UNAVAILABLE_SECONDS, "unavailable")
        entry = Entry(credential, lease)
        self._note_entry(entry, found)
        if found[0] > 0:
            return Wait(found[0] / 1000, found[1].decode())
        if lease:
            self._entries[lease] = entry
        return entry

    # Calls of Valkey, in order.

    def _call(
        self,
        script: str,
        keys: tuple[str, ...],
        args: tuple[str | int | float, ...],
        *,
        is_urgent: bool = False,
        replaces: bool = False,
    ) -> asyncio.Future[Any]:
        """Send a call with the next round trip.

        Args:
            is_urgent: do not wait for further calls.
            replaces: drop an earlier call like this one if it was not sent yet.
        """
        reply = asyncio.get_running_loop().create_future()
        call = _Call(script, keys, args, reply, replaces)
        if replaces:
            kept = [other for other in self._calls if not (other.replaces and other.keys == keys)]
            for other in self._calls:
                if other.replaces and other.keys == keys:
                    other.reply.cancel()
            self._calls = kept
        self._calls.append(call)
        self._has_calls.set()
        if is_urgent:
            self._is_urgent.set()
        return reply

    async def _send_calls(self) -> None:
        while True:
            await self._has_calls.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_SECONDS):
                    await self._is_urgent.wait()
            calls, self._calls = self._calls[:MAX_BATCH], self._calls[MAX_BATCH:]
            if not self._calls:
                self._has_calls.clear()
                self._is_urgent.clear()
            try:
                replies = await self._execute(calls)
            except (RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                replies = [None] * len(calls)
            except Exception:  # otherwise all requests would wait
                log.exception("upstream_limits_failed")
                replies = [None] * len(calls)
            for call, reply in zip(calls, replies, strict=True):
                if not call.reply.done():
                    call.reply.set_result(reply)

    async def _execute(self, calls: Sequence[_Call]) -> list[Any]:
        """Return the replies; None for a script that failed."""
        replies: list[Any] = []
        for evaluate in ("EVALSHA", "EVAL"):  # EVAL: Valkey has lost the scripts
            commands: list[Command] = []
            for call in calls:
                script = _SHA[call.script] if evaluate == "EVALSHA" else call.script
                commands.append((evaluate, script, len(call.keys), *call.keys, *call.args))
            replies = await self._exchange(commands)
            # The scripts can run twice: entering with the same lease is idempotent, and the others replace values.
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
        for reply in replies:
            if isinstance(reply, Exception):
                log.warning("upstream_limits_failed", error=str(reply))
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands, and again if the connection was lost."""
        try:
            return await self._commands.exchange(commands)
        except RedisConnectionError:
            return await self._commands.exchange(commands)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            held: dict[int, list[str]] = {}
            for lease, entry in self._entries.items():
                held.setdefault(entry.credential, []).append(lease)
            for credential, leases in held.items():
                for first in range(0, len(leases), MAX_RENEWALS):
                    args: tuple[str | int, ...] = (LEASE_MS, *leases[first : first + MAX_RENEWALS])
                    self._call(RENEW, (leases_key(credential),), args)


_SHA = {
    script: hashlib.sha1(script.encode()).hexdigest()  # noqa: S324 - the name of a script in Valkey
    for script in (ENTER, LEARN, RENEW, LEAVE)
}
