-- Events and adjustments, one row for each priced component.
CREATE VIEW billing_rated_line WITH (security_invoker = true) AS
SELECT e.tenant_id, e.project_id, e.key_id, e.admitted_at, e.request_id, e.execution, e.invoice_period,
    used.component, used.price_id, used.tokens::bigint AS tokens,
    used.tokens::numeric(38, 0) * price.nano_per_million AS femto
FROM (
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, {{columns}}, price_ids
    FROM billing_usageevent
    UNION ALL
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, {{columns}}, price_ids
    FROM billing_adjustment
) AS e
CROSS JOIN LATERAL unnest(ARRAY[{{names}}], ARRAY[{{columns}}], e.price_ids) AS used (component, tokens, price_id)
JOIN billing_price price ON price.id = used.price_id;
