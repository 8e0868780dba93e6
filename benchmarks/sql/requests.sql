-- Request n belongs to the measured tenant for every tenth n, otherwise to tenant n modulo their number. Its hash h
-- decides the other properties. A hit of the answer cache returns the answer of an older request of the same tenant.
INSERT INTO request_log_requestrecord (tenant_id, started_at, request_id, project_id, key_id, gateway_id, endpoint,
    requested_model, served_model, stream, status, code, outcome, limited_by, limits, budget_periods, route, placements,
    prompts, prompt_tokens, total_ms, ttft_ms, dry_run_rejections, replay_of, cache_layer, cache_source, end_user,
    retry_key)
SELECT (%(tenant_ids)s::bigint[])[1 + tenant], at, 'req_' || md5(n::text), (%(project_ids)s::bigint[])[1 + tenant],
    (%(first_keys)s::bigint[])[1 + tenant] + (n / 10) %% CASE WHEN tenant = 0 THEN %(big)s ELSE %(small)s END, 'gw-1',
    'chat.completions', model, model, true,
    CASE outcome WHEN 'limited' THEN '429' WHEN 'failed' THEN '500' ELSE '200' END,
    CASE outcome WHEN 'limited' THEN 'rate_limit_exceeded' WHEN 'failed' THEN 'internal_error' ELSE '' END, outcome,
    CASE outcome WHEN 'limited' THEN jsonb_build_object('kind', 'limit', 'scope', 'tenant', 'id', tenant, 'model', '',
        'name', CASE h %% 2 WHEN 0 THEN 'requests_per_minute' ELSE 'input_tokens_per_minute' END) END,
    '[]', '[]', CASE WHEN layer IN ('prefix', 'computed') THEN '{"answer_cache": {"miss": "not_cached"}}' ELSE '{}'
        END::jsonb || CASE WHEN h %% 10 < 3 THEN '{"policy": {"version": 3}}' ELSE '{}' END::jsonb, '[]',
    1, 100 + h %% 4000, ttft + h %% 9000, ttft, 0, '', layer,
    CASE WHEN layer IN ('exact', 'semantic') THEN 'req_' || md5((n + 10 * (%(tenants)s - 1))::text) ELSE '' END,
    CASE WHEN h %% 2 = 0 THEN 'user-' || h %% 500 ELSE '' END,
    CASE WHEN h %% 100 = 0 THEN n / 20 WHEN h %% 2 = 0 THEN n + %(requests)s END
FROM (
    SELECT n, %(end)s::timestamptz - n * (%(span)s::interval / %(requests)s) AS at, h, outcome,
        CASE WHEN n %% 10 = 0 THEN 0 ELSE 1 + n %% (%(tenants)s - 1) END AS tenant,
        (%(models)s::text[])[1 + n %% 3] AS model,
        CASE WHEN outcome <> 'completed' THEN '' WHEN h %% 1000 < 40 THEN 'exact' WHEN h %% 1000 < 50
            THEN 'single_flight' WHEN h %% 1000 < 60 THEN 'semantic' WHEN h %% 1000 < 390 THEN 'prefix'
            ELSE 'computed' END AS layer,
        CASE WHEN h %% 1000 < 60 THEN 5 + h %% 30 ELSE 60 + h %% 400 + CASE h %% 20 WHEN 0 THEN h %% 6000 ELSE 0 END
            END AS ttft
    FROM (
        SELECT n, hashint8(n) & 2147483647 AS h,
            CASE WHEN n %% 211 = 0 THEN 'limited' WHEN n %% 503 = 0 THEN 'failed' ELSE 'completed' END AS outcome
        FROM generate_series(0, %(requests)s::bigint - 1) n
    ) numbered
) r
