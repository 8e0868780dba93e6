-- A budget period of each tenant and month, and the closed leases of the usage.
INSERT INTO billing_budgetperiod (tenant_id, budget_id, unit, period_start, period_end, rolled_over, used, reserved,
    rejected)
SELECT tenant_id, tenant_id, 'money', month, month + interval '1 month', 0, 0, 0, 0
FROM (SELECT DISTINCT tenant_id, date_trunc('month', admitted_at, 'UTC') AS month FROM billing_usageevent) found;
INSERT INTO billing_budgetlease (id, tenant_id, gateway_id, fencing_token, budget_period_ids, money, tokens, requests,
    settled_money, settled_tokens, settled_requests, fully_reserved, open, created_at, leased_until, reclaim_at)
SELECT e.lease_id, e.tenant_id, 'gw-1', 1, ARRAY[p.id], 0, 0, 0, sum(e.cost_femto),
    coalesce(sum(e.uncached + e.output) FILTER (WHERE e.outcome <> 'failed'), 0),
    count(*) FILTER (WHERE e.outcome <> 'failed'), true, false, min(e.admitted_at), max(e.admitted_at),
    max(e.admitted_at)
FROM billing_usageevent e JOIN billing_budgetperiod p ON p.tenant_id = e.tenant_id
    AND p.period_start = date_trunc('month', e.admitted_at, 'UTC')
GROUP BY e.lease_id, e.tenant_id, p.id;
UPDATE billing_budgetperiod p SET used = s.used
FROM (SELECT budget_period_ids[1] AS id, sum(settled_money) AS used FROM billing_budgetlease GROUP BY 1) s
WHERE s.id = p.id
