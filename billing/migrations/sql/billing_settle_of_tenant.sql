-- Settles executions: for each lease, releases their reservations and adds what they used. Returns the leases that have
-- another fencing token, or another tenant: nothing was moved. Their reservations were reclaimed before, or the lease
-- was lost in a failover and its ID assigned again.
--
-- What was released early is not released again. An event that was inserted before the early release must be inserted
-- again, so that `released_by` is right. An execution that used more than was retained for it is rejected.
CREATE FUNCTION billing_settle(ids bigint[], fencing_tokens integer[], tenants bigint[], money_amounts bigint[],
    token_amounts bigint[], request_counts bigint[], used_money_amounts numeric[], used_token_amounts bigint[],
    used_request_counts bigint[])
RETURNS TABLE (late_id bigint, late_fencing_token integer, late_tenant bigint) LANGUAGE plpgsql AS $$
DECLARE
    early_ids bigint[];
    early_money_amounts bigint[];
    early_token_amounts bigint[];
    raced boolean;
    over text;
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(ids) ORDER BY l.id FOR NO KEY UPDATE;
    WITH settled AS (
        DELETE FROM billing_earlyrelease r USING billing_usageevent e
        WHERE r.lease_id = ANY(ids)
            AND e.admitted_at = r.admitted_at AND e.request_id = r.request_id AND e.execution = r.execution
        RETURNING r.lease_id, r.money, r.tokens, r.request_id, e.released_by, e.outcome <> 'failed' AND (
            e.cost_femto > 1000000::numeric * r.retained_money
            OR e.uncached + e.cache_read + e.cache_write_5m + e.cache_write_1h + e.output > r.retained_tokens) AS over
    )
    SELECT array_agg(s.lease_id), array_agg(s.money), array_agg(s.tokens), bool_or(s.released_by = 'settler'),
        string_agg(s.request_id, ', ') FILTER (WHERE s.over)
    INTO early_ids, early_money_amounts, early_token_amounts, raced, over FROM settled s;
    IF raced THEN
        RAISE EXCEPTION 'a gateway released part of a reservation meanwhile' USING ERRCODE = 'serialization_failure';
    ELSIF over IS NOT NULL THEN
        RAISE EXCEPTION 'used more than was retained after an early release: %', over
            USING ERRCODE = 'check_violation', CONSTRAINT = 'billing_early_release_retained';
    END IF;
    IF early_ids IS NOT NULL THEN
        SELECT array_agg(n.money - coalesce(d.money, 0) ORDER BY n.place),
            array_agg(n.tokens - coalesce(d.tokens, 0) ORDER BY n.place)
        INTO money_amounts, token_amounts
        FROM unnest(ids, money_amounts, token_amounts) WITH ORDINALITY AS n (id, money, tokens, place) LEFT JOIN (
            SELECT r.id, sum(r.money)::bigint AS money, sum(r.tokens)::bigint AS tokens
            FROM unnest(early_ids, early_money_amounts, early_token_amounts) AS r (id, money, tokens) GROUP BY r.id
        ) d ON d.id = n.id;
    END IF;
    RETURN QUERY SELECT n.id, n.fencing_token, n.tenant FROM unnest(ids, fencing_tokens, tenants)
            AS n (id, fencing_token, tenant)
        WHERE NOT EXISTS (SELECT FROM billing_budgetlease l
            WHERE l.id = n.id AND l.fencing_token = n.fencing_token AND l.tenant_id = n.tenant);
    PERFORM billing_move_amounts(array_agg(p.id),
        array_agg(-(ARRAY[n.money, n.tokens, n.requests])[{{unit}}]),
        array_agg((ARRAY[n.used_money, 1000000::numeric * n.used_tokens, 1000000::numeric * n.used_requests])[{{unit}}]))
    FROM unnest(ids, fencing_tokens, tenants, money_amounts, token_amounts, request_counts, used_money_amounts,
            used_token_amounts, used_request_counts)
        AS n (id, fencing_token, tenant, money, tokens, requests, used_money, used_tokens, used_requests)
    JOIN billing_budgetlease l ON l.id = n.id AND l.fencing_token = n.fencing_token
        AND l.tenant_id = n.tenant
    JOIN billing_budgetperiod p ON p.id = ANY(l.budget_period_ids);
    UPDATE billing_budgetlease l SET money = l.money - n.money, tokens = l.tokens - n.tokens,
        requests = l.requests - n.requests, settled_money = l.settled_money + n.used_money,
        settled_tokens = l.settled_tokens + n.used_tokens, settled_requests = l.settled_requests + n.used_requests,
        open = NOT l.fully_reserved OR l.requests > n.requests
    FROM unnest(ids, fencing_tokens, tenants, money_amounts, token_amounts, request_counts, used_money_amounts,
            used_token_amounts, used_request_counts)
        AS n (id, fencing_token, tenant, money, tokens, requests, used_money, used_tokens, used_requests)
    WHERE l.id = n.id AND l.fencing_token = n.fencing_token AND l.tenant_id = n.tenant;
END
$$;
