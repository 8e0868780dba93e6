-- A scheduled version is published at its time, or cancelled before, and nothing else of it changes. A cancelled one
-- never changes. billing_guard_price_version has the rule of published versions.
CREATE FUNCTION billing_guard_publication() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    may_change text[] := ARRAY['created_by_id', 'decided_by_id', 'cancelled_by_id'];
BEGIN
    IF OLD.state = 'scheduled' AND TG_OP = 'UPDATE' THEN
        IF NEW.state = 'published' AND NEW.effective_from >= OLD.effective_from THEN
            may_change := may_change || ARRAY['state', 'effective_from'];
        ELSIF NEW.state = 'cancelled' THEN
            may_change := may_change || ARRAY['state', 'cancelled_at'];
        END IF;
    END IF;
    IF OLD.state IN ('scheduled', 'cancelled')
        AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - may_change <> to_jsonb(OLD) - may_change) THEN
        RAISE EXCEPTION 'price version % is %: % rejected', OLD.id, OLD.state, TG_OP
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_priceversion_publication BEFORE UPDATE OR DELETE ON billing_priceversion
    FOR EACH ROW EXECUTE FUNCTION billing_guard_publication();
