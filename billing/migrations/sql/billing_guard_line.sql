-- The share lock makes a line wait for a transaction that finalizes its invoice.
CREATE FUNCTION billing_guard_line() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    pk bigint;
BEGIN
    FOREACH pk IN ARRAY ARRAY[OLD.invoice_id, NEW.invoice_id] LOOP
        CONTINUE WHEN pk IS NULL;
        PERFORM FROM billing_invoice WHERE id = pk AND state = 'draft' FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'invoice % is final: % of a line rejected', pk, TG_OP USING ERRCODE = 'restrict_violation';
        END IF;
    END LOOP;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_invoiceline_guard BEFORE INSERT OR UPDATE OR DELETE ON billing_invoiceline
    FOR EACH ROW EXECUTE FUNCTION billing_guard_line();
