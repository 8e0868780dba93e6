-- Users may be deleted. What they decided may not.
CREATE FUNCTION billing_guard_price_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state = 'published' AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - ARRAY['created_by_id', 'decided_by_id']
        <> to_jsonb(OLD) - ARRAY['created_by_id', 'decided_by_id']) THEN
        RAISE EXCEPTION 'price version % is published: % rejected', OLD.id, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_priceversion_guard BEFORE UPDATE OR DELETE ON billing_priceversion
    FOR EACH ROW EXECUTE FUNCTION billing_guard_price_version();
