-- Users may be deleted. What they decided may not.
CREATE FUNCTION billing_guard_rerating() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state = 'applied' AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - ARRAY['created_by_id', 'decided_by_id']
        <> to_jsonb(OLD) - ARRAY['created_by_id', 'decided_by_id']) THEN
        RAISE EXCEPTION 're-rating % is applied: % rejected', OLD.id, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_rerating_guard BEFORE UPDATE OR DELETE ON billing_rerating
    FOR EACH ROW EXECUTE FUNCTION billing_guard_rerating();
