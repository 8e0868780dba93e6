"""Lines of batches in the database, as the runner needs them: claim some, keep them, answer them.

A line that runs is leased to its gateway. When a gateway dies its leases run out and another takes its lines over with
the requests they run as: so whatever the engine has done for them since is not done, and not paid, again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.gateway.core.request_db import TenantConnectionPool

LEASE_SECONDS = 20

# A line is due if it waits and its batch may still run it, or if the gateway that ran it is gone.
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
# NOTE: the batch's row is locked, so that nothing is claimed of one that is being cancelled or closed.
_CLAIM = """
WITH b AS MATERIALIZED (
    SELECT id, status = 'in_progress' AND expires_at > now() AS open FROM batches_batch
    WHERE id = %(batch)s AND status IN ('in_progress', 'cancelling') FOR SHARE
), due AS MATERIALIZED (
    SELECT l.batch_id, l.number, l.state FROM batches_line l JOIN b ON b.id = l.batch_id
    WHERE l.state = 'running' AND l.lease_expires_at < now()
        OR l.state = 'pending' AND coalesce(l.not_before <= now(), true) AND b.open
    ORDER BY l.number LIMIT %(most)s FOR UPDATE OF l SKIP LOCKED
)
UPDATE batches_line l SET state = 'running', runner_id = %(runner)s,
    lease_expires_at = now() + make_interval(secs => %(lease)s),
    request_id = CASE WHEN due.state = 'running' THEN l.request_id ELSE 'req_'
        || lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
        || substr(replace(gen_random_uuid()::text, '-', ''), 1, 20) END
FROM due WHERE l.batch_id = due.batch_id AND l.number = due.number
RETURNING l.number, l.byte_offset, l.size, l.request_id, l.lost_count, due.state = 'running' AS taken_over
"""
_KEEP = """
UPDATE batches_line SET lease_expires_at = now() + make_interval(secs => %s) WHERE state = 'running' AND runner_id = %s
"""
_ANSWER = """
UPDATE batches_line SET state = 'answered', status = %(status)s, answer = %(answer)s, lease_expires_at = NULL
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
    AND request_id = %(request)s
"""
_PUT_BACK = """
UPDATE batches_line SET state = 'pending', lease_expires_at = NULL, request_id = NULL, lost_count = %(lost_count)s,
    not_before = now() + make_interval(secs => %(seconds)s)
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
"""
_LEAVE = """
UPDATE batches_line SET lease_expires_at = now()
WHERE batch_id = %(batch)s AND number = %(number)s AND state = 'running' AND runner_id = %(runner)s
"""


@dataclass(frozen=True)
class BatchHeader:
    """A batch that has lines to be run."""

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
    taken_over: bool  # another gateway ran it as this request


class BatchLineStore:
    def __init__(self, rows: TenantConnectionPool, runner: str) -> None:
        self._rows = rows
        self._runner = runner

    async def batches(self) -> list[BatchHeader]:
        """Those with lines that are due, oldest first."""
        async with self._rows.of_all() as connection:
            cursor = await connection.execute(_BATCHES)
            return [BatchHeader(**row) for row in await cursor.fetchall()]

    async def claim(self, batch: BatchHeader, most: int) -> Sequence[BatchLine]:
        """Claim up to `most` of the batch's due lines."""
        wanted = {"batch": batch.id, "most": most, "runner": self._runner, "lease": LEASE_SECONDS}
        async with self._rows.of_all() as connection:
            cursor = await connection.execute(_CLAIM, wanted)
            return [BatchLine(batch, **row) for row in await cursor.fetchall()]

    async def keep(self) -> None:
        """Renew the leases of all that runs here."""
        async with self._rows.of_all() as connection:
            await connection.execute(_KEEP, [LEASE_SECONDS, self._runner])

    async def answer(self, line: BatchLine, status: int, answer: bytes) -> bool:
        """Store its answer. False: another gateway has taken it over, and answers it."""
        told = {**self._mine(line), "status": status, "answer": answer, "request": line.request_id}
        async with self._rows.of_all() as connection:
            return bool((await connection.execute(_ANSWER, told)).rowcount)

    async def put_back(self, line: BatchLine, seconds: float, *, lost_count: int) -> None:
        """Run the line again as another request, after a delay."""
        async with self._rows.of_all() as connection:
            await connection.execute(_PUT_BACK, {**self._mine(line), "seconds": seconds, "lost_count": lost_count})

    async def leave(self, line: BatchLine) -> None:
        """Let another gateway go on with it at once."""
        async with self._rows.of_all() as connection:
            await connection.execute(_LEAVE, self._mine(line))

    def _mine(self, line: BatchLine) -> dict[str, object]:
        return {"batch": line.batch.id, "number": line.number, "runner": self._runner}
