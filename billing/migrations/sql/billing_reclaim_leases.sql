-- Reclaims the outstanding amounts of leases whose requests cannot run any more: their gateway was lost, or an end was
-- never reported. Not before this clock allows it, because leases are given by this clock.
CREATE FUNCTION billing_reclaim_leases(before timestamptz) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    overdue bigint[];
BEGIN
    SELECT array_agg(l.id) INTO overdue FROM (SELECT l.id FROM billing_budgetlease l
        WHERE l.open AND l.reclaim_at <= least(before, now())
        ORDER BY l.id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) l;
    PERFORM billing_move_amounts(array_agg(p.id), array_agg(-(ARRAY[l.money, l.tokens, l.requests])[{{unit}}]),
        array_agg(0::numeric))
    FROM billing_budgetlease l JOIN billing_budgetperiod p ON p.id = ANY(l.budget_period_ids) WHERE l.id = ANY(overdue);
    DELETE FROM billing_earlyrelease r WHERE r.lease_id = ANY(overdue);
    RETURN QUERY UPDATE billing_budgetlease l SET fencing_token = l.fencing_token + 1, money = 0, tokens = 0,
        requests = 0, fully_reserved = true, open = false WHERE l.id = ANY(overdue) RETURNING l.id;
END
$$;
