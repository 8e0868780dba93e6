"""/v1/files: input and output files of batches. A file belongs to its key's project."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millrace.apps.batches.reading import MAX_FILE_BYTES, MAX_LINES
from millrace.apps.batches.storage import Storage, new_name
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.request_db import Connection
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.queries import read_limit
from millrace.gateway.http.uploads import UploadConsumer, read_form
from tenants.keys.snapshot import ApiKeySnapshot

DEFAULT_RETENTION_SECONDS = 30 * 86_400
MIN_RETENTION_SECONDS = 3_600
_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
# Internal files, such as those of cache warming, are not shown.
_ONE = """
SELECT * FROM batches_file
WHERE name = %(name)s AND project_id = %(project)s AND expires_at > now() AND NOT is_internal
"""
_INSERT = """
INSERT INTO batches_file (name, tenant_id, project_id, filename, purpose, size, expires_at)
SELECT %(name)s, %(tenant)s, %(project)s, %(filename)s, %(purpose)s, %(size)s,
    now() + make_interval(secs => %(retention_seconds)s)
WHERE %(size)s + (SELECT coalesce(sum(size), 0) FROM batches_file) <= %(quota)s
RETURNING *
"""
_PAGE = """
SELECT * FROM batches_file
WHERE project_id = %(project)s AND expires_at > now() AND purpose = ANY(%(purposes)s) AND NOT is_internal
    AND (%(after)s::bigint IS NULL OR (id > %(after)s) = %(ascending)s AND id <> %(after)s)
ORDER BY CASE WHEN %(ascending)s THEN id ELSE -id END LIMIT %(limit)s
"""


def file_object(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["name"],
        "object": "file",
        "bytes": row["size"],
        "created_at": int(row["created_at"].timestamp()),
        "expires_at": int(row["expires_at"].timestamp()),
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def no_file(name: str, param: str | None = None) -> ApiError:
    return ApiError("not_found", f"There is no file {name!r}.", param)


async def insert_file(
    connection: Connection,
    key: ApiKeySnapshot,
    quota: int,
    *,
    name: str,
    filename: str,
    purpose: str,
    size: int,
    retention_seconds: int,
) -> dict[str, Any]:
    """Insert the row of a file whose contents are stored.

    Raises:
        ApiError: 429, the tenant's file quota would be exceeded.
    """
    # Serialized per tenant, so that concurrent uploads cannot exceed the quota together.
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('files ' || %s, 0))", [str(key.tenant_id)])
    values = {
        "name": name,
        "filename": filename[:255],
        "purpose": purpose,
        "size": size,
        "retention_seconds": retention_seconds,
    }
    scope = {"tenant": key.tenant_id, "project": key.project_id, "quota": quota}
    row = await (await connection.execute(_INSERT, values | scope)).fetchone()
    if row is None:
        raise over_quota(quota)
    return row


@contextmanager
def remove_if_rejected(storage: Storage, name: str) -> Iterator[None]:
    """Remove a file's contents if the request is rejected. After other errors the sweep removes unused contents."""
    try:
        yield
    except ApiError as exc:
        if exc.status < 500:
            storage.remove(name)
        raise


def over_quota(quota: int) -> ApiError:
    return ApiError("quota_exceeded", f"Your files may total {quota} bytes. Delete some files first.")


class CreateFile(UploadConsumer):
    endpoint = "files"
    max_bytes = MAX_FILE_BYTES + 2**16  # and the multipart form around it

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        await self._require_quota(key)
        name, quota = new_name("file-"), self.gateway.settings.tenant_file_quota_bytes
        async with self.spool() as spool:
            fields, filename, size = await asyncio.to_thread(self._write, spool, name)
        with remove_if_rejected(self.gateway.storage, name):
            retention_seconds = _retention_seconds(fields)
            async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
                row = await insert_file(
                    connection,
                    key,
                    quota,
                    name=name,
                    filename=filename,
                    purpose="batch",
                    size=size,
                    retention_seconds=retention_seconds,
                )
        await self.respond_json(200, file_object(row))

    def _write(self, spool: Any, name: str) -> tuple[dict[str, str], str, int]:
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        with self.gateway.storage.writing(name) as target:
            fields, file = read_form(spool, content_type, target)
            if file.size > MAX_FILE_BYTES:
                raise ApiError("request_too_large", f"A file may have at most {MAX_FILE_BYTES} bytes.", "file")
            if file.lines > MAX_LINES:
                raise invalid("file", f"A batch file may have at most {MAX_LINES} lines. This file has {file.lines}.")
            if not file.size:
                raise invalid("file", "The file is empty.")
        return fields, file.file_name or "", file.size

    async def _require_quota(self, key: ApiKeySnapshot) -> None:
        quota = self.gateway.settings.tenant_file_quota_bytes
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            found = await connection.execute("SELECT coalesce(sum(size), 0) AS used FROM batches_file")
            row = await found.fetchone()
        if row is not None and row["used"] >= quota:
            raise over_quota(quota)


