-- A record can also change the success of an earlier request with the same prompt, and replace the record of another
-- gateway that has begun the same line of a batch.
CREATE FUNCTION request_log_records_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    SELECT DISTINCT tenant_id, (started_at AT TIME ZONE 'UTC')::date FROM (
        SELECT tenant_id, started_at FROM added
        UNION ALL
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = a.request_id
        WHERE a.batch_id IS NOT NULL
        UNION ALL
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.retry_key = a.retry_key
            AND r.started_at BETWEEN a.started_at - interval '1 day' AND a.started_at
        WHERE a.retry_key IS NOT NULL
    ) changed WHERE started_at < date_trunc('day', clock_timestamp(), 'UTC');
    RETURN NULL;
END $$;

CREATE TRIGGER request_log_changed AFTER INSERT ON request_log_requestrecord
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_records_changed();
