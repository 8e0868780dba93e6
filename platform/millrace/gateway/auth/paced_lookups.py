"""Key lookups for addresses that sent too many wrong keys: in batches, at a limited rate of queries.

For any number of wrong keys, a gateway sends at most ten such queries per second, each by an index. Every key is still
looked up within PACE_SECONDS plus the time of the query, so a valid key passes. The number of waiting lookups is
bounded by the number of connections.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import psycopg
from psycopg_pool import PoolTimeout

PACE_SECONDS = 0.1
MAX_KEYS = 1000  # in one query
Row: TypeAlias = tuple[bytes, bytes]  # (hash, payload)


class PacedLookups:
    """Batched lookups by possible hashes. Concurrent lookups of the same key share one result."""

    def __init__(self, read_rows: Callable[[Sequence[bytes]], Awaitable[dict[bytes, bytes]]]) -> None:
        self._read_rows = read_rows
        self._waiting: dict[tuple[bytes, ...], asyncio.Future[Row | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def read_row(self, hashes: tuple[bytes, ...]) -> Row | None:
        """Return the row of the first hash that has one, or None.

        Raises:
            psycopg.Error, PoolTimeout: the database cannot be reached.
        """
        future = self._waiting.get(hashes)
        if future is None:
            future = self._waiting[hashes] = asyncio.get_running_loop().create_future()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
        return await asyncio.shield(future)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(PACE_SECONDS)
            batch = list(itertools.islice(self._waiting.items(), MAX_KEYS))
            for hashes, _ in batch:
                del self._waiting[hashes]
            try:
                rows = await self._read_rows([key_hash for hashes, _ in batch for key_hash in hashes])
            except (psycopg.Error, PoolTimeout) as exc:
                for _, future in batch:
                    future.set_exception(exc)
                    future.exception()  # retrieved here in case all waiters were cancelled
                continue
            for hashes, future in batch:
                future.set_result(next(((key_hash, rows[key_hash]) for key_hash in hashes if key_hash in rows), None))
