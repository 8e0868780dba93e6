-- An empty table may be truncated, which Django's tests do with every table. A snapshot that was taken earlier in the
-- transaction could miss rows, so the check is valid only under READ COMMITTED.
CREATE FUNCTION billing_reject_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE filled boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO filled;
    IF filled OR current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'table % is append-only: TRUNCATE rejected', TG_TABLE_NAME
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON billing_usageevent
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
CREATE TRIGGER billing_period_no_truncate BEFORE TRUNCATE ON billing_period
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
CREATE TRIGGER billing_invoice_no_truncate BEFORE TRUNCATE ON billing_invoice
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
CREATE TRIGGER billing_invoiceline_no_truncate BEFORE TRUNCATE ON billing_invoiceline
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
CREATE TRIGGER billing_price_no_truncate BEFORE TRUNCATE ON billing_price
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
CREATE TRIGGER billing_priceversion_no_truncate BEFORE TRUNCATE ON billing_priceversion
    FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate();
