"""Checks of the specification's invariants 1 to 7 of budgets, reservations and usage, for all rows of a database.

They hold at every moment, whatever process was killed before."""

from __future__ import annotations

from typing import LiteralString

import psycopg

# Every execution with its adjustments. A failed execution counts as zero.
_EXECUTIONS: LiteralString = """
WITH execution AS (
SELECT e.request_id, e.execution, e.tenant_id, e.lease_id, e.fencing_token, e.reserved_nano, e.outcome,
    e.cost_femto AS first_cost, e.cost_femto + coalesce(a.cost, 0) AS cost,
    CASE WHEN e.outcome = 'failed' THEN 0 ELSE
        e.uncached + e.cache_read + e.cache_write_5m + e.cache_write_1h + e.output + coalesce(a.tokens, 0) END AS tokens
FROM billing_usageevent e LEFT JOIN (
    SELECT admitted_at, request_id, execution, sum(cost_femto) AS cost,
        sum(uncached + cache_read + cache_write_5m + cache_write_1h + output) AS tokens
    FROM billing_adjustment GROUP BY admitted_at, request_id, execution
) a USING (admitted_at, request_id, execution)
), lease AS (
SELECT id, tenant_id, budget_period_ids, money, tokens, requests, settled_money, settled_tokens, settled_requests,
    ARRAY[id] AS lease_ids, ARRAY[fencing_token] AS fencing_tokens FROM billing_budgetlease
UNION ALL
SELECT lease_ids[1], tenant_id, budget_period_ids, 0, 0, 0, settled_money, settled_tokens, settled_requests, lease_ids,
    fencing_tokens
FROM billing_budgetleasesum
), part AS (
SELECT w.id, s.money, s.tokens, s.requests, s.settled_money, s.settled_tokens, s.settled_requests, s.id AS lease_id,
    s.tenant_id <> w.tenant_id AS strange
FROM billing_budgetperiod w JOIN lease s ON w.id = ANY(s.budget_period_ids)
)
"""
_BROKEN: dict[str, LiteralString] = {
    "invariant 1: used + reserved <= limit": """
        SELECT w.id, w.used, w.reserved FROM billing_budgetperiod w JOIN billing_budget b ON b.id = w.budget_id
        WHERE b.active AND b.mode = 'hard' AND w.used + 1000000::numeric * w.reserved > 1000000::numeric *
            (b.amount + w.rolled_over + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END)
    """,
    "invariant 2: reserved = outstanding amounts of leases": """
        SELECT w.id, w.reserved FROM billing_budgetperiod w WHERE w.reserved <> (SELECT coalesce(sum(
            CASE w.unit WHEN 'money' THEN p.money WHEN 'tokens' THEN p.tokens ELSE p.requests END), 0)
        FROM part p WHERE p.id = w.id)
    """,
    "invariant 3: used = settled amounts of leases": """
        SELECT w.id, w.used FROM billing_budgetperiod w WHERE w.used <> (SELECT coalesce(sum(
            CASE w.unit WHEN 'money' THEN p.settled_money WHEN 'tokens' THEN 1000000::numeric * p.settled_tokens
                ELSE 1000000::numeric * p.settled_requests END), 0)
        FROM part p WHERE p.id = w.id)
    """,
    "invariant 3: settled = events and adjustments": """
        SELECT s.id, s.settled_money, s.settled_tokens, s.settled_requests FROM lease s
        LEFT JOIN (SELECT y.lease_ids, sum(x.cost) AS money, sum(x.tokens) AS tokens,
            sum((x.tokens > 0)::integer) AS requests
            FROM execution x JOIN lease y ON x.tenant_id = y.tenant_id AND x.lease_id = ANY(y.lease_ids)
                AND y.fencing_tokens[array_position(y.lease_ids, x.lease_id)] - coalesce(x.fencing_token, 0) IN (0, 1)
            GROUP BY y.lease_ids) l
            ON l.lease_ids = s.lease_ids
        WHERE (s.settled_money, s.settled_tokens, s.settled_requests)
            <> (coalesce(l.money, 0), coalesce(l.tokens, 0), coalesce(l.requests, 0))
    """,
    "invariant 4: settled <= its reservation": """
        SELECT request_id, execution, first_cost, reserved_nano FROM execution
        WHERE reserved_nano IS NOT NULL AND greatest(cost, first_cost) > 1000000::numeric * reserved_nano
    """,
    "invariant 5: one terminal state": """
        SELECT request_id, execution, cost, tokens FROM execution WHERE cost < 0 OR tokens < 0
            OR (outcome = 'failed' AND cost <> 0)
    """,
    "invariant 6: all budget_periods or none, of one tenant": """
        SELECT s.id FROM lease s WHERE cardinality(s.budget_period_ids) <> (
            SELECT count(*) FROM part p WHERE p.lease_id = s.id AND NOT p.strange)
    """,
    "invariant 7: cost is the sum of its components": """
        SELECT l.request_id, l.execution, l.cost, r.cost FROM (
            SELECT request_id, execution, sum(cost) AS cost FROM execution GROUP BY request_id, execution) l
        LEFT JOIN (
            SELECT request_id, execution, sum(femto) AS cost FROM billing_rated_line GROUP BY request_id, execution) r
            USING (request_id, execution)
        WHERE l.cost <> coalesce(r.cost, 0)
    """,
}


def assert_ledger_invariants(url: str) -> None:
    """Fail with the rows that break an invariant. The role of `url` must see every tenant."""
    with psycopg.connect(url) as snapshot:
        snapshot.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        broken = {
            name: rows for name, query in _BROKEN.items() if (rows := snapshot.execute(_EXECUTIONS + query).fetchall())
        }
    assert not broken, broken
