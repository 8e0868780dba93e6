"""The time for which cached keys and budgets stay valid although PostgreSQL does not answer.

It is `MILLRACE_STALE_KEY_SECONDS`, from the last poll of the change feed that succeeded. By default it is 0, and every
request without a fresh poll queries the database. A query is always tried first: cached data is used only while
queries fail, because a change may be readable although polls fail. To keep requests fast, one request per second
tries, and the others use the cached data.

What this gateway knows always wins. Changes that were read have removed the cached data. A message over Valkey reports
that a tenant has changed: until the next poll, no cached data of this tenant is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
from psycopg_pool import PoolTimeout

ATTEMPT_SECONDS = 1.0  # between queries, while they fail
ANSWER_SECONDS = 0.5  # a query that takes longer fails, if there is cached data
T = TypeVar("T")


class StaleWindow:
    """The state of one gateway's connection to PostgreSQL, and whether cached data of a tenant may be used."""

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            seconds: how long cached data stays valid after the last successful poll.
        """
        self._seconds = seconds
        self._clock = clock
        self._polled_at = float("-inf")
        self._is_failing = False  # whether the last query failed, because PostgreSQL did not answer
        self._tried_at = float("-inf")
        self._changed: dict[int, float] = {}  # tenant ID -> when a message reported a change that no poll has read yet

    @property
    def is_open(self) -> bool:
        """Return whether the last successful poll is recent enough."""
        return self._clock() - self._polled_at < self._seconds

    def may_cover(self, tenant_id: int) -> bool:
        """Return whether the tenant's cached data may be used if a query fails."""
        return self.is_open and tenant_id not in self._changed

    def covers(self, tenant_id: int) -> bool:
        """Return whether the tenant's cached data may be used now, since the last query failed."""
        return self._is_failing and self.may_cover(tenant_id)

    def replaces_query(self, tenant_id: int) -> bool:
        """Return whether to use the tenant's cached data without a query. Once per second, the caller has to query."""
        if not self.covers(tenant_id):
            return False
        now = self._clock()
        if now - self._tried_at < ATTEMPT_SECONDS:
            return True
        self._tried_at = now
        return False

    def note_poll(self, started_at: float) -> None:
        """Record that all changes before the monotonic time `started_at` were applied."""
        self._polled_at, self._is_failing = started_at, False
        self._changed = {tenant_id: at for tenant_id, at in self._changed.items() if at >= started_at}

    def note_change(self, tenant_id: int) -> None:
        """Record that a message reported a change of the tenant."""
        self._changed[tenant_id] = self._clock()

    def note_answer(self) -> None:
        """Record that PostgreSQL has answered a query."""
        self._is_failing = False

    def note_error(self, exc: Exception) -> None:
        """Record the error of a query. Errors that PostgreSQL reports about a statement are answers."""
        if isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError | PoolTimeout | TimeoutError | OSError):
            self._is_failing, self._tried_at = True, self._clock()
        else:
            self._is_failing = False


async def answer_within(seconds: float, query: Awaitable[T]) -> T:
    """Return the result of a query. The end of a query that takes too long is not waited for, unlike a cancellation.

    Raises:
        TimeoutError: the query takes longer.
    """
    task = asyncio.ensure_future(query)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, in case no caller waits
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise TimeoutError("PostgreSQL does not answer")
    return task.result()