def _retention_seconds(fields: dict[str, str]) -> int:
    """Check the form's fields and return the file's retention time in seconds."""
    for name in fields.keys() - _FIELDS:
        raise ApiError("unknown_parameter", f"Unrecognized request argument supplied: {name}", name)
    if "purpose" not in fields:
        raise invalid("purpose", "purpose is required.", "missing_required_parameter")
    if fields["purpose"] != "batch":
        raise invalid("purpose", "purpose must be 'batch'.")
    seconds = fields.get("expires_after[seconds]")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise invalid("expires_after.anchor", "anchor must be 'created_at'.")
    if seconds is None:
        return DEFAULT_RETENTION_SECONDS
    return check_seconds("expires_after.seconds", int(seconds) if seconds.isascii() and seconds.isdigit() else 0)


def check_seconds(param: str, seconds: int) -> int:
    if not MIN_RETENTION_SECONDS <= seconds <= DEFAULT_RETENTION_SECONDS:
        raise invalid(param, f"seconds must be from {MIN_RETENTION_SECONDS} to {DEFAULT_RETENTION_SECONDS}.")
    return seconds


class FilesEndpoint(HttpConsumer):
    endpoint = "files"
    method = "GET"
    query_names = ("after", "limit", "order", "purpose")

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        query = self.query
        limit, order = read_limit(query, 10_000, 10_000), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "order must be 'asc' or 'desc'.")
        purposes = ["batch", "batch_output"]
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            after = None
            if "after" in query:
                found = await connection.execute(_ONE, {"name": query["after"], "project": key.project_id})
                row = await found.fetchone()
                if row is None:
                    raise no_file(query["after"], "after")
                after = row["id"]
            parameters = {
                "project": key.project_id,
                "purposes": [purpose for purpose in purposes if query.get("purpose", purpose) == purpose],
                "after": after,
                "ascending": order == "asc",
                "limit": limit + 1,
            }
            rows = await (await connection.execute(_PAGE, parameters)).fetchall()
        await self.respond_json(200, page([file_object(row) for row in rows], limit))


def page(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a list in OpenAI's format. `rows` has one more than `limit` if there are more pages."""
    data = rows[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rows) > limit,
    }


class _OneFile(HttpConsumer):
    endpoint = "files"
    method = "GET"

    async def row(self) -> dict[str, Any]:
        key = await self.authenticate("inference")
        name = self.path_arguments["file_id"]
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            row = await (await connection.execute(_ONE, {"name": name, "project": key.project_id})).fetchone()
        if row is None or row["purpose"] not in ("batch", "batch_output"):
            raise no_file(name)
        return row


class FileEndpoint(_OneFile):
    async def handle(self) -> None:
        await self.respond_json(200, file_object(await self.row()))


class FileContent(_OneFile):
    async def handle(self) -> None:
        row = await self.row()
        await self.respond_file(row["name"], b"application/octet-stream")


class DeleteFile(_OneFile):
    method = "DELETE"

    async def handle(self) -> None:
        row = await self.row()
        name = row["name"]
        async with self.gateway.tenant_db.tenant_transaction(row["tenant_id"]) as connection:
            await connection.execute("SELECT FROM batches_file WHERE name = %s FOR UPDATE", [name])
            used = await connection.execute(
                "SELECT name FROM batches_batch WHERE input_file = %s"
                " AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
                [name],
            )
            if (batch := await used.fetchone()) is not None:
                raise ApiError("conflict", f"The batch {batch['name']!r} is reading this file.")
            await connection.execute("DELETE FROM batches_file WHERE name = %s", [name])
        await asyncio.to_thread(self.gateway.storage.remove, name)
        await self.respond_json(200, {"id": name, "object": "file", "deleted": True})
