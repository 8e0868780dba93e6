"""/v1/messages/batches, compatible with Anthropic's SDK. They are stored like OpenAI's batches."""

from __future__ import annotations

import asyncio
import mmap
import re
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import msgspec

from inference_worker.contract.request import document
from millrace.apps.batches.reading import MAX_LINES, BadFile, read_lines
from millrace.apps.batches.storage import new_name
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.batches import PAGE, SELECT, WINDOW_SECONDS, announce, cancel, find, insert
from millrace.gateway.http.endpoints.files import DEFAULT_RETENTION_SECONDS, insert_file, remove_if_rejected
from millrace.gateway.http.queries import ANTHROPIC_PAGE, read_anthropic_page
from millrace.gateway.http.uploads import UploadConsumer
from millrace.gateway.protocols.dialects import ANTHROPIC

DIALECT = "anthropic"
ENDPOINT = "/v1/messages"
MAX_BODY_BYTES = 32 * 2**20  # it is one JSON value, which is parsed in memory
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ENDED = ("completed", "failed", "expired", "cancelled")
_BEFORE = f"{SELECT} AND b.id > %(before)s ORDER BY b.id LIMIT %(limit)s"
_encode = msgspec.json.Encoder().encode


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, document(pattern=f"^{_CUSTOM_ID.pattern}$")]
    params: Annotated[msgspec.Raw, document(**{"$ref": "#/components/schemas/MessagesBody"})]


class MessageBatchBody(msgspec.Struct, forbid_unknown_fields=True):
    requests: Annotated[list[BatchRequest], document(minItems=1, maxItems=MAX_LINES)]


def message_batch(row: dict[str, Any], base_url: str) -> dict[str, Any]:
    ended = row["status"] in _ENDED
    columns = {"succeeded": "succeeded", "errored": "errored", "canceled": "cancelled", "expired": "expired"}
    counts = {name: row[column] if ended else 0 for name, column in columns.items()}
    status = "ended" if ended else "canceling" if row["status"] == "cancelling" else "in_progress"
    return {
        "id": row["name"],
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {"processing": row["total"] - sum(counts.values()), **counts},
        "ended_at": _rfc3339(
            next((row[f"{status_name}_at"] for status_name in _ENDED if row[f"{status_name}_at"]), None)
        ),
        "created_at": _rfc3339(row["created_at"]),
        "expires_at": _rfc3339(row["expires_at"]),
        "archived_at": None,
        "cancel_initiated_at": _rfc3339(row["cancelling_at"]),
        "results_url": f"{base_url}/v1/messages/batches/{row['name']}/results" if row["output_file"] else None,
    }


def _rfc3339(time: Any) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat().replace("+00:00", "Z")


class CreateMessageBatch(UploadConsumer):
    endpoint = "messages.batches"
    api_dialect = ANTHROPIC
    max_bytes = MAX_BODY_BYTES

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        settings, storage = self.gateway.settings, self.gateway.storage
        name, batch = new_name("file-"), new_name("msgbatch_")
        async with self.spool() as spool:
            total = await asyncio.to_thread(self._write, spool, name)
        with remove_if_rejected(storage, name):
            size = storage.path(name).stat().st_size
            async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
                await insert_file(
                    connection,
                    key,
                    settings.tenant_file_quota_bytes,
                    name=name,
                    filename=f"{batch}.jsonl",
                    purpose="messages",
                    size=size,
                    retention_seconds=DEFAULT_RETENTION_SECONDS,
                )
                row = await insert(
                    connection,
                    key,
                    name=batch,
                    dialect=DIALECT,
                    endpoint=ENDPOINT,
                    input_file=name,
                    metadata=None,
                    output_seconds=DEFAULT_RETENTION_SECONDS - WINDOW_SECONDS,
                    total=total,
                )
        await announce(self.gateway.broker)
        await self.respond_json(200, message_batch(row, settings.base_url))

    def _write(self, spool: Path, name: str) -> int:
        """Write the body as a batch input file and return the number of requests."""
        storage = self.gateway.storage
        with storage.writing(name) as target:
            for custom_id, params in _requests(spool):
                line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}
                target.write(_encode(line) + b"\n")
        try:
            with storage.path(name).open("rb") as file:
                return len(read_lines(file, ENDPOINT, self.gateway.settings.max_request_body_bytes))
        except BadFile as exc:
            storage.remove(name)
            problem = exc.errors[0]
            raise invalid(f"requests.{(problem['line'] or 1) - 1}", problem["message"]) from None


