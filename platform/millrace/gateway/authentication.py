"""Who is calling: key -> snapshot, from this process' cache, else Valkey, else Postgres.

Only snapshots are read here, never Django's models (see tenants.snapshot).
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.errors import OVERLOADED, ApiError
from tenants import snapshot
from tenants.snapshot import KeySnapshot

log = structlog.get_logger(__name__)

PROCESS_SECONDS = 1.0  # a revoked key is known everywhere within this
CACHED_KEYS = 10_000
MAX_KEY_CHARACTERS = 256


class KeyStore:
    """Finds the snapshot of an API key."""

    def __init__(self, broker: redis.Redis, database: AsyncConnectionPool, peppers: Sequence[str]) -> None:
        self._broker = broker
        self._database = database
        self._peppers = peppers
        self._cache: OrderedDict[bytes, tuple[float, KeySnapshot | None]] = OrderedDict()

    async def authenticate(self, headers: dict[bytes, bytes], scope: str) -> KeySnapshot:
        """The caller's snapshot.

        Raises:
            ApiError: 401 for no key or a dead one, 403 if it may not do this.
        """
        key = await self.find(_secret_from(headers))
        if key is None or key.revoked or (key.expires_at is not None and key.expires_at <= time.time_ns() // 1000):
            raise ApiError("invalid_api_key", "Incorrect API key provided: it is unknown, revoked or expired.")
        if key.suspended:
            raise ApiError("tenant_suspended", "This account is suspended; please contact the operator.")
        if scope not in key.scopes:
            raise ApiError("insufficient_scope", f"This API key may not be used here: it lacks the scope {scope!r}.")
        return key

    async def find(self, secret: str) -> KeySnapshot | None:
        hashes = snapshot.possible_hashes(secret, self._peppers)
        cached = self._cache.get(hashes[0])
        if cached is not None and time.monotonic() - cached[0] < PROCESS_SECONDS:
            return cached[1]
        asked_at = time.monotonic()  # before the look-up: what it finds is as old as this
        found = await self._look_up(hashes)
        self._cache[hashes[0]] = (asked_at, found)
        self._cache.move_to_end(hashes[0])
        while len(self._cache) > CACHED_KEYS:
            self._cache.popitem(last=False)
        return found

    async def _look_up(self, hashes: Sequence[bytes]) -> KeySnapshot | None:
        try:
            copies: Any = await self._broker.mget([snapshot.valkey_name(key_hash) for key_hash in hashes])
        except redis.RedisError as fault:
            log.warning("broker_unreachable", error=str(fault))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from fault
        if held := [snapshot.decode(copy) for copy in copies if copy is not None]:
            return max(held, key=lambda found: found.version)  # two while a key moves to another pepper
        row = await self._read_row(hashes)
        if row is None:
            return None
        key_hash, payload = row
        with contextlib.suppress(redis.RedisError):  # a copy saves time, no more
            await self._broker.set(snapshot.valkey_name(key_hash), payload, ex=snapshot.VALKEY_SECONDS, nx=True)
        return snapshot.decode(payload)

    async def _read_row(self, hashes: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        try:
            async with self._database.connection(timeout=2) as connection:
                cursor = await connection.execute(
                    "SELECT key_hash, payload FROM tenants_keysnapshot WHERE key_hash = ANY(%s)",
                    [list(hashes)],
                    binary=True,
                )
                row = await cursor.fetchone()
        except (psycopg.OperationalError, PoolTimeout) as fault:
            log.warning("database_unreachable", error=str(fault))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from fault
        return None if row is None else (bytes(row[0]), bytes(row[1]))


def _secret_from(headers: dict[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        token = headers.get(b"x-api-key", b"")
    secret = token.strip().decode("latin-1")
    if not secret:
        raise ApiError(
            "invalid_api_key", "No API key provided: send it as `Authorization: Bearer sk-…` or `x-api-key: sk-…`."
        )
    if len(secret) > MAX_KEY_CHARACTERS:
        raise ApiError("invalid_api_key", "Incorrect API key provided.")
    return secret
