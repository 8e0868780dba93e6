CREATE FUNCTION billing_guard_period() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (TG_OP = 'DELETE' AND OLD.closed_at IS NOT NULL)
        OR (TG_OP = 'UPDATE' AND to_jsonb(NEW) - '{closed_at,invoiced_at}'::text[]
            <> to_jsonb(OLD) - '{closed_at,invoiced_at}'::text[])
        OR (TG_OP = 'UPDATE' AND OLD.closed_at IS NOT NULL AND NEW.closed_at IS DISTINCT FROM OLD.closed_at)
    THEN
        RAISE EXCEPTION 'period % is fixed: % rejected', OLD.label, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_period_guard BEFORE UPDATE OR DELETE ON billing_period
    FOR EACH ROW EXECUTE FUNCTION billing_guard_period();
