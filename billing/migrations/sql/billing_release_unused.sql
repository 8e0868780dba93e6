-- Releases the unused parts of reservations whose executions have ended, and retains the rest for their settlement. An
-- execution that is settled, or whose lease was reclaimed, is skipped: its reservation was released before.
CREATE FUNCTION billing_release_unused(leases bigint[], fencing_tokens integer[], times timestamptz[],
    request_ids text[], executions smallint[], money_amounts bigint[], token_amounts bigint[],
    retained_money_amounts bigint[], retained_token_amounts bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(leases) ORDER BY l.id FOR NO KEY UPDATE;
    WITH released AS (
        INSERT INTO billing_earlyrelease AS r
            (admitted_at, request_id, execution, lease_id, money, tokens, retained_money, retained_tokens)
        SELECT n.admitted_at, n.request_id, n.execution, n.lease_id, n.money, n.tokens, n.retained_money,
            n.retained_tokens
        FROM unnest(leases, fencing_tokens, times, request_ids, executions, money_amounts, token_amounts,
                retained_money_amounts, retained_token_amounts)
            AS n (lease_id, fencing_token, admitted_at, request_id, execution, money, tokens, retained_money,
                retained_tokens)
        JOIN billing_budgetlease l ON l.id = n.lease_id AND l.fencing_token = n.fencing_token
        WHERE NOT EXISTS (SELECT FROM billing_usageevent e WHERE e.admitted_at = n.admitted_at
            AND e.request_id = n.request_id AND e.execution = n.execution)
        ON CONFLICT DO NOTHING
        RETURNING r.lease_id, r.money, r.tokens
    ), sums AS (
        SELECT d.lease_id, sum(d.money)::bigint AS money, sum(d.tokens)::bigint AS tokens
        FROM released d GROUP BY d.lease_id
    ), done AS (
        UPDATE billing_budgetlease l SET money = l.money - d.money, tokens = l.tokens - d.tokens
        FROM sums d WHERE l.id = d.lease_id
        RETURNING l.budget_period_ids, d.money, d.tokens
    )
    SELECT array_agg(p.id), array_agg(-(ARRAY[d.money, d.tokens, 0])[{{unit}}]) INTO moved, amounts
    FROM done d JOIN billing_budgetperiod p ON p.id = ANY(d.budget_period_ids);
    PERFORM billing_move_amounts(moved, amounts, array_fill(0::numeric, ARRAY[coalesce(cardinality(moved), 0)]));
END
$$;
