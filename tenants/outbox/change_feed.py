"""How a gateway learns within a second that a key, limit, policy or tenant has changed. Free of Django.

Every change writes a row of `tenants_changeevent` in its own transaction. A gateway polls it every 250 ms:

    cursor = Cursor(*await connection.execute(NOW))            # once, before it caches anything
    changes = cursor.take(await connection.execute(POLL, [cursor.horizon]))   # each time; rows of POLL

and drops what it holds of each `ChangeEvent`'s key, or of all keys of its tenant, and reads those snapshots again from
Postgres (not from Valkey, whose copies may not have been replaced yet). After `RETENTION_SECONDS` without a successful
poll it begins again with an empty cache. The connection's role is `tenants.isolation.db_roles.SYSTEM`, in autocommit
mode.

NOTE: neither ids nor times of rows are in the order in which their transactions end: one that began earlier may commit
later, and a reader of ids would miss its row for ever. So each row has its transaction's number, and a poll asks
for all rows of transactions that were not over at the poll before: `horizon` is the oldest one then running. No row can
come to light below it. Rows above it come again until the horizon passes them; `Cursor` gives out each only once.
A transaction that runs for long holds the horizon back, never the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString, NamedTuple

CHANNEL = "millrace:changes"  # in Valkey: a message says that a poll now is worth it
RETENTION_SECONDS = 3600
# In Valkey: a set of the ids of gateways. Each that lives has its `gateway_heartbeat_key` too.
GATEWAYS_KEY = "millrace:gateways"
APPLIED_SECONDS = 60

NOW: LiteralString = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
# One parameter: the horizon. The last row is always the next horizon, with nulls for a change.
POLL: LiteralString = """
WITH seen AS MATERIALIZED (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS horizon)
SELECT id, xid::text::bigint, change_type, tenant_id, key_id FROM tenants_changeevent WHERE xid >= %s::text::xid8
UNION ALL SELECT NULL, horizon::text::bigint, NULL, NULL, NULL FROM seen
"""

# Parameters: key ids and the times they were last used, as two arrays. Sorted, so that no two gateways deadlock.
RECORD_USAGE: LiteralString = """
INSERT INTO tenants_apikeyusage (key_id, tenant_id, last_used_at)
SELECT key.id, key.tenant_id, used.at
FROM unnest(%s::bigint[], %s::timestamptz[]) AS used (key_id, at) JOIN tenants_apikey key ON key.id = used.key_id
ORDER BY key.id
ON CONFLICT (key_id) DO UPDATE SET last_used_at = excluded.last_used_at
WHERE tenants_apikeyusage.last_used_at < excluded.last_used_at
"""

# Parameters: the hash a key is stored under, the one under the newest pepper, and that pepper's id.
REHASH: LiteralString = "SELECT tenants_rehash_key(%s, %s, %s)"


def gateway_heartbeat_key(gateway_id: str) -> str:
    """Return the key in Valkey that exists while the gateway lives."""
    return f"millrace:gateway_heartbeat:{gateway_id}"


def applied_key(change_id: int) -> str:
    """Return the key in Valkey of the set of gateways that have applied a change of limits or budgets."""
    return f"millrace:applied_change:{change_id}"


class ChangeEvent(NamedTuple):
    """What a gateway holds of this key is old; without a key: of all keys of the tenant."""

    id: int
    change_type: str  # see tenants.models.ChangeEventRow.ChangeType
    tenant_id: int
    key_id: int | None


class Cursor:
    """How far one gateway has read."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self._given: dict[int, int] = {}  # id -> transaction, of rows at or above the horizon

    def take(self, rows: Iterable[Any]) -> list[ChangeEvent]:
        """Return the changes among POLL's rows that were not given out before, and the step to the next poll."""
        found, horizon = [], self.horizon
        for row_id, xid, change_type, tenant_id, key_id in rows:
            if row_id is None:
                horizon = xid
            elif row_id not in self._given:
                self._given[row_id] = xid
                found.append(ChangeEvent(row_id, change_type, tenant_id, key_id))
        self.horizon = horizon
        self._given = {row_id: xid for row_id, xid in self._given.items() if xid >= horizon}
        return found
