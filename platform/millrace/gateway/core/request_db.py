"""Database connections of the gateway's endpoints. A transaction sees the rows of one tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import structlog
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from millrace.gateway.core.errors import ApiError, unavailable
from tenants.isolation import db_roles

log = structlog.get_logger(__name__)

CONNECTIONS = 4
WAIT_SECONDS = 2.0
Connection = psycopg.AsyncConnection[dict[str, Any]]


class TenantConnectionPool:
    """A connection pool of its own, so that batches do not delay the lookup of API keys."""

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
    async def tenant_transaction(self, tenant_id: int) -> AsyncIterator[Connection]:
        """Open a transaction with the application role, in the scope of this tenant.

        Raises:
            ApiError: 503, the database cannot be reached; 400, a value contains characters that PostgreSQL rejects.
        """
        async with self.autocommit_connection() as connection, connection.transaction():
            await connection.execute(
                "SELECT set_config('role', %s, true), set_config('millrace.tenant', %s, true)",
                [db_roles.APP, str(tenant_id)],
            )
            yield connection

    @asynccontextmanager
    async def autocommit_connection(self) -> AsyncIterator[Connection]:
        """Open an autocommit connection for the batch runner, which reads the rows of all tenants.

        Raises:
            ApiError: 503, the database cannot be reached; 400, a value contains characters that PostgreSQL rejects.
        """
        try:
            async with self._pool.connection(timeout=WAIT_SECONDS) as connection:
                yield connection
        except psycopg.DataError:
            raise ApiError("invalid_value", "A value contains a NUL or another invalid character. Remove it.") from None
        except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout) as exc:
            log.warning("database_unreachable", error=str(exc))
            raise unavailable() from exc
