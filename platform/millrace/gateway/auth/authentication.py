"""Who is calling: key -> snapshot, from this process' cache, else Valkey, else Postgres.

Only snapshots are read here, never Django's models (see tenants.keys.snapshot). What is cached holds for as long as the
change log is read (millrace.gateway.auth.revocation): a change drops it within a poll. While the change log cannot be
read nothing cached counts, and the database is asked for each request.

Wrong keys are limited per address (tenants.keys.wrong_keys). A cached key is never affected. Another key of an address
over its limit is looked up in batches (millrace.gateway.auth.paced_lookups): a valid one passes, 0.1 s later than
usual, and a wrong one gets a 429. Wrong keys have a cache of their own, so that they do not push valid ones out.
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
from millrace.gateway.core.errors import OVERLOADED, ApiError
from tenants.keys import snapshot
from tenants.keys.ip_allowlist import allowed
from tenants.keys.playground_tokens import PlaygroundToken
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.keys.wrong_keys import WrongKeyThrottle, process_throttle
from tenants.outbox.change_feed import ChangeEvent

log = structlog.get_logger(__name__)

FRESH_SECONDS = 0.75  # without a successful poll for longer, no cached entry is used
UNKNOWN_SECONDS = 1.0  # how long a key that does not exist is remembered: no change will name it
DATABASE_SECONDS = 0.5  # one look-up: an answer is due within a second whatever fails
COPIES_SECONDS = snapshot.VALKEY_SECONDS + 5  # after this no copy in Valkey is older than the change that came before
CACHED_KEYS = 10_000
CACHED_UNKNOWN_KEYS = 1_000
MAX_KEY_CHARACTERS = 256

_BY_HASH = "SELECT key_hash, payload FROM tenants_apikeysnapshot WHERE key_hash = ANY(%s)"
_MAY_USE_TICKET = "SELECT FROM tenants_user WHERE id = %s AND is_active AND session_generation = %s"
_BY_ID = "SELECT key_id, payload FROM tenants_apikeysnapshot WHERE key_id = ANY(%s)"


class KeyStore:
    """Finds the snapshot of an API key."""

    def __init__(
        self,
        broker: redis.Redis,
        database: AsyncConnectionPool,
        peppers: Sequence[str],
        wrong_keys: WrongKeyThrottle | None = None,
    ) -> None:
        self._broker = broker
        self._database = database
        self._peppers = peppers
        self._wrong_keys = wrong_keys or process_throttle()
        self._paced = PacedLookups(self._read_rows)
        self._cache: OrderedDict[bytes, ApiKeySnapshot] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()  # keys that do not exist -> since when that is known
        self._changes = 0  # how often something was dropped
        self._polled_at = float("-inf")
        # Valkey's copies are not believed before: of any tenant (what changed before our start, we have not seen), and
        # of the tenants that changed since (the process that changed them may not have reached Valkey).
        self._distrust_until = time.monotonic() + COPIES_SECONDS
        self._distrusted: dict[int, float] = {}
        self.used: dict[int, float] = {}  # key -> Unix time of its last use, until it has been written down
        self.outdated: dict[bytes, bytes] = {}  # hash under an old pepper -> under the newest, until it is stored so

    async def authenticate(self, headers: dict[bytes, bytes], scope: str, address: str | None = None) -> ApiKeySnapshot:
        """Return the caller's snapshot.

        Raises:
            ApiError: 401 for no key or a dead one, 403 if it may not do this, 429 for one of too many wrong keys.
        """
        return self._admit(await self.find(_secret_from(headers), address), scope, address)

    async def authenticate_ticket(
        self, ticket: PlaygroundToken, scope: str, address: str | None = None
    ) -> ApiKeySnapshot:
        """Return the key that a person was given a ticket for, as it is now.

        Raises:
            ApiError: as for `authenticate`, and once the ticket has run out.
        """
        if not ticket.holds(time.time_ns() // 1000):
            raise ApiError("invalid_api_key", "The ticket has run out: get a new one.")
        await self.check_user(ticket)
        try:
            key = (await self.by_id([ticket.key_id])).get(ticket.key_id)
        except (psycopg.Error, PoolTimeout) as exc:
            raise _unreachable(exc) from exc
        return self._admit(key, scope, address)

    async def check_user(self, ticket: PlaygroundToken) -> None:
        """Check that the user whom the ticket was given to still has access.

        Raises:
            ApiError: 401, the user was deactivated or signed out everywhere; 503, the database cannot be reached.
        """
        try:
            async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
                cursor = await connection.execute(_MAY_USE_TICKET, [ticket.user_id, ticket.generation])
                has_access = await cursor.fetchone() is not None
        except (psycopg.Error, PoolTimeout) as exc:
            raise _unreachable(exc) from exc
        if not has_access:
            raise ApiError("invalid_api_key", "Your session has ended. Sign in again.")

    def _admit(self, key: ApiKeySnapshot | None, scope: str, address: str | None) -> ApiKeySnapshot:
        if key is None:
            raise incorrect()
        if (fault := dead(key)) is not None:
            raise fault
        if not allowed(address, key.allowed_ip_ranges):
            raise ApiError("invalid_api_key", "This API key may not be used from this address.")
        if scope not in key.scopes:
            raise ApiError("insufficient_scope", f"This API key may not be used here: it lacks the scope {scope!r}.")
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
        if fresh and (cached := self._cache.get(hashes[0])) is not None:
            return cached
        is_within_limit = self._wrong_keys.take(address)
        if fresh and now - self._unknown.get(hashes[0], float("-inf")) < UNKNOWN_SECONDS:
            found = None
        else:
            try:
                found = await self._look_up_until_current(hashes, now, fresh=fresh, paced=not is_within_limit)
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
        """Count a wrong key or ticket.

        Raises:
            ApiError: 429 if it was not within the address's limit.
        """
        self._wrong_keys.count(address, is_within_limit)
        if not is_within_limit:
            wait = self._wrong_keys.retry_after(address)
            raise ApiError("rate_limit_exceeded", "Too many wrong API keys from your address.", retry_after=wait)

    def reject_ticket(self, address: str | None, message: str) -> ApiError:
        """Return the rejection of a wrong ticket: 401, or 429 if the address has sent too many."""
        try:
            self.reject_wrong(address, self._wrong_keys.take(address))
        except ApiError as exc:
            return exc
        return ApiError("invalid_api_key", message)

    async def _look_up_until_current(
        self, hashes: tuple[bytes, ...], now: float, *, fresh: bool, paced: bool
    ) -> ApiKeySnapshot | None:
        changes = -1
        while changes != self._changes:  # what was found may be from before a change
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
        """The id of the pepper that keys are to be stored under."""
        return snapshot.pepper_id(self._peppers[0])

    def polled(self, at: float) -> None:
        """Record that all changes up to the monotonic time `at` were applied."""
        self._polled_at = at

    def forget(self) -> None:
        """Drop everything: changes may have gone by unseen."""
        self._changes += 1
        self._cache.clear()
        self._unknown.clear()
        self._distrust_until = time.monotonic() + COPIES_SECONDS

    def drop(self, changes: Collection[ChangeEvent]) -> None:
        """Forget what is held of the keys that changed."""
        self._changes += 1
        until = time.monotonic() + COPIES_SECONDS
        self._distrusted = {t: end for t, end in self._distrusted.items() if end > until - COPIES_SECONDS}
        self._distrusted.update((change.tenant_id, until) for change in changes)
        keys = {change.key_id for change in changes if change.key_id is not None}
        tenants = {change.tenant_id for change in changes if change.key_id is None}
        self._unknown.clear()
        for key_hash, held in list(self._cache.items()):
            if held.key_id in keys or held.tenant_id in tenants:
                del self._cache[key_hash]

    async def by_id(self, key_ids: Collection[int]) -> dict[int, ApiKeySnapshot]:
        """Return the snapshots as the database has them now.

        Raises:
            psycopg.Error, PoolTimeout: it cannot be asked.
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
            raise _unreachable(exc) from exc
        if row is None:
            return None
        key_hash, payload = row
        if key_hash != hashes[0]:
            self.outdated[key_hash] = hashes[0]
        if copies:
            with contextlib.suppress(redis.RedisError):  # a copy saves time, no more
                await self._broker.set(snapshot.valkey_name(key_hash), payload, ex=snapshot.VALKEY_SECONDS, nx=True)
        return snapshot.decode(payload)

    async def _copy(self, hashes: Sequence[bytes]) -> ApiKeySnapshot | None:
        try:
            copies: Any = await self._broker.mget([snapshot.valkey_name(key_hash) for key_hash in hashes])
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            return None
        held = [snapshot.decode(copy) for copy in copies if copy is not None]
        return max(held, key=lambda found: found.version, default=None)  # two while a key moves to another pepper

    async def _read_row(self, hashes: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        rows = await self._read_rows(hashes)
        return next(iter(rows.items()), None)

    async def _read_rows(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        async with self._database.connection(timeout=DATABASE_SECONDS) as connection:
            cursor = await connection.execute(_BY_HASH, [list(hashes)], binary=True)
            return {bytes(key_hash): bytes(payload) for key_hash, payload in await cursor.fetchall()}


def _unreachable(fault: Exception) -> ApiError:
    log.warning("database_unreachable", error=str(fault))
    return ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1)


def incorrect() -> ApiError:
    return ApiError("invalid_api_key", "Incorrect API key provided: it is unknown, revoked or expired.")


def dead(key: ApiKeySnapshot) -> ApiError | None:
    """Why nobody may use this key any more; None: it lives."""
    if key.revoked or (key.expires_at is not None and key.expires_at <= time.time_ns() // 1000):
        return incorrect()
    if key.suspended:
        return ApiError("tenant_suspended", "This account is suspended; please contact the operator.")
    return None


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
