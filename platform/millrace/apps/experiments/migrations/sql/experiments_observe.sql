-- An observation is counted when the usage of the request is settled.
CREATE FUNCTION experiments_observe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO experiments_observation (tenant_id, request_id, experiment_id, arm, unit, started_at, due_at)
    VALUES (NEW.tenant_id, NEW.request_id, NEW.experiment_id, NEW.experiment_arm, NEW.experiment_unit, NEW.started_at,
        now() + interval '20 seconds')
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

CREATE TRIGGER experiments_observe AFTER INSERT ON request_log_requestrecord
    FOR EACH ROW WHEN (NEW.experiment_id IS NOT NULL) EXECUTE FUNCTION experiments_observe();