def _requests(spool: Path) -> list[tuple[str, msgspec.Raw]]:
    with spool.open("rb") as file:
        try:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ApiError("invalid_json", "The request body is empty.") from None
    try:
        found = msgspec.json.decode(text, type=MessageBatchBody).requests
    except msgspec.ValidationError as exc:
        raise invalid("requests", f"The request body is invalid: {exc}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ApiError("invalid_json", f"The request body is not valid JSON: {exc}") from None
    if not 0 < len(found) <= MAX_LINES:
        raise invalid("requests", f"A batch must have 1 to {MAX_LINES} requests.")
    for number, request in enumerate(found):
        if not _CUSTOM_ID.fullmatch(request.custom_id):
            raise invalid(f"requests.{number}.custom_id", "custom_id must have 1 to 64 letters, digits, _ or -.")
    # One line each: line breaks occur only between JSON tokens, where they can be replaced by spaces.
    return [(request.custom_id, msgspec.Raw(re.sub(rb"[\r\n]", b" ", bytes(request.params)))) for request in found]


class MessageBatches(HttpConsumer):
    endpoint = "messages.batches"
    api_dialect = ANTHROPIC
    method = "GET"
    query_names = ANTHROPIC_PAGE

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        query, limit = self.query, read_anthropic_page(self.query, 20)
        parameters: dict[str, Any] = {"project": key.project_id, "dialect": DIALECT, "limit": limit + 1, "after": None}
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            for name in ("after", "before"):
                if f"{name}_id" in query:
                    parameters[name] = (await find(connection, key, DIALECT, query[f"{name}_id"]))["id"]
            rows = await (await connection.execute(_BEFORE if "before" in parameters else PAGE, parameters)).fetchall()
        data = [message_batch(row, self.gateway.settings.base_url) for row in rows[:limit]]
        if "before" in parameters:
            data.reverse()
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        await self.respond_json(200, {"data": data, "has_more": len(rows) > limit, **ends})


class _OneBatch(HttpConsumer):
    endpoint = "messages.batches"
    api_dialect = ANTHROPIC
    method = "GET"

    async def row(self) -> dict[str, Any]:
        key = await self.authenticate("inference")
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            return await find(connection, key, DIALECT, self.path_arguments["batch_id"])


class MessageBatch(_OneBatch):
    async def handle(self) -> None:
        await self.respond_json(200, message_batch(await self.row(), self.gateway.settings.base_url))


class MessageBatchResults(_OneBatch):
    async def handle(self) -> None:
        row = await self.row()
        if row["output_file"] is None:
            raise ApiError("not_found", f"The batch {row['name']!r} has no results yet.")
        await self.respond_file(row["output_file"], b"application/x-jsonl")


class CancelMessageBatch(HttpConsumer):
    endpoint = "messages.batches"
    api_dialect = ANTHROPIC

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        await self.read_body()
        async with self.gateway.tenant_db.tenant_transaction(key.tenant_id) as connection:
            row = await cancel(connection, key, DIALECT, self.path_arguments["batch_id"])
        await self.respond_json(200, message_batch(row, self.gateway.settings.base_url))


class DeleteMessageBatch(_OneBatch):
    method = "DELETE"

    async def handle(self) -> None:
        row = await self.row()
        if row["status"] not in _ENDED:
            raise ApiError("conflict", f"The batch {row['name']!r} has not ended. Cancel it first.")
        files = [name for name in (row["input_file"], row["output_file"]) if name]
        async with self.gateway.tenant_db.tenant_transaction(row["tenant_id"]) as connection:
            await connection.execute("DELETE FROM batches_batch WHERE id = %s", [row["id"]])
            await connection.execute("DELETE FROM batches_file WHERE name = ANY(%s)", [files])
        for name in files:
            await asyncio.to_thread(self.gateway.storage.remove, name)
        await self.respond_json(200, {"id": row["name"], "type": "message_batch_deleted"})
