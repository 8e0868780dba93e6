-- In the database, so that every way to deactivate an operator or to revoke the right counts. A stale row keeps the time.
CREATE FUNCTION tenants_note_operator_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.is_staff AND OLD.is_active AND NOT (NEW.is_staff AND NEW.is_active) THEN
        NEW.operator_until := clock_timestamp();
    ELSIF NEW.operator_until IS NULL THEN
        NEW.operator_until := OLD.operator_until;
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER tenants_user_operator_until BEFORE UPDATE ON tenants_user
    FOR EACH ROW EXECUTE FUNCTION tenants_note_operator_end();
