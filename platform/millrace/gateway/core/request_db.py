"""A tenant's rows for the gateway's endpoints: transactions that see those of one tenant and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import structlog
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.core.errors import OVERLOADED, ApiError
from tenants.isolation import db_roles

log = structlog.get_logger(__name__)

CONNECTIONS = 4
WAIT_SECONDS = 2.0
Connection = psycopg.AsyncConnection[dict[str, Any]]


class TenantConnectionPool:
    """Connections of their own: a batch must not keep a caller's key from being looked up."""

    def __init__(self, database_url: str) -> None:
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            db_roles.as_role(database_url, db_roles.SYSTEM),
            min_size=0,
            max_size=CONNECTIONS,
            open=False,
            kwargs={"autocommit": True, "row_factory": dict_row},
        )

    async def open(self) -> None:
        await self._pool.open(wait=False)

    async def close(self) -> None:
        await self._pool.close()

    @asynccontextmanager
    async def of(self, tenant_id: int) -> AsyncIterator[Connection]:
        """Open a transaction as the app's role, in the scope of this tenant.

        Raises:
            ApiError: 503, the database cannot be reached; 400, a text that it cannot hold.
        """
        async with self.of_all() as connection, connection.transaction():
            await connection.execute(
                "SELECT set_config('role', %s, true), set_config('millrace.tenant', %s, true)",
                [db_roles.APP, str(tenant_id)],
            )
            yield connection

    @asynccontextmanager
    async def of_all(self) -> AsyncIterator[Connection]:
        """For the runner of batches, which answers the lines of every tenant. Each statement is its own transaction.

        Raises:
            ApiError: 503, the database cannot be reached; 400, a text that it cannot hold.
        """
        try:
            async with self._pool.connection(timeout=WAIT_SECONDS) as connection:
                yield connection
        except psycopg.DataError:
            raise ApiError("invalid_value", "A value holds the character NUL, or one that is none.") from None
        except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout) as exc:
            log.warning("database_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from exc
