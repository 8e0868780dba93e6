-- Usage of a request is admitted from one day before it until two days after, as the sums of requests assume. So only a
-- few of the days' partitions are read.
CREATE OR REPLACE FUNCTION request_log_usage_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    SELECT DISTINCT tenant_id, (started_at AT TIME ZONE 'UTC')::date FROM (
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = split_part(a.request_id, '.', 1)
            AND r.started_at > a.admitted_at - interval '2 days' AND r.started_at <= a.admitted_at + interval '1 day'
    ) changed WHERE started_at < date_trunc('day', clock_timestamp(), 'UTC');
    RETURN NULL;
END $$;
