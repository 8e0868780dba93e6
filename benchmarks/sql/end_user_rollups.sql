-- The sums by end user of the same requests: nine end users of each key and day, of 500 of a tenant, with one model each.
INSERT INTO billing_enduserrollup (start, tenant_id, project_id, key_id, model, end_user, completed, cancelled, failed,
    uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, unpinned_tokens,
    cost_femto, saved_femto)
SELECT start, tenant_id, project_id, key_id, model, CASE WHEN place > 0 THEN 'user-' || (key_id + place * 61 + extract(day FROM start)::int) %% 500
    ELSE '' END, greatest(1, sum(completed) / 3), 0, 0, sum(uncached) / 3, sum(cache_read) / 3, 0, 0, sum(output) / 3,
    0, 0, 0, div(sum(cost_femto), 3), div(sum(saved_femto), 3)
FROM billing_usagerollup, generate_series(0, 8) place
WHERE bucket = 'day' AND model = (%(models)s::text[])[1 + place %% 3] GROUP BY start, tenant_id, project_id, key_id, model, place ORDER BY start, tenant_id;
INSERT INTO billing_enduserrollup (start, tenant_id, project_id, key_id, model, end_user, completed, cancelled, failed,
    uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, unpinned_tokens,
    cost_femto, saved_femto)
SELECT start, tenant_id, project_id, 0, model, end_user, sum(completed), 0, 0, sum(uncached), sum(cache_read), 0, 0,
    sum(output), 0, 0, 0, sum(cost_femto), sum(saved_femto)
FROM billing_enduserrollup GROUP BY start, tenant_id, project_id, model, end_user ORDER BY start, tenant_id
