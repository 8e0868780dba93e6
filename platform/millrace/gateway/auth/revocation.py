"""Key revocation: a revoked key stops working everywhere within a second, including its running streams.

The change feed (tenants.outbox.change_feed) is polled four times a second, and less often while the gateway rests
(core.activity); a message over Valkey triggers a poll earlier. Each change is applied immediately: cached snapshots are
dropped, and the active requests of revoked keys end with an error event. A poll succeeds only if all changes were
applied. Without a successful poll in the last 750 ms, every request queries the database
(millrace.gateway.auth.stale_window has the exception).

After a failover of PostgreSQL, which the feed reports, all caches are cleared: they may contain what was lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Protocol

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore, incorrect_key_error, key_error
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from tenants.outbox import change_feed
from tenants.outbox.change_feed import ChangeEvent, Cursor

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25
POLL_TIMEOUT_SECONDS = 0.5  # a poll that takes longer fails
LIMITS_CHANGE = "limits"  # the change type of rate limits and budgets
USES_SECONDS = 300.0  # how often the keys' times of last use are stored


class ChangeListener(Protocol):
    """A cache that drops entries when tenants or keys change."""

    def drop(self, changes: Collection[ChangeEvent]) -> None: ...

    def forget(self) -> None: ...

    def note_poll(self, at: float) -> None: ...


class ChangeFeedReader:
    """The reader of the change feed of one gateway. It informs the caches and ends requests of revoked keys."""

    def __init__(
        self,
        database: AsyncConnectionPool,
        broker: redis.Redis,
        keys: KeyStore,
        active_requests: ActiveRequests,
        *others: ChangeListener,
        gateway_id: str,
        activity: Activity | None = None,
    ) -> None:
        """Create a reader that also informs `others`, which cache data of tenants and keys."""
        self._others = others
        self._gateway_id = gateway_id
        self._database = database
        self._broker = broker
        self._keys = keys
        self._active_requests = active_requests
        self._cursor: Cursor | None = None
        self._polled_at = time.monotonic()
        self._unapplied: list[ChangeEvent] = []  # read from the feed, not yet applied
        self._applied: list[int] = []  # IDs of applied limit and budget changes, to be acknowledged
        self._acknowledging: set[asyncio.Task[None]] = set()
        self._poll_pauses = Poll(activity)
        self._uses_at = time.monotonic() + USES_SECONDS
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        """Stop, and store the last uses of keys. While the database does not answer, they are lost."""
        await cancel_and_wait(self._tasks)
        await self._write_last_uses()

    async def _watch(self) -> None:
        while True:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(POLL_TIMEOUT_SECONDS):
                    await self._poll()
                for cache in (self._keys, *self._others):
                    cache.note_poll(started_at)
                self._failing = False
                self._acknowledge()
                if time.monotonic() >= self._uses_at:
                    await self._write_last_uses()
                await self._rehash_outdated()
            except (psycopg.Error, PoolTimeout, TimeoutError, OSError) as exc:
                if not self._failing:
                    log.warning("change_log_unreadable", error=str(exc) or type(exc).__name__)
                self._failing = True
            await self._poll_pauses.pause(max(0.01, started_at + POLL_SECONDS - time.monotonic()))

    async def _poll(self) -> None:
        now = time.monotonic()
        async with self._database.connection(timeout=POLL_TIMEOUT_SECONDS) as connection:
            cursor = self._cursor
            if cursor is None or now - self._polled_at > change_feed.RETENTION_SECONDS / 2:
                cursor = await self._restart(connection)
            rows = await (await connection.execute(change_feed.POLL, [cursor.horizon])).fetchall()
            if cursor.is_outdated(rows):
                log.warning("database_timeline_changed", before=cursor.timeline)
                cursor = await self._restart(connection)
                rows = await (await connection.execute(change_feed.POLL, [cursor.horizon])).fetchall()
        self._polled_at = now
        self._unapplied += cursor.take(rows)
        if self._unapplied:
            for cache in (self._keys, *self._others):
                cache.drop(self._unapplied)
            await self._end_revoked()
            self._applied += [change.id for change in self._unapplied if change.change_type == LIMITS_CHANGE]
            self._unapplied = []

    async def _restart(self, connection: psycopg.AsyncConnection[Any]) -> Cursor:
        """Clear the caches, look the keys of active requests up again, and return the current position."""
        row = await (await connection.execute(change_feed.NOW)).fetchone()
        assert row is not None  # noqa: S101  (a SELECT of one row)
        for cache in (self._keys, *self._others):
            cache.forget()
        self._cursor = Cursor(*row)
        self._applied = []
        self._unapplied = [
            ChangeEvent(0, "unseen", tenant_id, key_id)
            for tenant_id, key_id in self._active_requests.tenants_and_keys()
        ]
        return self._cursor

    def _acknowledge(self) -> None:
        """Acknowledge the applied changes in the background, so that a poll does not wait for Valkey."""
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

    async def _end_revoked(self) -> None:
        """End the active requests of keys that were revoked or deleted."""
        affected = self._active_requests.affected_keys(self._unapplied)
        if not affected:
            return
        found = await self._keys.by_id(affected)
        for key_id in affected:
            error = key_error(found[key_id]) if key_id in found else incorrect_key_error()
            if error is not None:
                log.info(
                    "api_key_revoked_in_flight", key_id=key_id, requests_ended=self._active_requests.end(key_id, error)
                )

    async def _write_last_uses(self) -> None:
        """Store when keys were last used. If the database does not answer, the next write includes these uses."""
        self._uses_at = time.monotonic() + USES_SECONDS
        used = dict(self._keys.used)
        if not used:
            return
        times = [datetime.fromtimestamp(used_at, UTC) for used_at in used.values()]
        try:
            async with asyncio.timeout(POLL_TIMEOUT_SECONDS), self._database.connection() as connection:
                await connection.execute(change_feed.RECORD_USAGE, [list(used), times])
        except (psycopg.Error, PoolTimeout, TimeoutError, OSError) as exc:
            log.warning("key_use_write_failed", keys=len(used), error=str(exc) or type(exc).__name__)
            return
        self._keys.used = {key_id: at for key_id, at in self._keys.used.items() if used.get(key_id) != at}

    async def _rehash_outdated(self) -> None:
        """Replace key hashes of an old pepper by those of the newest."""
        while self._keys.outdated:
            old, new = self._keys.outdated.popitem()
            try:
                async with self._database.connection(timeout=POLL_TIMEOUT_SECONDS) as connection:
                    await connection.execute(change_feed.REHASH, [old, new, self._keys.newest_pepper])
            except (psycopg.Error, PoolTimeout) as exc:  # the key's next look-up tries again
                log.warning("key_rehash_failed", error=str(exc))

    async def _listen(self) -> None:
        """Wait for messages about changes, and poll immediately after each."""
        while True:
            try:
                async with self._broker.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(change_feed.CHANNEL)
                    self._poll_pauses.run_now()  # a message may have been sent before the subscription
                    while True:
                        message = await pubsub.get_message(timeout=30)
                        if message is not None:
                            if message["data"].isdigit():
                                self._keys.stale_window.note_change(int(message["data"]))
                            self._poll_pauses.run_now()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(1)
