-- The rollups of requests of 62 days until now, without the requests. Each key has usage of three models with four miss
-- reasons on each day. A row of a day is also one of an hour, of the last two days.
INSERT INTO billing_usagerollup (bucket, start, tenant_id, project_id, key_id, model, tier, miss_reason, completed,
    cancelled, failed, uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output,
    unpinned_tokens, cost_femto, saved_femto)
SELECT kept.bucket, CASE kept.bucket WHEN 'day' THEN day ELSE day + combination * interval '2 hours' END, tenant_id, project_id,
    key_id, (%(models)s::text[])[1 + combination %% 3], 'default',
    (ARRAY['', 'first_use', 'prefix_changed', 'expired_or_evicted'])[1 + combination %% 4], requests, 0, 0,
    requests * (100 + h %% 4000), requests * 512, 0, 0, requests * (20 + h %% 300), 0, 0, 0,
    requests * (100 + h %% 4000) * 3000000000::numeric, requests * 300000000000::numeric
FROM (
    SELECT day, combination, key_id, tenant_id, project_id, h,
        greatest(1, (%(requests)s::bigint / 62 / cardinality(%(keys)s::bigint[]) / 12) * (1 + h %% 3) / 2) AS requests
    FROM (
        SELECT (%(end)s::timestamptz - days * interval '1 day') AS day, combination, key.id AS key_id, key.tenant_id,
            key.project_id, hashint8(key.id * 100 + days * 13 + combination) & 2147483647 AS h
        FROM generate_series(0, 61) days, generate_series(0, 11) combination, tenants_apikey key
    ) numbered
) r JOIN (VALUES ('day', 62), ('hour', 2)) AS kept (bucket, days)
    ON day > %(end)s::timestamptz - kept.days * interval '1 day'
ORDER BY 2, tenant_id;
INSERT INTO billing_usagerollup (bucket, start, tenant_id, project_id, key_id, model, tier, miss_reason, completed,
    cancelled, failed, uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output,
    unpinned_tokens, cost_femto, saved_femto)
SELECT total.bucket, CASE total.bucket WHEN 'month' THEN date_trunc('month', start, 'UTC') ELSE start END, tenant_id,
    CASE total.bucket WHEN 'month' THEN 0 ELSE project_id END, CASE total.bucket WHEN 'kdays' THEN key_id ELSE 0 END,
    CASE total.bucket WHEN 'kdays' THEN '' ELSE model END,
    CASE WHEN total.bucket IN ('kdays', 'month') THEN '' ELSE tier END,
    CASE WHEN total.bucket IN ('kdays', 'month') THEN '' ELSE miss_reason END, sum(completed), 0, 0, sum(uncached),
    sum(cache_read), 0, 0, sum(output), 0, 0, 0, sum(cost_femto), sum(saved_femto)
FROM billing_usagerollup r
JOIN (VALUES ('days', 'day'), ('kdays', 'day'), ('month', 'day'), ('hours', 'hour')) AS total (bucket, of)
    ON r.bucket = total.of
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8 ORDER BY 2, tenant_id
