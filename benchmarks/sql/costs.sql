-- One of the three models is served by an upstream.
INSERT INTO billing_executioncost (admitted_at, request_id, execution, tenant_id, model, is_tenant_credential,
    usage_source, outcome, uncached, cache_read, cache_write_5m, cache_write_1h, output, cost_femto, uncosted_tokens,
    unbilled_femto, booked_at)
SELECT admitted_at, request_id, execution, tenant_id, model, false, 'upstream', outcome, uncached, cache_read, 0, 0,
    output, (uncached + output) * 2000000000::numeric, 0, 0, settled_at
FROM billing_usageevent WHERE model = 'llama-70b'
