CREATE FUNCTION billing_guard_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state <> 'draft' AND (
        TG_OP = 'DELETE'
        OR to_jsonb(NEW) - 'state' <> to_jsonb(OLD) - 'state'
        OR (OLD.state, NEW.state) NOT IN (('open', 'paid'), ('paid', 'open'), ('open', 'void'), ('open', 'uncollectible'), ('paid', 'void'), ('uncollectible', 'paid'))
    ) THEN
        RAISE EXCEPTION 'invoice % is final: % rejected', OLD.number, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

CREATE TRIGGER billing_invoice_guard BEFORE UPDATE OR DELETE ON billing_invoice
    FOR EACH ROW EXECUTE FUNCTION billing_guard_invoice();
