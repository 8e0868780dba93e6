-- Returns the budget periods that apply to a request at an instant, and creates those that are missing.
CREATE FUNCTION billing_open_budget_periods(tenant bigint, project bigint, key bigint, moment timestamptz)
RETURNS TABLE (budget_period_id bigint, budget_id bigint, name text, unit text, period text, mode text,
    reduce_max_tokens boolean, starts timestamptz, ends timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    zone text := coalesce(
        (SELECT e.time_zone FROM billing_billingprofile p JOIN billing_billingentity e ON e.id = p.entity_id
            WHERE p.tenant_id = tenant),
        (SELECT time_zone FROM billing_billingentity WHERE slug = 'default'), 'UTC');
    member bigint := (SELECT created_by_id FROM tenants_apikey WHERE id = key);
    found bigint[];
    begun timestamptz[];
BEGIN
    SELECT array_agg(b.id), array_agg(CASE b.period WHEN 'lifetime' THEN '1970-01-01 00:00:00+00'::timestamptz
            ELSE date_trunc(b.period::text, moment AT TIME ZONE zone) AT TIME ZONE zone END)
    INTO found, begun FROM billing_budget b
    WHERE b.active AND b.tenant_id = tenant AND (b.project_id IS NULL OR b.project_id = project)
        AND (b.key_id IS NULL OR b.key_id = key) AND (b.member_id IS NULL OR b.member_id = member);
    PERFORM billing_create_budget_periods(array_agg(n.id), array_agg(n.starts), zone)
    FROM unnest(found, begun) AS n (id, starts)
    WHERE NOT EXISTS (SELECT FROM billing_budgetperiod p WHERE p.budget_id = n.id AND p.period_start = n.starts);
    RETURN QUERY SELECT p.id, b.id, b.name::text, b.unit::text, b.period::text, b.mode::text, b.reduce_max_tokens,
        p.period_start, p.period_end
    FROM unnest(found, begun) AS n (id, starts) JOIN billing_budget b ON b.id = n.id
    JOIN billing_budgetperiod p ON p.budget_id = n.id AND p.period_start = n.starts
    ORDER BY p.id;
END
$$;
