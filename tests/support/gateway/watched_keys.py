"""A gateway's key store that follows changes of keys."""

from __future__ import annotations

import redis.asyncio as redis
from psycopg_pool import AsyncConnectionPool

from millrace.conf.environment import platform_settings
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore
from millrace.gateway.auth.revocation import ChangeFeedReader
from millrace.gateway.core.errors import ApiError


class Watched:
    """A gateway's key store with its watcher, and a key that it serves."""

    def __init__(self, broker: redis.Redis, database: AsyncConnectionPool) -> None:
        self.live = ActiveRequests()
        self.keys = KeyStore(broker, database, platform_settings().key_peppers)
        self.watcher = ChangeFeedReader(database, broker, self.keys, self.live, gateway_id="gw-test")

    async def fault(self, secret: str) -> str | None:
        """Why the key may not be used; None if it may."""
        try:
            await self.keys.authenticate({b"x-api-key": secret.encode()}, "inference", "10.1.2.3")
        except ApiError as exc:
            return exc.code
        return None
