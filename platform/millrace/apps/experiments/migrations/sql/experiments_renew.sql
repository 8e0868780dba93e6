CREATE FUNCTION experiments_renew() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE experiments_observation SET due_at = now()
    WHERE tenant_id = NEW.tenant_id AND request_id = NEW.request_id;
    RETURN NULL;
END $$;

CREATE TRIGGER experiments_renew AFTER INSERT ON feedback_submittedfeedback
    FOR EACH ROW EXECUTE FUNCTION experiments_renew();
