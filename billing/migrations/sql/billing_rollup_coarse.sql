CREATE FUNCTION billing_rollup_coarse(bucket text, other text) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN (SELECT coarse_before = settled_before FROM billing_rollupstate LIMIT 1)
        THEN bucket ELSE other END
$$;
