-- Reserves an execution's maximum cost from its credential's limit of the UTC day. One transaction per credential at a
-- time decides. What is booked and what is reserved are read in one statement, because a settlement exchanges the one
-- for the other. A repeated call finds its reservation.
CREATE FUNCTION billing_reserve_spend(credential bigint, spend_limit bigint, moment timestamptz, request text,
    number smallint, amount bigint, until timestamptz)
RETURNS TABLE (is_reserved boolean, spent_femto numeric, reserved_nano bigint) LANGUAGE plpgsql AS $$
DECLARE
    today date := (moment AT TIME ZONE 'UTC')::date;
    known boolean;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('billing_spend ' || credential, 0));
    DELETE FROM billing_spendreservation d USING (
        SELECT r.admitted_at, r.request_id, r.execution FROM billing_spendreservation r
        WHERE r.credential_id = credential AND r.expires_at <= now() FOR UPDATE SKIP LOCKED
    ) e WHERE d.admitted_at = e.admitted_at AND d.request_id = e.request_id AND d.execution = e.execution;
    SELECT
        coalesce((SELECT sum(c.cost_femto) FROM billing_dailycost c
            WHERE c.credential_id = credential AND c.day = today), 0),
        coalesce(sum(r.nano), 0)::bigint,
        coalesce(bool_or(r.request_id = request AND r.execution = number AND r.admitted_at = moment), false)
    INTO spent_femto, reserved_nano, known
    FROM billing_spendreservation r
    WHERE r.credential_id = credential AND r.expires_at > now() AND (r.admitted_at AT TIME ZONE 'UTC')::date = today;
    is_reserved := known OR spent_femto + 1000000::numeric * (reserved_nano + amount) <= 1000000::numeric * spend_limit;
    IF is_reserved AND NOT known THEN
        INSERT INTO billing_spendreservation (admitted_at, request_id, execution, credential_id, nano, expires_at)
        VALUES (moment, request, number, credential, amount, until);
    END IF;
    RETURN NEXT;
END
$$;
