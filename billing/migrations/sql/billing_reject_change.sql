CREATE FUNCTION billing_reject_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'table % is append-only: % rejected', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$;

CREATE TRIGGER billing_usage_no_change BEFORE UPDATE OR DELETE ON billing_usageevent
    FOR EACH ROW EXECUTE FUNCTION billing_reject_change();
