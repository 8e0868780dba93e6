"""A key that is revoked stops working everywhere within a second, its running streams included.

Four times a second the change log is read (tenants.outbox.change_feed); a message over Valkey only hastens that. What
the log says is done at once: cached snapshots are dropped, and the requests of keys that died end with an error event.
A poll that did not do all of this does not count, and without one that counts for 750 ms every request asks the
database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Protocol

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore, dead, incorrect
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from tenants.outbox import change_feed
from tenants.outbox.change_feed import ChangeEvent, Cursor

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25
ANSWER_SECONDS = 0.5  # a poll that takes longer has failed
LIMITS = "limits"  # the change type of limits and budgets
USES_SECONDS = 10.0  # how often the keys' last uses are written down


class Remembers(Protocol):
    """Something that is to forget what has changed."""

    def drop(self, changes: Collection[ChangeEvent]) -> None: ...

    def forget(self) -> None: ...

    def polled(self, at: float) -> None: ...


class ChangeFeedReader:
    """Reads the change log for one gateway."""

    def __init__(
        self,
        database: AsyncConnectionPool,
        broker: redis.Redis,
        keys: KeyStore,
        live: ActiveRequests,
        *others: Remembers,
        gateway_id: str,
    ) -> None:
        """`others` remember things of tenants and keys as well."""
        self._others = others
        self._gateway_id = gateway_id
        self._database = database
        self._broker = broker
        self._keys = keys
        self._live = live
        self._cursor: Cursor | None = None
        self._polled_at = time.monotonic()
        self._open: list[ChangeEvent] = []  # read from the log, and not yet done
        self._applied: list[int] = []  # ids of changes of limits and budgets, not yet acknowledged
        self._acknowledging: set[asyncio.Task[None]] = set()
        self._hint = asyncio.Event()
        self._uses_at = time.monotonic() + USES_SECONDS
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    async def _watch(self) -> None:
        while True:
            self._hint.clear()
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._poll()
                for each in (self._keys, *self._others):
                    each.polled(began)
                self._failing = False
                self._acknowledge()
                await self._write_uses()
                await self._rebuild_store()
            except (psycopg.Error, PoolTimeout, TimeoutError, OSError) as exc:
                if not self._failing:
                    log.warning("change_log_unreadable", error=str(exc) or type(exc).__name__)
                self._failing = True
            try:
                async with asyncio.timeout(max(0.01, began + POLL_SECONDS - time.monotonic())):
                    await self._hint.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> None:
        now = time.monotonic()
        async with self._database.connection(timeout=ANSWER_SECONDS) as connection:
            if self._cursor is None or now - self._polled_at > change_feed.RETENTION_SECONDS / 2:
                row = await (await connection.execute(change_feed.NOW)).fetchone()
                assert row is not None  # noqa: S101  (a SELECT of one value)
                for each in (self._keys, *self._others):
                    each.forget()
                self._cursor = Cursor(int(row[0]))
                self._open = [
                    ChangeEvent(0, "unseen", tenant_id, key_id) for tenant_id, key_id in self._live.under_way()
                ]
            rows = await (await connection.execute(change_feed.POLL, [self._cursor.horizon])).fetchall()
        self._polled_at = now
        self._open += self._cursor.take(rows)
        if self._open:
            for each in (self._keys, *self._others):
                each.drop(self._open)
            await self._end_the_dead()
            self._applied += [change.id for change in self._open if change.change_type == LIMITS]
            self._open = []

    def _acknowledge(self) -> None:
        """Name this gateway among those that have applied the changes. NOTE: no poll waits for Valkey."""
        if self._applied:
            applied, self._applied = self._applied, []
            task = asyncio.create_task(self._write_applied(applied))
            self._acknowledging.add(task)
            task.add_done_callback(self._acknowledging.discard)

    async def _write_applied(self, applied: list[int]) -> None:
        try:
            async with self._broker.pipeline(transaction=False) as pipe:
                for change_id in applied:
                    pipe.sadd(change_feed.applied_key(change_id), self._gateway_id)
                    pipe.expire(change_feed.applied_key(change_id), change_feed.APPLIED_SECONDS)
                await pipe.execute()
        except (redis.RedisError, OSError) as exc:
            log.warning("change_acknowledgement_failed", changes=len(applied), error=str(exc))

    async def _end_the_dead(self) -> None:
        """End the requests of keys that are no more."""
        touched = self._live.touched(self._open)
        if not touched:
            return
        found = await self._keys.by_id(touched)
        for key_id in touched:
            fault = dead(found[key_id]) if key_id in found else incorrect()
            if fault is not None:
                log.info("api_key_revoked_in_flight", key_id=key_id, requests_ended=self._live.end(key_id, fault))

    async def _write_uses(self) -> None:
        """Write down when keys were last used."""
        if time.monotonic() < self._uses_at or not self._keys.used:
            return
        self._uses_at = time.monotonic() + USES_SECONDS
        used, self._keys.used = self._keys.used, {}
        try:
            async with self._database.connection(timeout=ANSWER_SECONDS) as connection:
                times = [datetime.fromtimestamp(at, UTC) for at in used.values()]
                await connection.execute(change_feed.RECORD_USAGE, [list(used), times])
        except (psycopg.Error, PoolTimeout) as exc:
            log.warning("key_use_write_failed", keys=len(used), error=str(exc))

    async def _rebuild_store(self) -> None:
        """Store keys that were found under an old pepper under the newest one."""
        while self._keys.outdated:
            old, new = self._keys.outdated.popitem()
            try:
                async with self._database.connection(timeout=ANSWER_SECONDS) as connection:
                    await connection.execute(change_feed.REHASH, [old, new, self._keys.newest_pepper])
            except (psycopg.Error, PoolTimeout) as exc:  # the key's next look-up tries again
                log.warning("key_rehash_failed", error=str(exc))

    async def _listen(self) -> None:
        """Hear of changes at once, where Valkey can be heard."""
        while True:
            try:
                async with self._broker.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(change_feed.CHANNEL)
                    self._hint.set()  # something may have been said before we listened
                    while True:
                        if await pubsub.get_message(timeout=30) is not None:
                            self._hint.set()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(1)
