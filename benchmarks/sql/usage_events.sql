INSERT INTO billing_usageevent (admitted_at, request_id, execution, tenant_id, project_id, key_id, model, attempt,
    outcome, finish_reason, uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input,
    answer_hit_output, replica_id, block_size, queue_us, ttft_us, duration_us, cost_femto, saved_femto, settled_at,
    miss_reason, changed_at)
SELECT started_at, request_id, 0, tenant_id, project_id, key_id, served_model, 1, outcome, 'stop',
    CASE WHEN hit THEN 0 ELSE prompt_tokens END, CASE cache_layer WHEN 'prefix' THEN 512 ELSE 0 END, 0, 0,
    CASE WHEN hit THEN 0 ELSE output END, CASE WHEN hit THEN prompt_tokens ELSE 0 END,
    CASE WHEN hit THEN output ELSE 0 END, 'r', 32, 10, ttft_ms * 1000, total_ms * 1000,
    CASE WHEN hit THEN 1 ELSE 4 END * prompt_tokens * 750000000::numeric,
    CASE WHEN hit THEN prompt_tokens * 2250000000::numeric WHEN cache_layer = 'prefix' THEN 512 * 600000000::numeric
        ELSE 0 END, started_at + interval '1 second', reason,
    CASE reason WHEN 'prefix_changed' THEN 100 + 640 * (prompt_tokens % 3) END
FROM (
    SELECT r.*, cache_layer IN ('exact', 'single_flight', 'semantic') AS hit, 20 + total_ms % 300 AS output,
        CASE WHEN cache_layer <> 'computed' THEN '' WHEN total_ms % 100 < 10 THEN 'prefix_changed'
            WHEN total_ms % 100 < 50 THEN 'first_use' WHEN total_ms % 100 < 70 THEN 'expired_or_evicted' ELSE ''
            END AS reason
    FROM request_log_requestrecord r WHERE outcome <> 'limited'
) r
