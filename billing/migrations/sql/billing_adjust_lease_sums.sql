-- Adds to what was used through a lease, also a reclaimed one, without a reservation: late usage, if it must fit, or an
-- adjustment. False: it does not fit, and nothing was moved. True without a change: the lease was lost in a failover. A
-- lease with its ID is another one, unless it has the tenant and the fencing token, which a reclaim increases by one.
-- The lease may have been removed: then the sum with its ID has its budget periods.
CREATE OR REPLACE FUNCTION billing_adjust(lease bigint, token integer, tenant bigint, money numeric, tokens bigint,
    requests bigint, must_fit boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    period_ids bigint[] := (SELECT l.budget_period_ids FROM billing_budgetlease l
        WHERE l.id = lease AND l.tenant_id = tenant AND l.fencing_token - token IN (0, 1) FOR NO KEY UPDATE);
    amounts numeric[] := ARRAY[money, 1000000::numeric * tokens, 1000000::numeric * requests];
    sum_id bigint;
BEGIN
    IF period_ids IS NULL THEN
        SELECT s.id, s.budget_period_ids INTO sum_id, period_ids FROM billing_budgetleasesum s
        WHERE s.lease_ids @> ARRAY[lease] AND s.tenant_id = tenant AND EXISTS (
            SELECT FROM unnest(s.lease_ids, s.fencing_tokens) AS folded (id, fencing_token)
            WHERE folded.id = lease AND folded.fencing_token - token IN (0, 1))
        FOR NO KEY UPDATE;
    END IF;
    IF period_ids IS NULL THEN
        RETURN true;
    END IF;
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id = ANY(period_ids) ORDER BY p.id FOR NO KEY UPDATE;
    IF must_fit AND EXISTS (
        SELECT FROM billing_budgetperiod p JOIN billing_budget b ON b.id = p.budget_id AND b.active AND b.mode = 'hard'
        WHERE p.id = ANY(period_ids)
            AND p.used + 1000000::numeric * p.reserved + amounts[{{unit}}] > ({{limit}})::numeric * 1000000
    ) THEN
        RETURN false;
    END IF;
    UPDATE billing_budgetperiod p SET used = p.used + amounts[{{unit}}] WHERE p.id = ANY(period_ids);
    UPDATE billing_budgetlease l SET settled_money = l.settled_money + money,
        settled_tokens = l.settled_tokens + tokens, settled_requests = l.settled_requests + requests
    WHERE l.id = lease AND sum_id IS NULL;
    UPDATE billing_budgetleasesum s SET settled_money = s.settled_money + money,
        settled_tokens = s.settled_tokens + tokens, settled_requests = s.settled_requests + requests
    WHERE s.id = sum_id;
    RETURN true;
END
$$;
