CREATE FUNCTION billing_end_users_settled_before() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce((SELECT end_users_before FROM billing_rollupstate LIMIT 1), '1970-01-01 00:00:00+00')
$$;
