-- The usage of the requests. Each tenant has a lease of a quarter of an hour.
INSERT INTO billing_usageevent (admitted_at, request_id, execution, tenant_id, project_id, key_id, model, attempt,
    outcome, finish_reason, uncached, cache_read, cache_write_5m, cache_write_1h, output, replica_id, block_size,
    queue_us, ttft_us, duration_us, lease_id, fencing_token, cost_femto, saved_femto, settled_at)
SELECT started_at, request_id, 0, tenant_id, project_id, key_id, served_model, 1, outcome, 'stop', prompt_tokens, 0, 0,
    0, 50, 'r', 32, 10, 10, 10, tenant_id * 1000000 + floor(extract(epoch FROM started_at) / 900)::bigint % 1000000, 1,
    CASE outcome WHEN 'failed' THEN 0 ELSE (prompt_tokens + 50) * 3000000000::numeric END, 0,
    started_at + interval '1 second'
FROM request_log_requestrecord WHERE outcome <> 'limited'
