"""Lines of batches in the database, as the batch runner claims, leases and completes them.

A running line is leased to its gateway. If the gateway fails the lease expires, and another gateway takes over the line
with the same request ID. Work that the engine has done for it meanwhile is neither repeated nor billed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.gateway.core.request_db import TenantConnectionPool

LEASE_SECONDS = 20

# A line is due if it is pending and its batch may still run it, or if the lease of its gateway has expired.
_BATCHES = """
SELECT b.id, b.tenant_id, b.key_id, b.dialect, b.endpoint, b.input_file FROM batches_batch b
WHERE b.status IN ('in_progress', 'cancelling') AND EXISTS (
    SELECT FROM batches_line l WHERE l.batch_id = b.id AND (
        l.state = 'running' AND l.lease_expires_at < now()
        OR l.state = 'pending' AND coalesce(l.not_before <= now(), true)
        AND b.status = 'in_progress' AND b.expires_at > now()
    )
)
ORDER BY b.id
"""
# NOTE: the batch's row is locked, so that no lines are claimed of a batch that is being cancelled or finalized.
_CLAIM = """
WITH b AS MATERIALIZED (
    SELECT id, status = 'in_progress' AND expires_at > now() AS open FROM batches_batch
    WHERE id = %(batch)s AND status IN ('in_progress', 'cancelling') FOR SHARE
), due AS MATERIALIZED (
    SELECT l.batch_id, l.number, l.state FROM batches_line l JOIN b ON b.id = l.batch_id
    WHERE l.state = 'running' AND l.lease_expires_at < now()
        OR l.state = 'pending' AND coalesce(l.not_before <= now(), true) AND b.open
    ORDER BY l.number LIMIT %(max_lines)s FOR UPDATE OF l SKIP LOCKED
)
UPDATE batches_line l SET state = 'running', runner_id = %(runner)s,
    lease_expires_at = now() + make_interval(secs => %(lease)s),
    request_id = CASE WHEN due.state = 'running' THEN l.request_id ELSE 'req_'
        || lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
        || substr(replace(gen_random_uuid()::text, '-', ''), 1, 20) END
FROM due WHERE l.batch_id = due.batch_id AND l.number = due.number
RETURNING l.number, l.byte_offset, l.size, l.request_id, l.lost_count, due.state = 'running' AS taken_over
"""
_RENEW = """
UPDATE batches_line SET lease_expires_at = now() + make_interval(secs => %s) WHERE state = 'running' AND runner_id = %s
"""
_STORE = """
UPDATE batches_line SET state = 'answered', status = %(status)s, answer = %(answer)s, lease_expires_at = NULL
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
    AND request_id = %(request)s
"""
_REQUEUE = """
UPDATE batches_line SET state = 'pending', lease_expires_at = NULL, request_id = NULL, lost_count = %(lost_count)s,
    not_before = now() + make_interval(secs => %(seconds)s)
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
"""
_RELEASE = """
UPDATE batches_line SET lease_expires_at = now()
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
"""


@dataclass(frozen=True)
class BatchHeader:
    """A batch with due lines."""

    id: int
    tenant_id: int
    key_id: int
    dialect: str
    endpoint: str
    input_file: str


@dataclass(frozen=True)
class BatchLine:
    """A line that this gateway runs."""

    batch: BatchHeader
    number: int
    byte_offset: int
    size: int
    request_id: str
    lost_count: int
    taken_over: bool  # another gateway has started this request


class BatchLineStore:
    def __init__(self, rows: TenantConnectionPool, runner: str) -> None:
        self._rows = rows
        self._runner = runner

    async def due_batches(self) -> list[BatchHeader]:
        """Return the batches with due lines, oldest first."""
        async with self._rows.autocommit_connection() as connection:
            cursor = await connection.execute(_BATCHES)
            return [BatchHeader(**row) for row in await cursor.fetchall()]

    async def claim(self, batch: BatchHeader, max_lines: int) -> Sequence[BatchLine]:
        """Claim up to `max_lines` of the batch's due lines."""
        parameters = {"batch": batch.id, "max_lines": max_lines, "runner": self._runner, "lease": LEASE_SECONDS}
        async with self._rows.autocommit_connection() as connection:
            cursor = await connection.execute(_CLAIM, parameters)
            return [BatchLine(batch, **row) for row in await cursor.fetchall()]

    async def renew_leases(self) -> None:
        """Renew the leases of all lines that this gateway runs."""
        async with self._rows.autocommit_connection() as connection:
            await connection.execute(_RENEW, [LEASE_SECONDS, self._runner])

    async def store_response(self, line: BatchLine, status: int, body: bytes) -> bool:
        """Store the line's response. Return False if another gateway has taken over the line."""
        values = {**self._owned_line(line), "status": status, "answer": body, "request": line.request_id}
        async with self._rows.autocommit_connection() as connection:
            return bool((await connection.execute(_STORE, values)).rowcount)

    async def requeue(self, line: BatchLine, seconds: float, *, lost_count: int) -> None:
        """Run the line again as a new request, after a delay in seconds."""
        async with self._rows.autocommit_connection() as connection:
            await connection.execute(_REQUEUE, {**self._owned_line(line), "seconds": seconds, "lost_count": lost_count})

    async def release(self, line: BatchLine) -> None:
        """Let another gateway take over the line immediately."""
        async with self._rows.autocommit_connection() as connection:
            await connection.execute(_RELEASE, self._owned_line(line))

    def _owned_line(self, line: BatchLine) -> dict[str, object]:
        return {"batch": line.batch.id, "number": line.number, "runner": self._runner}
