-- Only prices of published versions are stored, and those of a draft that a preview rolls back. So a version that waits
-- or was cancelled has no price, and no rate card.
CREATE FUNCTION billing_guard_new_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM billing_priceversion WHERE id = NEW.version_id AND state IN ('scheduled', 'cancelled', 'discarded');
    IF FOUND THEN
        RAISE EXCEPTION 'price version % is not published: its price is rejected', NEW.version_id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER billing_price_new BEFORE INSERT ON billing_price
    FOR EACH ROW EXECUTE FUNCTION billing_guard_new_price();
