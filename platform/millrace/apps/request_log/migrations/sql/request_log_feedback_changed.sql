-- Feedback has no time of its request.
CREATE OR REPLACE FUNCTION request_log_feedback_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    SELECT DISTINCT tenant_id, (started_at AT TIME ZONE 'UTC')::date FROM (
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = split_part(a.request_id, '.', 1)
    ) changed WHERE started_at < date_trunc('day', clock_timestamp(), 'UTC');
    RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS request_log_changed ON feedback_submittedfeedback;
CREATE TRIGGER request_log_changed AFTER INSERT ON feedback_submittedfeedback
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_feedback_changed();
