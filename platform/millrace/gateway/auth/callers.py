"""The callers of the console and the management API, found before Django runs, to limit their concurrent requests.

A caller is an API key, or the user of a session. Neither is authenticated here: Django does that, and rejects keys that
are revoked or not allowed. Found callers are cached, because a key's tenant and a session's user never change. Lookups
use a connection pool of their own, so that neither Django's requests nor the gateway's lookups of keys delay them.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs

import psycopg
import structlog
from django.conf import settings
from django.http import parse_cookie
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tenants.isolation import db_roles
from tenants.keys import snapshot

log = structlog.get_logger(__name__)

CONNECTIONS = 2
WAIT_SECONDS = 2.0
CACHED_CALLERS = 10_000
CACHE_SECONDS = 60.0  # after this time, new memberships count
_KEY = "SELECT id, tenant_id FROM tenants_apikey WHERE key_hash = ANY(%s)"
_SESSION = "SELECT session_data FROM django_session WHERE session_key = %s AND expire_date > now()"
_TENANTS = """
SELECT t.slug, t.id FROM tenants_membership m JOIN tenants_tenant t ON t.id = m.tenant_id WHERE m.user_id = %s
"""


@dataclass(frozen=True)
class Caller:
    """An API key, or a user with the IDs of the user's tenants by slug. Operators have no tenant of their own."""

    name: str
    tenants: Mapping[str, int] = field(default_factory=dict)
    key_tenant_id: int | None = None

    def tenant_id(self, path: str, query: bytes) -> int | None:
        """Return the caller's tenant that a URL is about, or None."""
        if self.key_tenant_id is not None:
            return self.key_tenant_id
        if path.startswith("/t/"):
            return self.tenants.get(path.split("/", 3)[2])
        if not path.startswith("/api/"):
            return None
        slugs = parse_qs(query.decode("latin-1")).get("tenant") or list(self.tenants)
        return self.tenants.get(slugs[-1]) if slugs else None  # without a name, Django requires a single tenant


class CallerStore:
    """Finds callers by the headers of their requests."""

    def __init__(self, database_url: str, peppers: Sequence[str]) -> None:
        self._peppers = peppers
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection] = AsyncConnectionPool(
            db_roles.as_role(database_url, db_roles.SYSTEM),
            min_size=0,
            max_size=CONNECTIONS,
            open=False,
            kwargs={"autocommit": True},
        )
        self._cache: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()  # digest -> caller, time of the lookup

    async def start(self) -> None:
        await self._pool.open(wait=False)

    async def stop(self) -> None:
        await self._pool.close()

    async def find(self, credential: str) -> Caller | None:
        """Return the caller of a credential of `credential_of`.

        None: the credential is unknown, or the database cannot be reached.
        """
        digest = hashlib.sha256(credential.encode()).digest()
        caller, found_at = self._cache.get(digest, (None, 0.0))
        if caller is not None and time.monotonic() - found_at < CACHE_SECONDS:
            return caller
        try:
            async with self._pool.connection(timeout=WAIT_SECONDS) as connection:
                kind, _, secret = credential.partition(" ")
                caller = await (self._key(connection, secret) if kind == "key" else self._user(connection, secret))
        except (psycopg.Error, PoolTimeout) as exc:
            log.warning("database_unreachable", error=str(exc))
            return None
        if caller is not None:
            self._cache[digest] = caller, time.monotonic()
            self._cache.move_to_end(digest)
            if len(self._cache) > CACHED_CALLERS:
                self._cache.popitem(last=False)
        return caller

    async def _key(self, connection: psycopg.AsyncConnection, secret: str) -> Caller | None:
        hashes = list(snapshot.possible_hashes(secret, self._peppers))
        row = await (await connection.execute(_KEY, [hashes])).fetchone()
        return None if row is None else Caller(f"key {row[0]}", key_tenant_id=row[1])

    async def _user(self, connection: psycopg.AsyncConnection, session_key: str) -> Caller | None:
        row = await (await connection.execute(_SESSION, [session_key])).fetchone()
        sessions: Any = import_module(settings.SESSION_ENGINE)  # only its decoder, which reads no database
        user_id = None if row is None else sessions.SessionStore().decode(row[0]).get("_auth_user_id")
        if user_id is None:
            return None
        tenants = await (await connection.execute(_TENANTS, [int(user_id)])).fetchall()
        return Caller(f"user {user_id}", dict(tenants))


def credential_of(path: str, raw_headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the API key or the session by which Django authenticates a request, or None. It is not checked."""
    headers: dict[bytes, bytes] = {}
    for name, value in raw_headers:  # joined as by Django
        headers[name] = (
            (b"; " if name == b"cookie" else b",").join((headers[name], value)) if name in headers else value
        )
    if path.startswith("/api/") and (secret := _secret(headers)):
        return f"key {secret}"
    cookies = parse_cookie(headers.get(b"cookie", b"").decode("latin-1"))
    session_key = cookies.get(settings.SESSION_COOKIE_NAME, "")
    return f"session {session_key}" if session_key.isascii() and session_key.isalnum() else None


def _secret(headers: Mapping[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("latin-1")
