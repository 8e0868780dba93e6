"""/v1/batches, compatible with OpenAI's SDK. A batch belongs to its key's project and runs with this key."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

import msgspec
import redis.asyncio as redis
from psycopg.types.json import Jsonb

from inference_worker.contract.messages import WORK_CHANNEL
from inference_worker.contract.request import document
from millrace.apps.batches.storage import new_name
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.request_db import Connection
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.files import (
    DEFAULT_RETENTION_SECONDS,
    MIN_RETENTION_SECONDS,
    check_seconds,
    no_file,
    page,
)
from millrace.gateway.http.queries import read_limit
from millrace.gateway.lifecycle.batch_runner import DIALECTS
from millrace.gateway.protocols.documented import LabelMap
from millrace.gateway.protocols.openai.parameters import check_labels, read_body
from tenants.keys.snapshot import ApiKeySnapshot

ENDPOINTS = [endpoint for endpoint in DIALECTS if endpoint != "/v1/messages"]
WINDOW_SECONDS = 24 * 3600
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
# While a batch runs its lines are counted. Afterwards the counts are columns of the batch.
SELECT = """
SELECT b.*, b.succeeded + coalesce(l.succeeded, 0) AS succeeded, b.errored + coalesce(l.errored, 0) AS errored
FROM batches_batch b LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE status < 400) AS succeeded, count(*) FILTER (WHERE status >= 400) AS errored
    FROM batches_line WHERE batch_id = b.id
) l ON true
WHERE b.project_id = %(project)s AND b.dialect = %(dialect)s AND NOT b.is_internal
"""
ONE = f"{SELECT} AND b.name = %(name)s"
PAGE = f"{SELECT} AND (%(after)s::bigint IS NULL OR b.id < %(after)s) ORDER BY b.id DESC LIMIT %(limit)s"
INSERT = """
INSERT INTO batches_batch
    (name, tenant_id, project_id, key_id, dialect, endpoint, input_file, metadata, output_seconds, total, created_at,
    expires_at)
VALUES (%(name)s, %(tenant)s, %(project)s, %(key)s, %(dialect)s, %(endpoint)s, %(input_file)s, %(metadata)s,
    %(output_seconds)s, %(total)s, now(), now() + make_interval(secs => %(window)s))
RETURNING *
"""
CANCEL = """
UPDATE batches_batch SET status = 'cancelling', cancelling_at = now()
WHERE name = %(name)s AND project_id = %(project)s AND dialect = %(dialect)s AND NOT is_internal
    AND status IN ('validating', 'in_progress')
"""


async def find(connection: Connection, key: ApiKeySnapshot, dialect: str, name: str) -> dict[str, Any]:
    """Return a batch of the key's project.

    Raises:
        ApiError: 404, the project has no such batch.
    """
    parameters = {"name": name, "project": key.project_id, "dialect": dialect}
    row = await (await connection.execute(ONE, parameters)).fetchone()
    if row is None:
        raise ApiError("not_found", f"There is no batch {name!r}.")
    return row


async def cancel(connection: Connection, key: ApiKeySnapshot, dialect: str, name: str) -> dict[str, Any]:
    """Cancel the batch's requests that have not started. Cancelling a cancelled batch changes nothing.

    Raises:
        ApiError: 404, the project has no such batch; 409, the batch has ended.
    """
    await connection.execute(CANCEL, {"name": name, "project": key.project_id, "dialect": dialect})
    row = await find(connection, key, dialect, name)
    if row["status"] not in ("cancelling", "cancelled"):
        raise ApiError("conflict", f"A batch with the status {row['status']!r} cannot be cancelled.")
    return row


async def insert(connection: Connection, key: ApiKeySnapshot, **values: Any) -> dict[str, Any]:
    scope = {"tenant": key.tenant_id, "project": key.project_id, "key": key.key_id, "window": WINDOW_SECONDS}
    row = await (await connection.execute(INSERT, values | scope)).fetchone()
    if row is None:
        raise RuntimeError("the batch was not written")
    return row


async def announce(broker: redis.Redis) -> None:
    """Make the web jobs read a new batch now. Without the announcement, they read it some seconds later."""
    with contextlib.suppress(redis.RedisError, OSError):
        await broker.publish(WORK_CHANNEL, "")


def batch_object(row: dict[str, Any]) -> dict[str, Any]:
    times = {f"{name}_at": _seconds(row[f"{name}_at"]) for name in TIMES}
    failed = row["errored"] + row["expired"] + row["cancelled"]
    return {
        "id": row["name"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "errors": {"object": "list", "data": row["errors"]} if row["errors"] else None,
        "input_file_id": row["input_file"],
        "completion_window": "24h",
        "status": row["status"],
        "output_file_id": row["output_file"],
        "error_file_id": row["error_file"],
        "created_at": _seconds(row["created_at"]),
        "expires_at": _seconds(row["expires_at"]),
        **times,
        "request_counts": {"total": row["total"], "completed": row["succeeded"], "failed": failed},
        "usage": row["usage"],
        "metadata": row["metadata"],
    }


def _seconds(time: Any) -> int | None:
    return None if time is None else int(time.timestamp())


class OutputExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, document(minimum=MIN_RETENTION_SECONDS, maximum=DEFAULT_RETENTION_SECONDS)]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: Annotated[str, document(enum=ENDPOINTS)]
    completion_window: Literal["24h"]
    metadata: LabelMap | None = None
    output_expires_after: OutputExpiresAfter | None = None


class CreateBatch(HttpConsumer):
    endpoint = "batches"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        self.gateway.disk.require_space()
        requested = read_body(await self.read_body(), BatchBody)
        if requested.endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}.")
        check_labels(requested.metadata or {}, {})
        expiry = requested.output_expires_after
        seconds = None if expiry is None else check_seconds("output_expires_after.seconds", expiry.seconds)
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            # NOTE: the lock is held until the batch exists, so that a concurrent deletion of the file sees the batch.
            found = await connection.execute(
                "SELECT FROM batches_file WHERE name = %s AND project_id = %s AND purpose = 'batch'"
                " AND NOT is_internal AND expires_at > now() FOR SHARE",
                [requested.input_file_id, key.project_id],
            )
            if not found.rowcount:
                raise no_file(requested.input_file_id, "input_file_id")
            row = await insert(
                connection,
                key,
                name=new_name("batch_"),
                dialect="openai",
                endpoint=requested.endpoint,
                input_file=requested.input_file_id,
                metadata=None if requested.metadata is None else Jsonb(requested.metadata),
                output_seconds=seconds,
                total=0,
            )
        await announce(self.gateway.broker)
        await self.respond_json(200, batch_object(row))


class BatchesEndpoint(HttpConsumer):
    endpoint = "batches"
    method = "GET"
    query_names = ("after", "limit")

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        query = self.query
        limit = read_limit(query, 20, 100)
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            after = (await find(connection, key, "openai", query["after"]))["id"] if "after" in query else None
            parameters = {"project": key.project_id, "dialect": "openai", "after": after, "limit": limit + 1}
            rows = await (await connection.execute(PAGE, parameters)).fetchall()
        await self.respond_json(200, page([batch_object(row) for row in rows], limit))


class BatchEndpoint(HttpConsumer):
    endpoint = "batches"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            row = await find(connection, key, "openai", self.path_arguments["batch_id"])
        await self.respond_json(200, batch_object(row))


class CancelBatch(HttpConsumer):
    endpoint = "batches"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        await self.read_body()
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            row = await cancel(connection, key, "openai", self.path_arguments["batch_id"])
        await self.respond_json(200, batch_object(row))
