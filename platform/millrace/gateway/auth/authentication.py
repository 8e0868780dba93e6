"""Authentication: finds the snapshot of an API key in this process's cache, in Valkey or in PostgreSQL.

Only key snapshots are read here, never Django's models (see tenants.keys.snapshot). A cached snapshot is valid while
the change feed is read (millrace.gateway.auth.revocation): a change removes it within one poll. While the change feed
cannot be read, the caches are not used and each request queries the database. If the database does not answer either,
this process's cache is used in the stale window (millrace.gateway.auth.stale_window), which is empty by default.

Wrong keys are limited for each client address (tenants.keys.wrong_keys). Cached keys are never affected. If an
address is over its limit, its other keys are looked up in batches (millrace.gateway.auth.paced_lookups): a valid key
passes 0.1 s later than usual, and a wrong key is rejected with 429. Wrong keys have a separate cache, so that they do
not evict valid keys.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.auth.paced_lookups import PacedLookups
from millrace.gateway.auth.stale_window import ANSWER_SECONDS, StaleWindow, answer_within
from millrace.gateway.core.activity import Activity
from millrace.gateway.core.errors import ApiError, unavailable
from tenants.keys import snapshot
from tenants.keys.ip_allowlist import is_allowed
from tenants.keys.playground_tokens import PlaygroundToken
from tenants.keys.process_throttle import process_throttle
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.keys.wrong_keys import WrongKeyThrottle
from tenants.outbox.change_feed import ChangeEvent

log = structlog.get_logger(__name__)

FRESH_SECONDS = 0.75  # cached entries are not used if the last successful poll is older
UNKNOWN_SECONDS = 1.0  # how long an unknown key is cached, since no change event names it
DATABASE_SECONDS = 0.5  # the timeout of one lookup
COPIES_SECONDS = snapshot.VALKEY_SECONDS + 5  # after this time every copy in Valkey is newer than a change
CACHED_KEYS = 10_000
CACHED_UNKNOWN_KEYS = 1_000
MAX_KEY_CHARACTERS = 256

_BY_HASH = "SELECT key_hash, payload FROM tenants_apikeysnapshot WHERE key_hash = ANY(%s)"
_USER_HAS_ACCESS = "SELECT FROM tenants_user WHERE id = %s AND is_active AND session_generation = %s"
_BY_ID = "SELECT key_id, payload FROM tenants_apikeysnapshot WHERE key_id = ANY(%s)"


class KeyStore:
    """The snapshots of API keys, with caches in memory and in Valkey."""

    def __init__(
        self,
        broker: redis.Redis,
        database: AsyncConnectionPool,
        peppers: Sequence[str],
        wrong_keys: WrongKeyThrottle | None = None,
        activity: Activity | None = None,
        stale_window: StaleWindow | None = None,
    ) -> None:
        self.stale_window = stale_window or StaleWindow()
        self._broker = broker
        self._database = database
        self._peppers = peppers
        self._wrong_keys = wrong_keys or process_throttle()
        self._activity = activity
        self._paced = PacedLookups(self._read_rows)
        self._cache: OrderedDict[bytes, ApiKeySnapshot] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()  # unknown keys -> monotonic time of the lookup
        self._changes = 0  # the number of times that entries were dropped
        self._polled_at = float("-inf")
        # Until these times copies in Valkey are not used: of all tenants, since changes before the start were not seen,
        # and of tenants that have changed since, since their writer may have failed to update Valkey.
        self._distrust_until = time.monotonic() + COPIES_SECONDS
        self._distrusted: dict[int, float] = {}
        self.used: dict[int, float] = {}  # key ID -> Unix time of its last use, until it is stored
        self.outdated: dict[bytes, bytes] = {}  # hash with an old pepper -> with the newest, until it is stored

    async def authenticate(self, headers: dict[bytes, bytes], scope: str, address: str | None = None) -> ApiKeySnapshot:
        """Return the key snapshot of the request.

        Raises:
            ApiError: 401, the key is missing or invalid; 403, it lacks the scope; 429, too many wrong keys were sent.
        """
        secret = _secret_from(headers)
        await self._begin_request()
        return self._admit(await self.find(secret, address), scope, address)

    async def authenticate_playground_token(
        self, token: PlaygroundToken, scope: str, address: str | None = None
    ) -> ApiKeySnapshot:
        """Return the current snapshot of the key that a playground token was issued for.

        Raises:
            ApiError: as for `authenticate`, and 401 if the token has expired.
        """
        if not token.holds(time.time_ns() // 1000):
            raise ApiError("invalid_api_key", "The token has expired. Request a new one.")
        await self._begin_request()
        await self.check_user(token)
        try:
            key = (await self.by_id([token.key_id])).get(token.key_id)
        except (psycopg.Error, PoolTimeout) as exc:
            raise _unreachable(exc) from exc
        return self._admit(key, scope, address)

    async def _begin_request(self) -> None:
        """End the gateway's rest, so that the request uses current data."""
        if self._activity is not None:
            await self._activity.begin_request()

    async def check_user(self, token: PlaygroundToken) -> None:
        """Check that the user whom the token was issued to still has access.

        Raises:
            ApiError: 401, the user was deactivated or signed out everywhere; 503, the database cannot be reached.
        """
        try:
            async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
                cursor = await connection.execute(_USER_HAS_ACCESS, [token.user_id, token.generation])
                has_access = await cursor.fetchone() is not None
        except (psycopg.Error, PoolTimeout) as exc:
            raise _unreachable(exc) from exc
        if not has_access:
            raise ApiError("invalid_api_key", "Your session has ended. Sign in again.")

    def _admit(self, key: ApiKeySnapshot | None, scope: str, address: str | None) -> ApiKeySnapshot:
        if key is None:
            raise incorrect_key_error()
        if (error := key_error(key)) is not None:
            raise error
        if not is_allowed(address, key.allowed_ip_ranges):
            raise ApiError(
                "invalid_api_key",
                "This API key may not be used from this IP address. Add the address to the key's allowed addresses.",
            )
        if scope not in key.scopes:
            raise ApiError("insufficient_scope", f"This API key lacks the scope {scope!r}. Use a key with this scope.")
        self.used[key.key_id] = time.time()
        return key

    async def find(self, secret: str, address: str | None = None) -> ApiKeySnapshot | None:
        """Return the key's snapshot, or None for a wrong key.

        Raises:
            ApiError: 429 for a wrong key of an address that has sent too many; 503 if the key cannot be looked up.
        """
        hashes = snapshot.possible_hashes(secret, self._peppers)
        now = time.monotonic()
        fresh = now - self._polled_at < FRESH_SECONDS
        cached = self._cache.get(hashes[0])
        if cached is not None and (fresh or self.stale_window.replaces_query(cached.tenant_id)):
            return cached
        is_within_limit = self._wrong_keys.take(address)
        if fresh and now - self._unknown.get(hashes[0], float("-inf")) < UNKNOWN_SECONDS:
            found = None
        else:
            try:
                found = await self._look_up_or_use_stale(hashes, now, fresh=fresh, paced=not is_within_limit)
            except BaseException:
                if is_within_limit:
                    self._wrong_keys.release(address)
                raise
        if found is None:
            self.reject_wrong(address, is_within_limit)
        elif is_within_limit:
            self._wrong_keys.release(address)
        return found

    def reject_wrong(self, address: str | None, is_within_limit: bool) -> None:
        """Count a wrong key or playground token.

        Raises:
            ApiError: 429, the address is over its limit.
        """
        self._wrong_keys.count(address, is_within_limit)
        if not is_within_limit:
            wait = self._wrong_keys.retry_after(address)
            raise ApiError(
                "rate_limit_exceeded", "Too many wrong API keys from your IP address. Retry later.", retry_after=wait
            )

    def reject_playground_token(self, address: str | None, message: str) -> ApiError:
        """Return the rejection of a wrong playground token: 401, or 429 if the address has sent too many."""
        try:
            self.reject_wrong(address, self._wrong_keys.take(address))
        except ApiError as exc:
            return exc
        return ApiError("invalid_api_key", message)

    async def _look_up_or_use_stale(
        self, hashes: tuple[bytes, ...], now: float, *, fresh: bool, paced: bool
    ) -> ApiKeySnapshot | None:
        """Look the key up. If the database does not answer, use this process's cache in the stale window."""
        cached = self._cache.get(hashes[0])
        lookup = self._look_up_until_current(hashes, now, fresh=fresh, paced=paced)
        if cached is None or not self.stale_window.may_cover(cached.tenant_id):
            return await lookup
        try:
            return await answer_within(ANSWER_SECONDS, lookup)
        except (ApiError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError):
                self.stale_window.note_error(exc)
            cached = self._cache.get(hashes[0])  # a change may have removed it meanwhile
            if cached is None or not self.stale_window.covers(cached.tenant_id):
                raise unavailable() from exc
            return cached

    async def _look_up_until_current(
        self, hashes: tuple[bytes, ...], now: float, *, fresh: bool, paced: bool
    ) -> ApiKeySnapshot | None:
        changes = -1
        while changes != self._changes:  # the result may be older than a change
            changes = self._changes
            found = await self._look_up(hashes, now, copies=fresh and not paced, paced=paced)
        if found is None:
            self._unknown[hashes[0]] = now
            while len(self._unknown) > CACHED_UNKNOWN_KEYS:
                self._unknown.popitem(last=False)
        else:
            self._cache[hashes[0]] = found
            self._cache.move_to_end(hashes[0])
            while len(self._cache) > CACHED_KEYS:
                self._cache.popitem(last=False)
        return found

    @property
    def newest_pepper(self) -> str:
        """Return the ID of the pepper that new key hashes use."""
        return snapshot.pepper_id(self._peppers[0])

    def note_poll(self, polled_at: float) -> None:
        """Record that all changes up to the monotonic time `polled_at` were applied."""
        self._polled_at = polled_at
        self.stale_window.note_poll(polled_at)

    def forget(self) -> None:
        """Clear the caches, since changes may have been missed."""
        self._changes += 1
        self._cache.clear()
        self._unknown.clear()
        self._distrust_until = time.monotonic() + COPIES_SECONDS

    def drop(self, changes: Collection[ChangeEvent]) -> None:
        """Remove the cached entries of the keys that changed."""
        self._changes += 1
        until = time.monotonic() + COPIES_SECONDS
        self._distrusted = {t: end for t, end in self._distrusted.items() if end > until - COPIES_SECONDS}
        self._distrusted.update((change.tenant_id, until) for change in changes)
        keys = {change.key_id for change in changes if change.key_id is not None}
        tenants = {change.tenant_id for change in changes if change.key_id is None}
        self._unknown.clear()
        for key_hash, cached in list(self._cache.items()):
            if cached.key_id in keys or cached.tenant_id in tenants:
                del self._cache[key_hash]

    async def by_id(self, key_ids: Collection[int]) -> dict[int, ApiKeySnapshot]:
        """Read the current snapshots from the database.

        Raises:
            psycopg.Error, PoolTimeout: the database cannot be reached.
        """
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            cursor = await connection.execute(_BY_ID, [list(key_ids)], binary=True)
            return {key_id: snapshot.decode(bytes(payload)) for key_id, payload in await cursor.fetchall()}

    async def _look_up(
        self, hashes: tuple[bytes, ...], now: float, *, copies: bool, paced: bool
    ) -> ApiKeySnapshot | None:
        copies = copies and now > self._distrust_until
        if copies and (copied := await self._copy(hashes)) is not None:
            if self._distrusted.get(copied.tenant_id, 0) < now:
                return copied
            copies = False
        try:
            row = await (self._paced.read_row(hashes) if paced else self._read_row(hashes))
        except (psycopg.Error, PoolTimeout) as exc:
            self.stale_window.note_error(exc)
            raise _unreachable(exc) from exc
        self.stale_window.note_answer()
        if row is None:
            return None
        key_hash, payload = row
        if key_hash != hashes[0]:
            self.outdated[key_hash] = hashes[0]
        if copies:
            with contextlib.suppress(redis.RedisError):  # the copy is optional
                await self._broker.set(snapshot.valkey_name(key_hash), payload, ex=snapshot.VALKEY_SECONDS, nx=True)
        return snapshot.decode(payload)

    async def _copy(self, hashes: Sequence[bytes]) -> ApiKeySnapshot | None:
        try:
            copies: Any = await self._broker.mget([snapshot.valkey_name(key_hash) for key_hash in hashes])
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            return None
        snapshots = [snapshot.decode(copy) for copy in copies if copy is not None]
        # Two exist while a key changes its pepper.
        return max(snapshots, key=lambda candidate: candidate.version, default=None)

    async def _read_row(self, hashes: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        rows = await self._read_rows(hashes)
        return next(iter(rows.items()), None)

    async def _read_rows(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            cursor = await connection.execute(_BY_HASH, [list(hashes)], binary=True)
            return {bytes(key_hash): bytes(payload) for key_hash, payload in await cursor.fetchall()}


def _unreachable(exc: Exception) -> ApiError:
    log.warning("database_unreachable", error=str(exc))
    return unavailable()


def incorrect_key_error() -> ApiError:
    return ApiError("invalid_api_key", "Incorrect API key provided. The key is unknown, revoked or expired.")


def key_error(key: ApiKeySnapshot) -> ApiError | None:
    """Return the error for a key that is revoked, expired or suspended, or None if it is valid."""
    if key.revoked or (key.expires_at is not None and key.expires_at <= time.time_ns() // 1000):
        return incorrect_key_error()
    if key.suspended:
        return ApiError("tenant_suspended", "This account is suspended. Contact the operator.")
    return None


def _secret_from(headers: dict[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        token = headers.get(b"x-api-key") or headers.get(b"api-key", b"")  # `api-key` is Azure's
    secret = token.strip().decode("latin-1")
    if not secret:
        raise ApiError(
            "invalid_api_key", "No API key provided. Send it as `Authorization: Bearer sk-…` or `x-api-key: sk-…`."
        )
    if len(secret) > MAX_KEY_CHARACTERS:
        raise ApiError("invalid_api_key", "Incorrect API key provided.")
    return secret
