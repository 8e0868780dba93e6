CREATE FUNCTION billing_rollup_bucket(bucket text) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN (SELECT totals_before = settled_before FROM billing_rollupstate LIMIT 1)
        THEN bucket || 's' ELSE bucket END
$$;
