"""A gateway's key store with its change feed reader."""

from __future__ import annotations

import redis.asyncio as redis
from psycopg_pool import AsyncConnectionPool

from millrace.environment.configuration import platform_settings
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore
from millrace.gateway.auth.revocation import ChangeFeedReader
from millrace.gateway.auth.stale_window import StaleWindow
from millrace.gateway.core.activity import Activity
from millrace.gateway.core.errors import ApiError


class Watched:
    """A gateway's key store with its change feed reader."""

    def __init__(self, broker: redis.Redis, database: AsyncConnectionPool, stale_seconds: float = 0.0) -> None:
        self.live = ActiveRequests()
        self.activity = Activity(lambda: bool(self.live))
        self.stale_window = StaleWindow(stale_seconds)
        self.keys = KeyStore(
            broker,
            database,
            platform_settings().key_peppers,
            activity=self.activity,
            stale_window=self.stale_window,
        )
        self.watcher = ChangeFeedReader(
            database, broker, self.keys, self.live, gateway_id="gw-test", activity=self.activity
        )

    async def error_code(self, secret: str) -> str | None:
        """Return the error code of an authentication with this key, or None."""
        try:
            await self.keys.authenticate({b"x-api-key": secret.encode()}, "inference", "10.1.2.3")
        except ApiError as exc:
            return exc.code
        return None
