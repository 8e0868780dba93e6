"""Sums of closed leases. The rows of these leases are removed, so that their table does not grow without an end.

A lease is read after it was closed by the reconciler, which compares leases of the last two days with their events, and
for late usage and corrections, which `billing_adjust` adds to the sum.

NOTE: a run waits for no lock. Transactions that correct usage lock leases and sums in any order, so a run that waited
for them could deadlock. The next run folds what this one has skipped.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db import connection

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

FOLD_AFTER = timedelta(days=3)  # since the creation of a lease: more than `reconciler.LOOKBACK`
BATCH_SIZE = 2_000  # leases, to keep transactions short
_LOCK = 0x6C656173  # an arbitrary advisory lock, used only here: one run at a time creates sums

_CLOSED = """
SELECT coalesce(array_agg(id), '{}') FROM (
    SELECT id FROM billing_budgetlease WHERE created_at < %(before)s AND NOT open ORDER BY created_at LIMIT %(most)s
) l
"""
_SAME = "(l.tenant_id, l.budget_period_ids, (l.created_at AT TIME ZONE 'UTC')::date)"
_LOCK_SUMS = f"""
SELECT s.id FROM billing_budgetleasesum s WHERE (s.tenant_id, s.budget_period_ids, s.day) IN (
    SELECT {_SAME[1:-1]} FROM billing_budgetlease l WHERE l.id = ANY(%(ids)s::bigint[])
) FOR NO KEY UPDATE OF s SKIP LOCKED
"""  # noqa: S608  (names from above, nothing from outside)
_FOLD = f"""
WITH closed AS (
    SELECT l.id FROM billing_budgetlease l
    LEFT JOIN billing_budgetleasesum s ON (s.tenant_id, s.budget_period_ids, s.day) = {_SAME}
    WHERE l.id = ANY(%(ids)s::bigint[]) AND NOT l.open AND (s.id IS NULL OR s.id = ANY(%(sums)s::bigint[]))
    FOR UPDATE OF l SKIP LOCKED
), removed AS (
    DELETE FROM billing_budgetlease l USING closed WHERE l.id = closed.id
    RETURNING l.id, l.fencing_token, l.tenant_id, l.budget_period_ids, (l.created_at AT TIME ZONE 'UTC')::date AS day,
        l.settled_money, l.settled_tokens, l.settled_requests
), added AS (
    INSERT INTO billing_budgetleasesum AS s (tenant_id, budget_period_ids, day, lease_ids, fencing_tokens,
        settled_money, settled_tokens, settled_requests)
    SELECT tenant_id, budget_period_ids, day, array_agg(id ORDER BY id), array_agg(fencing_token ORDER BY id),
        sum(settled_money), sum(settled_tokens), sum(settled_requests)
    FROM removed GROUP BY tenant_id, budget_period_ids, day
    ON CONFLICT (tenant_id, budget_period_ids, day) DO UPDATE SET lease_ids = s.lease_ids || excluded.lease_ids,
        fencing_tokens = s.fencing_tokens || excluded.fencing_tokens,
        settled_money = s.settled_money + excluded.settled_money,
        settled_tokens = s.settled_tokens + excluded.settled_tokens,
        settled_requests = s.settled_requests + excluded.settled_requests
)
SELECT count(*) FROM removed
"""  # noqa: S608


def fold_leases(now: datetime | None = None) -> int:
    """Replace old closed leases by sums of the same budget periods and UTC day. Return how many.

    It is safe to call at any time, from any number of processes, and after a crash.
    """
    before = (now or datetime.now(UTC)) - FOLD_AFTER
    total = 0
    while folded := _fold_some(before):
        total += folded
    return total


def _fold_some(before: datetime) -> int:
    """Replace some leases. Return how many: 0 also if another run replaces them."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
        if not cursor.fetchone()[0]:
            return 0
        cursor.execute(_CLOSED, {"before": before, "most": BATCH_SIZE})
        (ids,) = cursor.fetchone()
        cursor.execute(_LOCK_SUMS, {"ids": ids})
        sums = [pk for (pk,) in cursor.fetchall()]
        cursor.execute(_FOLD, {"ids": ids, "sums": sums})
        return int(cursor.fetchone()[0])
