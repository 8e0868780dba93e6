"""Cross-origin requests of browsers to /v1 (CORS), always without credentials such as cookies.

A preflight carries no key. It allows each origin that the platform or some tenant allows. So does an error without a
valid key, so that a page can tell its user that the key is wrong. Other responses are readable for the origins of the
platform and of the key's tenant only. A page can read all headers of a response that it can read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Iterable, Mapping

import psycopg
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

REFRESH_SECONDS = 5.0  # how long the origins of all tenants are cached
DATABASE_SECONDS = 0.5
MAX_AGE_SECONDS = 600  # how long a browser may cache a preflight
_TENANTS_ORIGINS = "SELECT DISTINCT jsonb_array_elements_text(allowed_origins) FROM tenants_tenant"
_METHODS = b"GET, HEAD, POST, DELETE"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")
Headers = list[tuple[bytes, bytes]]


class CrossOrigin:
    """The origins that the platform and the tenants allow."""

    def __init__(self, platform_origins: Collection[str], database: AsyncConnectionPool) -> None:
        self._platform = frozenset(platform_origins)
        self._database = database
        self._tenants: frozenset[str] = frozenset()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def response_headers(
        self, headers: Mapping[bytes, bytes], key: ApiKeySnapshot | None, names: Iterable[bytes], *, is_refusal: bool
    ) -> Headers:
        """Return the headers that let a page of the request's origin read the response.

        Args:
            names: of the response's headers.
            is_refusal: whether it is an error without a valid key.
        """
        origin = headers.get(b"origin")
        if origin is None:
            return []
        allowed = self._platform.union(() if key is None else key.allowed_origins)
        if not _is_allowed(origin, allowed) and not (
            is_refusal and _is_allowed(origin, await self._read_tenants_origins())
        ):
            return [(b"vary", b"origin")]
        exposed = (b"access-control-expose-headers", b", ".join(dict.fromkeys(names)))
        return [(b"access-control-allow-origin", origin), exposed, (b"vary", b"origin")]

    async def preflight_headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """Return the headers of a preflight's response."""
        origin = headers.get(b"origin", b"")
        vary = (b"vary", b"origin, access-control-request-headers")
        if not _is_allowed(origin, self._platform) and not _is_allowed(origin, await self._read_tenants_origins()):
            return [vary]
        allowed = [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", str(MAX_AGE_SECONDS).encode()),
        ]
        requested = headers.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES.fullmatch(requested):
            allowed.append((b"access-control-allow-headers", requested))
        return [*allowed, vary]

    async def _read_tenants_origins(self) -> frozenset[str]:
        """Return the origins of all tenants, which are at most REFRESH_SECONDS old while the database answers."""
        if time.monotonic() - self._read_at > REFRESH_SECONDS:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            await asyncio.shield(self._reading)  # it continues if this request's client disconnects
        return self._tenants

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(DATABASE_SECONDS), self._database.connection() as connection:
                rows = await (await connection.execute(_TENANTS_ORIGINS)).fetchall()
            self._tenants = frozenset(origin for (origin,) in rows)
        except (psycopg.Error, PoolTimeout, TimeoutError) as exc:
            log.warning("database_unreachable", error=str(exc))
        finally:
            self._read_at, self._reading = time.monotonic(), None


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def _is_allowed(origin: bytes, allowed: Collection[str]) -> bool:
    return "*" in allowed or origin.decode("latin-1") in allowed
