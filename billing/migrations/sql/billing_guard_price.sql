CREATE FUNCTION billing_guard_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' OR to_jsonb(NEW) - 'effective_until' <> to_jsonb(OLD) - 'effective_until'
        OR NEW.effective_until IS NULL OR NEW.effective_until > OLD.effective_until THEN
        RAISE EXCEPTION 'price % never changes, it can only end earlier: % rejected', OLD.id, TG_OP
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER billing_price_guard BEFORE UPDATE OR DELETE ON billing_price
    FOR EACH ROW EXECUTE FUNCTION billing_guard_price();
