-- The tokens of a failed execution do not count. An adjustment subtracts tokens, and may change the outcome. One that
-- removes the whole output also removes its reasoning.
CREATE VIEW billing_usagechange WITH (security_invoker = true) AS
SELECT e.admitted_at, e.request_id, e.execution, e.settled_at, e.tenant_id, e.project_id, e.key_id, e.model,
    coalesce(rate_card.tier, '') AS tier, e.miss_reason,
    (e.outcome = 'completed')::int AS completed, (e.outcome = 'cancelled')::int AS cancelled,
    (e.outcome = 'failed')::int AS failed,
    {{billed_tokens}}, e.unpinned_tokens * billed AS unpinned_tokens,
    e.cost_femto, e.saved_femto, e.reasoning_tokens * billed AS reasoning_tokens,
    {{later_billed_tokens}}, e.end_user
FROM billing_usageevent e
CROSS JOIN LATERAL (SELECT (e.outcome <> 'failed')::int AS billed) AS counted
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = e.price_version
UNION ALL
SELECT a.admitted_at, a.request_id, a.execution, a.created_at, a.tenant_id, a.project_id, a.key_id, a.model,
    coalesce(rate_card.tier, ''), e.miss_reason,
    CASE WHEN a.outcome IN ('failed', 'cancelled') THEN -(e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN -(e.outcome = 'cancelled')::int
        WHEN 'cancelled' THEN (e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN (e.outcome <> 'failed')::int ELSE 0 END,
    {{adjusted_tokens}}, 0,
    a.cost_femto, a.saved_femto, CASE WHEN a.output = -e.output THEN -e.reasoning_tokens ELSE 0 END,
    {{later_adjusted_tokens}}, e.end_user
FROM billing_adjustment a
JOIN billing_usageevent e USING (admitted_at, request_id, execution)
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = a.price_version;
