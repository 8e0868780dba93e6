-- Copies the records into one table with the indexes and triggers of the earlier release. The policy is added afterwards.
CREATE TABLE request_log_requestrecord_whole (LIKE request_log_requestrecord INCLUDING DEFAULTS INCLUDING CONSTRAINTS
    INCLUDING STORAGE INCLUDING COMMENTS);
SET LOCAL ROLE millrace_system;
INSERT INTO request_log_requestrecord_whole SELECT * FROM request_log_requestrecord;
RESET ROLE;
DROP TABLE request_log_requestrecord;
ALTER TABLE request_log_requestrecord_whole RENAME TO request_log_requestrecord;
ALTER TABLE request_log_requestrecord ADD PRIMARY KEY (tenant_id, started_at, request_id);
CREATE INDEX request_log_id ON request_log_requestrecord (tenant_id, request_id varchar_pattern_ops);
CREATE INDEX request_log_request ON request_log_requestrecord (request_id);
CREATE INDEX request_log_id_prefix ON request_log_requestrecord (tenant_id, (request_id COLLATE "C"));
CREATE INDEX request_log_not_completed ON request_log_requestrecord (tenant_id, started_at DESC)
    WHERE NOT (outcome = 'completed');
CREATE INDEX request_log_retry ON request_log_requestrecord (tenant_id, retry_key, started_at)
    WHERE retry_key IS NOT NULL;
CREATE INDEX request_log_replay ON request_log_requestrecord (tenant_id, replay_of) WHERE NOT (replay_of = '');
CREATE INDEX request_log_outcome ON request_log_requestrecord (tenant_id, started_at) INCLUDE (outcome, ttft_ms);
CREATE INDEX request_log_answer_hits ON request_log_requestrecord (tenant_id, started_at)
    WHERE cache_layer IN ('exact', 'semantic');
CREATE INDEX request_log_started ON request_log_requestrecord USING brin (started_at) WITH (autosummarize = on);
DROP TRIGGER request_log_changed ON feedback_submittedfeedback;
DROP FUNCTION request_log_feedback_changed();
CREATE OR REPLACE FUNCTION request_log_usage_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    SELECT DISTINCT tenant_id, (started_at AT TIME ZONE 'UTC')::date FROM (
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = split_part(a.request_id, '.', 1)
    ) changed WHERE started_at < date_trunc('day', clock_timestamp(), 'UTC');
    RETURN NULL;
END $$;
CREATE TRIGGER request_log_changed AFTER INSERT ON feedback_submittedfeedback
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_usage_changed();
CREATE TRIGGER request_log_changed AFTER INSERT ON request_log_requestrecord
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_records_changed();
CREATE TRIGGER experiments_observe AFTER INSERT ON request_log_requestrecord
    FOR EACH ROW WHEN (NEW.experiment_id IS NOT NULL) EXECUTE FUNCTION experiments_observe();
