-- Constraint triggers look at entries at the end of their transaction. An entry that is not visible then is rejected.
CREATE FUNCTION billing_check_balance() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    rest numeric;
BEGIN
    SELECT sum(nano) INTO rest FROM billing_ledgerentry WHERE transaction_id = NEW.transaction_id;
    IF rest IS DISTINCT FROM 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', NEW.transaction_id
            USING ERRCODE = 'check_violation';
    END IF;
    PERFORM FROM billing_ledgertransaction WHERE id = NEW.transaction_id AND xid = pg_current_xact_id();
    IF NOT FOUND THEN
        RAISE EXCEPTION 'ledger transaction % is complete', NEW.transaction_id USING ERRCODE = 'restrict_violation';
    END IF;
    PERFORM FROM billing_invoice invoice JOIN billing_ledgertransaction booked ON booked.id = NEW.transaction_id
    WHERE invoice.id = NEW.invoice_id AND invoice.currency <> booked.currency;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger transaction % has another currency than its invoice', NEW.transaction_id
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER billing_ledgerentry_balance AFTER INSERT ON billing_ledgerentry
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_check_balance();
