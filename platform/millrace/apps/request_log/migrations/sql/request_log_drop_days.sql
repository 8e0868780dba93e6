-- Drops the partitions that have only records from before an instant. Runs as the tables' owner. Readers of the log are
-- waited for only briefly, because writers of records wait behind this function: the next run tries again. The time is
-- longer than `deadlock_timeout`, after which an autovacuum of a partition gives way.
CREATE FUNCTION request_log_drop_days(before timestamptz) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    name text;
    dropped text[] := '{}';
BEGIN
    PERFORM pg_advisory_xact_lock(125780073312885);  -- of `request_log_create_days`, which locks in another order
    FOR name IN SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'request_log_requestrecord'::regclass
            AND substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.+)''\)')::timestamptz <= before
        ORDER BY c.relname
    LOOP
        EXECUTE format('DROP TABLE IF EXISTS %I', name);
        dropped := dropped || name;
    END LOOP;
    RETURN dropped;
END
$$;
