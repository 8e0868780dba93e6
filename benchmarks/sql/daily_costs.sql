INSERT INTO billing_dailycost (day, tenant_id, model, credential_id, executions, estimated, cost_femto, failed_femto,
    uncosted_tokens, unbilled_femto)
SELECT (admitted_at AT TIME ZONE 'UTC')::date, tenant_id, model, 0, count(*), 0, sum(cost_femto),
    coalesce(sum(cost_femto) FILTER (WHERE outcome = 'failed'), 0), 0, 0
FROM billing_executioncost GROUP BY 1, 2, 3
