-- Returns what gateways have not admitted from leases, which become fully reserved by it. Each lease returns at most
-- once: a fully reserved one only if it is untouched, and then all of it.
CREATE FUNCTION billing_return_leases(ids bigint[], fencing_tokens integer[], money_amounts bigint[],
    token_amounts bigint[], request_counts bigint[], untouched boolean[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(ids) ORDER BY l.id FOR NO KEY UPDATE;
    WITH done AS (
        UPDATE billing_budgetlease l SET money = l.money - n.money, tokens = l.tokens - n.tokens,
            requests = l.requests - n.requests, fully_reserved = true, open = l.requests > n.requests
        FROM unnest(ids, fencing_tokens, money_amounts, token_amounts, request_counts, untouched)
            AS n (id, fencing_token, money, tokens, requests, untouched)
        WHERE l.id = n.id AND l.fencing_token = n.fencing_token
            AND (NOT l.fully_reserved OR n.untouched AND l.requests = n.requests)
        RETURNING l.budget_period_ids, n.money, n.tokens, n.requests
    )
    SELECT array_agg(p.id), array_agg(-(ARRAY[d.money, d.tokens, d.requests])[{{unit}}]) INTO moved, amounts
    FROM done d JOIN billing_budgetperiod p ON p.id = ANY(d.budget_period_ids);
    PERFORM billing_move_amounts(moved, amounts, array_fill(0::numeric, ARRAY[coalesce(cardinality(moved), 0)]));
END
$$;
