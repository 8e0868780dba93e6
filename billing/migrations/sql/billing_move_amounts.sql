-- Adds to the reserved and used amounts of budget periods. `ids` may name a period more than once.
CREATE FUNCTION billing_move_amounts(ids bigint[], reserved_changes bigint[], used_changes numeric[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id = ANY(ids) ORDER BY p.id FOR NO KEY UPDATE;
    UPDATE billing_budgetperiod p SET reserved = p.reserved + m.reserved, used = p.used + m.used
    FROM (SELECT n.id, sum(n.reserved) AS reserved, sum(n.used) AS used
        FROM unnest(ids, reserved_changes, used_changes) AS n (id, reserved, used) GROUP BY n.id) m
    WHERE p.id = m.id;
END
$$;
