"""Key lookups for addresses that sent too many wrong keys: batched, at a bounded rate of queries.

Whatever number of wrong keys arrives, a gateway sends the database at most ten queries a second for them, by an index.
Each key is still looked up, within PACE_SECONDS and the time of the query, so a valid key passes. The number of keys
that wait is bounded by the number of connections.
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
Row: TypeAlias = tuple[bytes, bytes]  # hash, payload


class PacedLookups:
    """Looks keys up by their possible hashes; the same key is looked up once for all who wait for it."""

    def __init__(self, read_rows: Callable[[Sequence[bytes]], Awaitable[dict[bytes, bytes]]]) -> None:
        self._read_rows = read_rows
        self._waiting: dict[tuple[bytes, ...], asyncio.Future[Row | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def read_row(self, hashes: tuple[bytes, ...]) -> Row | None:
        """Return the row under the first of the hashes that has one.

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
                rows = await self._read_rows([each for hashes, _ in batch for each in hashes])
            except (psycopg.Error, PoolTimeout) as exc:
                for _, future in batch:
                    future.set_exception(exc)
                    future.exception()  # whether or not someone still waits for it
                continue
            for hashes, future in batch:
                future.set_result(next(((each, rows[each]) for each in hashes if each in rows), None))
