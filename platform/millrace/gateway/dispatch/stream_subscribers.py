"""The readers of each stream. A generation is cancelled only when its last reader has left."""

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

READER_SECONDS = 10  # how long a reader's mark outlives it


class StreamSubscribers:
    """Marks in the broker: `millrace:subscribers:<request>`, a sorted set of readers by the Unix time at which they
    count as gone, and `left` on the request's claim once the client that asked has gone."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker

    async def mark(self, request_id: str, reader: str) -> None:
        """Somebody reads; to be said again within `READER_SECONDS`."""
        key = _key(request_id)
        async with self._broker.pipeline(transaction=False) as pipe:
            pipe.zadd(key, {reader: time.time() + READER_SECONDS})
            pipe.expire(key, 2 * READER_SECONDS)
            await pipe.execute()

    @asynccontextmanager
    async def reading(self, request_id: str) -> AsyncIterator[str]:
        """Somebody reads until the context's end; gives the reader's name."""
        reader = secrets.token_hex(8)
        await self.mark(request_id, reader)
        marking = asyncio.create_task(self._mark_again(request_id, reader))
        try:
            yield reader
        finally:
            await cancel_and_wait([marking])

    async def _mark_again(self, request_id: str, reader: str) -> None:
        while True:
            await asyncio.sleep(READER_SECONDS / 3)
            with contextlib.suppress(redis.RedisError):
                await self.mark(request_id, reader)

    async def any(self, request_id: str) -> bool:
        """Whether somebody resumed the stream and still reads."""
        try:
            return bool(await self._broker.zcount(_key(request_id), time.time(), "+inf"))
        except redis.RedisError:
            return True  # who cannot be asked is not cut off

    async def first_left(self, request_id: str) -> None:
        """Record that the first client left and intends to return."""
        try:
            await self._broker.hset(claim_key(request_id, 0), "left", "1")
        except redis.RedisError:
            return  # then no reader who leaves ends it: it ends by itself

    async def leave(self, request_id: str, reader: str) -> bool:
        """Remove a reader. Return whether no reader is left, including the first client."""
        await self._broker.zrem(_key(request_id), reader)
        if await self.any(request_id):
            return False
        claim: Any = await self._broker.hmget(claim_key(request_id, 0), "left", "gateway")
        left, gateway = claim
        return left is not None or gateway is None or not await self._broker.exists(gateway_stream(gateway.decode()))


def _key(request_id: str) -> str:
    return f"millrace:subscribers:{request_id}"
