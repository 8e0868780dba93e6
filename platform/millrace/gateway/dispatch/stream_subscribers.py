"""The subscribers of each stream. An execution is cancelled only when its last subscriber has left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis

from inference_worker.contract.messages import claim_key, gateway_stream
from millrace.gateway.core.asyncio_utils import cancel_and_wait

SUBSCRIBER_TTL_SECONDS = 10  # how long a subscriber counts after its last refresh


class StreamSubscribers:
    """The subscribers of streams, stored in Valkey.

    `millrace:subscribers:<request>` is a sorted set of subscriber IDs by the Unix time at which they expire. The field
    `left` of the request's claim is set when the client that sent the request has disconnected.
    """

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker

    async def refresh(self, request_id: str, subscriber_id: str) -> None:
        """Add or refresh a subscriber, which expires after `SUBSCRIBER_TTL_SECONDS`."""
        key = _key(request_id)
        async with self._broker.pipeline(transaction=False) as pipe:
            pipe.zadd(key, {subscriber_id: time.time() + SUBSCRIBER_TTL_SECONDS})
            pipe.expire(key, 2 * SUBSCRIBER_TTL_SECONDS)
            await pipe.execute()

    @asynccontextmanager
    async def subscription(self, request_id: str) -> AsyncIterator[str]:
        """Subscribe to the stream for the duration of the context. Yields the subscriber's ID."""
        subscriber_id = secrets.token_hex(8)
        await self.refresh(request_id, subscriber_id)
        refreshing = asyncio.create_task(self._keep_fresh(request_id, subscriber_id))
        try:
            yield subscriber_id
        finally:
            await cancel_and_wait([refreshing])

    async def _keep_fresh(self, request_id: str, subscriber_id: str) -> None:
        while True:
            await asyncio.sleep(SUBSCRIBER_TTL_SECONDS / 3)
            with contextlib.suppress(redis.RedisError):
                await self.refresh(request_id, subscriber_id)

    async def has_any(self, request_id: str) -> bool:
        """Return whether the stream has a subscriber other than the client that sent the request."""
        try:
            return bool(await self._broker.zcount(_key(request_id), time.time(), "+inf"))
        except redis.RedisError:
            return True  # if it is not known, the stream continues

    async def record_client_left(self, request_id: str) -> None:
        """Record that the client that sent the request has disconnected and intends to return."""
        try:
            await self._broker.hset(claim_key(request_id, 0), "left", "1")
        except redis.RedisError:
            return  # then the execution is not cancelled when subscribers leave

    async def leave(self, request_id: str, subscriber_id: str) -> bool:
        """Remove a subscriber. Return whether none is left, including the client that sent the request."""
        await self._broker.zrem(_key(request_id), subscriber_id)
        if await self.has_any(request_id):
            return False
        claim: Any = await self._broker.hmget(claim_key(request_id, 0), "left", "gateway")
        left, gateway = claim
        return left is not None or gateway is None or not await self._broker.exists(gateway_stream(gateway.decode()))


def _key(request_id: str) -> str:
    return f"millrace:subscribers:{request_id}"
