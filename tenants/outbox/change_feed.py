"""The change feed, which informs gateways within a second of changed keys, limits, policies and tenants. No Django.

Every change writes a row of `tenants_changeevent` in its transaction. A gateway polls the table every 250 ms:

    cursor = Cursor(*await connection.execute(NOW))            # once, before it caches anything
    rows = await connection.execute(POLL, [cursor.horizon])    # each time
    changes = cursor.take(rows)                                # unless cursor.is_outdated(rows)

For each `ChangeEvent` it drops the cached key, or all cached keys of the tenant, and reads their snapshots again from
PostgreSQL. It does not use Valkey, whose copies may not have been replaced yet. After `RETENTION_SECONDS` without a
successful poll it restarts with an empty cache. The connection is in autocommit mode and has the role
`tenants.isolation.db_roles.SYSTEM`.

After a failover of PostgreSQL, the numbers of transactions and rows may have gone back, and the caches may contain what
was lost. `is_outdated` finds this by the timeline (`TIMELINE`), and the gateway restarts with an empty cache too. On a
standby, polls fail: it may lack changes.

NOTE: transactions do not commit in the order of their rows' IDs or times, so a reader of IDs would miss rows. Each row
therefore has its transaction's number. A poll requests the rows of all transactions that were not finished at the
previous poll: `horizon` is the oldest running one. New rows cannot appear below the horizon. Rows above it are returned
again until the horizon passes them, and `Cursor` returns each only once. A long transaction delays the horizon, but no
rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString, NamedTuple

CHANNEL = "millrace:changes"  # in Valkey: a message, which is a tenant's ID, makes gateways poll immediately
RETENTION_SECONDS = 3600
# In Valkey: a set of gateway IDs. Running gateways also have a `gateway_heartbeat_key`.
GATEWAYS_KEY = "millrace:gateways"
APPLIED_SECONDS = 60

TIMELINE: LiteralString = "SELECT tenants_timeline()"
NOW: LiteralString = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint, tenants_timeline()"
# Parameter: the horizon. The last row contains the next horizon and the timeline, and nulls instead of a change.
POLL: LiteralString = """
WITH seen AS MATERIALIZED (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS horizon)
SELECT id, xid::text::bigint, change_type, tenant_id, key_id FROM tenants_changeevent WHERE xid >= %s::text::xid8
UNION ALL SELECT NULL, horizon::text::bigint, tenants_timeline(), NULL, NULL FROM seen
"""

# Parameters: arrays of key IDs and times of last use. Rows are sorted, so that gateways cannot deadlock.
RECORD_USAGE: LiteralString = """
INSERT INTO tenants_apikeyusage (key_id, tenant_id, last_used_at)
SELECT key.id, key.tenant_id, used.at
FROM unnest(%s::bigint[], %s::timestamptz[]) AS used (key_id, at) JOIN tenants_apikey key ON key.id = used.key_id
ORDER BY key.id
ON CONFLICT (key_id) DO UPDATE SET last_used_at = excluded.last_used_at
WHERE tenants_apikeyusage.last_used_at < excluded.last_used_at
"""

# Parameters: the stored hash of a key, its hash with the newest pepper, and the pepper's ID.
REHASH: LiteralString = "SELECT tenants_rehash_key(%s, %s, %s)"


def gateway_heartbeat_key(gateway_id: str) -> str:
    """Return the key in Valkey that exists while the gateway is running."""
    return f"millrace:gateway_heartbeat:{gateway_id}"


def applied_key(change_id: int) -> str:
    """Return the key in Valkey of the set of gateways that have applied a change of limits or budgets."""
    return f"millrace:applied_change:{change_id}"


class ChangeEvent(NamedTuple):
    """A change of a key, or of all keys of a tenant if `key_id` is None."""

    id: int
    change_type: str  # see tenants.models.ChangeEventRow.ChangeType
    tenant_id: int
    key_id: int | None


class Cursor:
    """A gateway's position in the change feed."""

    def __init__(self, horizon: int, timeline: str | None = None) -> None:
        self.horizon = horizon
        self.timeline = timeline
        self._seen: dict[int, int] = {}  # ID -> transaction, of returned rows at or above the horizon

    def is_outdated(self, rows: Iterable[Any]) -> bool:
        """Return whether POLL's rows are of another timeline than this position."""
        return any(row[0] is None and row[2] != self.timeline for row in rows)

    def take(self, rows: Iterable[Any]) -> list[ChangeEvent]:
        """Return the new changes among POLL's rows, and advance the horizon."""
        found, horizon = [], self.horizon
        for row_id, xid, change_type, tenant_id, key_id in rows:
            if row_id is None:
                horizon = xid
            elif row_id not in self._seen:
                self._seen[row_id] = xid
                found.append(ChangeEvent(row_id, change_type, tenant_id, key_id))
        self.horizon = horizon
        self._seen = {row_id: xid for row_id, xid in self._seen.items() if xid >= horizon}
        return found
