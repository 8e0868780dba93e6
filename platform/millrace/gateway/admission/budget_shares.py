"""The share of its budgets that a key has left, for conditions of routing policies.

The shares are read from PostgreSQL and cached for a second. Amounts that are reserved, or leased to a gateway, count as
used. The budgets themselves are enforced by `budget_admission`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import LiteralString
from weakref import WeakValueDictionary

import psycopg
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

CACHE_SECONDS = 1.0
READ_SECONDS = 0.5  # a slower database counts as unavailable
MAX_KEYS = 10_000  # the least recently read are forgotten
_UNREACHABLE = (psycopg.Error, PoolTimeout, TimeoutError, OSError)
_OPEN: LiteralString = "SELECT budget_period_id FROM billing_open_budget_periods(%s, %s, %s, now())"
# A separate statement: the one that opens a period does not see the new row.
_SHARE: LiteralString = """
SELECT min(CASE WHEN l.amount <= 0 THEN 0 ELSE greatest(0, 100 * (1 - (p.used / 1000000 + p.reserved) / l.amount)) END)
FROM billing_budgetperiod p JOIN billing_budget b ON b.id = p.budget_id
CROSS JOIN LATERAL (SELECT (b.amount + p.rolled_over
    + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END)::numeric AS amount) l
WHERE p.id = ANY(%s) AND b.mode <> 'dry_run'
"""


class BudgetShares:
    """The cached shares of one gateway."""

    def __init__(self, database: AsyncConnectionPool) -> None:
        self._database = database
        self._shares: OrderedDict[int, tuple[float, float | None]] = OrderedDict()  # key ID -> (monotonic time, share)
        self._reading: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def percent_left(self, key: ApiKeySnapshot) -> float | None:
        """Return the percent left of the budget with the smallest share left; None if no budget applies.

        While the database is unavailable, it is the last known share.
        """
        lock = self._reading.setdefault(key.key_id, asyncio.Lock())
        async with lock:
            read_at, share = self._shares.get(key.key_id, (float("-inf"), None))
            if time.monotonic() - read_at < CACHE_SECONDS:
                return share
            try:
                async with asyncio.timeout(READ_SECONDS):
                    share = await self._read(key)
            except _UNREACHABLE as exc:
                log.warning("budget_shares_unreadable", error=str(exc) or type(exc).__name__)
            self._shares[key.key_id] = time.monotonic(), share
            self._shares.move_to_end(key.key_id)
            if len(self._shares) > MAX_KEYS:
                self._shares.popitem(last=False)
            return share

    async def _read(self, key: ApiKeySnapshot) -> float | None:
        async with self._database.connection() as connection:
            opened = await connection.execute(_OPEN, [key.tenant_id, key.project_id, key.key_id])
            periods = [period for (period,) in await opened.fetchall()]
            row = await (await connection.execute(_SHARE, [periods])).fetchone()
        return None if row is None or row[0] is None else float(row[0])
