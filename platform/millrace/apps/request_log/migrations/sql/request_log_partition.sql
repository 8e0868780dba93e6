-- Makes the table the first partition of a new one. Its indexes become those of the partitioned table, so none is built;
-- two of them are replaced by `request_log_id`. Its BRIN index stays: later days need none.
DO $$
DECLARE
    kept CONSTANT text[] := ARRAY['request_log_id', 'request_log_not_completed', 'request_log_retry',
        'request_log_replay', 'request_log_outcome', 'request_log_answer_hits'];
    definitions text[] := ARRAY(SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i
        JOIN pg_class c ON c.oid = i.indexrelid
        WHERE i.indrelid = 'request_log_requestrecord'::regclass AND c.relname = ANY(kept));
    primary_key text := (SELECT conname FROM pg_constraint
        WHERE conrelid = 'request_log_requestrecord'::regclass AND contype = 'p');
    name text;
BEGIN
    DROP TRIGGER request_log_changed ON request_log_requestrecord;
    DROP TRIGGER experiments_observe ON request_log_requestrecord;
    DROP INDEX request_log_request, request_log_id_prefix;
    ALTER TABLE request_log_requestrecord RENAME TO request_log_requestrecord_before;
    EXECUTE format('ALTER TABLE request_log_requestrecord_before RENAME CONSTRAINT %I'
        ' TO request_log_requestrecord_before_pkey', primary_key);
    FOREACH name IN ARRAY kept LOOP
        EXECUTE format('ALTER INDEX %I RENAME TO %I', name, name || '_before');
    END LOOP;
    CREATE TABLE request_log_requestrecord (LIKE request_log_requestrecord_before INCLUDING DEFAULTS
        INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMMENTS) PARTITION BY RANGE (started_at);
    ALTER TABLE request_log_requestrecord DROP CONSTRAINT request_log_before;
    ALTER TABLE request_log_requestrecord ADD PRIMARY KEY (tenant_id, started_at, request_id);
    FOREACH name IN ARRAY definitions LOOP
        EXECUTE name;
    END LOOP;
END
$$;
ALTER TABLE request_log_requestrecord ATTACH PARTITION request_log_requestrecord_before
    FOR VALUES FROM (MINVALUE) TO ('{{first}}');
ALTER TABLE request_log_requestrecord_before DROP CONSTRAINT request_log_before;
-- For records of days without a partition: before the first one, or by a clock that is days ahead.
CREATE TABLE request_log_requestrecord_default (LIKE request_log_requestrecord INCLUDING ALL);
ALTER TABLE request_log_requestrecord_default ENABLE ROW LEVEL SECURITY;
ALTER TABLE request_log_requestrecord_default FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_rows ON request_log_requestrecord_default USING (tenant_id = {{tenant}});
ALTER TABLE request_log_requestrecord ATTACH PARTITION request_log_requestrecord_default DEFAULT;
REVOKE ALL ON request_log_requestrecord_before, request_log_requestrecord_default FROM millrace_app, millrace_system;
CREATE TRIGGER request_log_changed AFTER INSERT ON request_log_requestrecord
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_records_changed();
CREATE TRIGGER experiments_observe AFTER INSERT ON request_log_requestrecord
    FOR EACH ROW WHEN (NEW.experiment_id IS NOT NULL) EXECUTE FUNCTION experiments_observe();
