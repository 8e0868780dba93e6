-- Runs as the tables' owner, because no other role may change tables. A partition is created as a separate table and
-- attached, which does not block inserts. The days of the first partition are skipped. Records of a day that came before
-- its partition move to it. The owner sees them only without forced row-level security.
CREATE FUNCTION request_log_create_days(days date[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp SET lock_timeout = 0 AS $$
DECLARE
    day date;
    name text;
    starts timestamptz;
    ends timestamptz;
    first timestamptz := (SELECT substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.+)''\)')::timestamptz
        FROM pg_class c WHERE c.oid = to_regclass('request_log_requestrecord_before'));
    created text[] := '{}';
BEGIN
    PERFORM pg_advisory_xact_lock(125780073312885);  -- an arbitrary number, used only by the two functions of days
    SET LOCAL lock_timeout = '2s';  -- until the end of this function
    FOREACH day IN ARRAY days LOOP
        name := 'request_log_requestrecord_' || to_char(day, 'YYYY_MM_DD');
        starts := day::timestamp AT TIME ZONE 'UTC';
        ends := (day + 1)::timestamp AT TIME ZONE 'UTC';
        CONTINUE WHEN starts < first OR to_regclass(name) IS NOT NULL;
        EXECUTE format('CREATE TABLE %I (LIKE request_log_requestrecord INCLUDING ALL)', name);
        ALTER TABLE request_log_requestrecord_default NO FORCE ROW LEVEL SECURITY;
        EXECUTE format('WITH moved AS (DELETE FROM request_log_requestrecord_default'
            ' WHERE started_at >= %L AND started_at < %L RETURNING *) INSERT INTO %I SELECT * FROM moved',
            starts, ends, name);
        ALTER TABLE request_log_requestrecord_default FORCE ROW LEVEL SECURITY;
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format($policy$CREATE POLICY tenant_rows ON %I USING (tenant_id = {{tenant}})$policy$, name);
        EXECUTE format('REVOKE ALL ON %I FROM millrace_app, millrace_system', name);
        EXECUTE format('ALTER TABLE request_log_requestrecord ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', name,
            starts, ends);
        created := created || name;
    END LOOP;
    RETURN created;
END
$$;
