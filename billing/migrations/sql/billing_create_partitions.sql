-- Runs as the tables' owner, because no other role may change tables. A partition is created as a separate table and
-- attached, which does not block inserts, unlike CREATE ... PARTITION OF. Attaching creates the row triggers, but not
-- the trigger against TRUNCATE, row-level security or privileges.
CREATE FUNCTION billing_create_partitions(months date[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp AS $$
DECLARE
    month date;
    name text;
    created text[] := '{}';
BEGIN
    PERFORM pg_advisory_xact_lock(125780073312884);  -- an arbitrary number, used only here
    FOREACH month IN ARRAY months LOOP
        month := date_trunc('month', month);
        name := 'billing_usageevent_' || to_char(month, 'YYYY_MM');
        CONTINUE WHEN to_regclass(name) IS NOT NULL;  -- created by another process before the lock was granted
        EXECUTE format('CREATE TABLE %I (LIKE billing_usageevent INCLUDING ALL)', name);
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format($policy$CREATE POLICY tenant_rows ON %I USING (tenant_id = {{tenant}})$policy$, name);
        EXECUTE format('REVOKE ALL ON %I FROM millrace_app, millrace_system', name);
        EXECUTE format('GRANT SELECT ON %I TO millrace_app, millrace_system', name);
        EXECUTE format('ALTER TABLE billing_usageevent ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', name,
            to_char(month, 'YYYY-MM-DD') || ' 00:00:00+00',
            to_char(month + interval '1 month', 'YYYY-MM-DD') || ' 00:00:00+00');
        EXECUTE format('CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON %I'
            ' FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate()', name);
        created := created || name;
    END LOOP;
    RETURN created;
END
$$;
