-- Leases a part of all these budget periods, or nothing. `needed` is what the request needs, `floors` the least that it
-- accepts, `likes` what the gateway would like for more such requests. While budgets have room, a lease is up to an
-- eighth of what is left. Otherwise it is for this one request, and fully reserved. A rejection reports for each period
-- that is short its room, how much of it other leases could return at most, and until when they may keep it.
--
-- After a failover to a standby that lacks the last transactions, IDs are assigned a second time. So a fencing token
-- starts at random: nothing is settled or returned by the ID alone. A period that is missing or another tenant's is an
-- error, until the gateway has read its periods again.
CREATE FUNCTION billing_lease_budget(tenant bigint, gateway text, wanted bigint[], floors bigint[], needed bigint[],
    likes bigint[], lasting interval, longest interval, old bigint, old_fencing_token integer, rest bigint[])
RETURNS TABLE (lease_id bigint, fencing_token integer, money bigint, tokens bigint, requests bigint,
    budget_period_id bigint, room bigint, elsewhere bigint, until timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    p record;
    rooms bigint[] := '{NULL, NULL, NULL}';
    paces bigint[] := '{NULL, NULL, NULL}';
    grants bigint[] := '{NULL, NULL, NULL}';
    over bigint[] := '{}';
    hard_ids bigint[] := '{}';
    hard_units integer[] := '{}';
    hard_rooms bigint[] := '{}';
    exact boolean := false;
    short boolean := false;
    num_periods integer := 0;
BEGIN
    IF old IS NOT NULL THEN
        PERFORM billing_return_leases(
            ARRAY[old], ARRAY[old_fencing_token], rest[1:1], rest[2:2], rest[3:3], ARRAY[false]);
    END IF;
    FOR p IN
        SELECT p.id, {{unit}} AS unit, b.mode,
            (div(({{limit}})::numeric * 1000000 - p.used, 1000000) - p.reserved)::bigint AS room
        FROM billing_budgetperiod p LEFT JOIN billing_budget b ON b.id = p.budget_id AND b.active AND b.mode <> 'soft'
        WHERE p.id = ANY(wanted) AND p.tenant_id = tenant ORDER BY p.id FOR NO KEY UPDATE OF p
    LOOP
        num_periods := num_periods + 1;
        CONTINUE WHEN p.mode IS NULL;
        paces[p.unit] := least(paces[p.unit], p.room);
        IF p.mode = 'hard' THEN
            rooms[p.unit] := least(rooms[p.unit], p.room);
            hard_ids := hard_ids || p.id;
            hard_units := hard_units || p.unit;
            hard_rooms := hard_rooms || p.room;
        ELSIF p.room < needed[p.unit] THEN
            over := over || p.id;
        END IF;
    END LOOP;
    IF num_periods <> cardinality(wanted) THEN
        RAISE EXCEPTION 'a budget period is missing, or of another tenant' USING ERRCODE = 'foreign_key_violation';
    END IF;
    FOR unit IN 1..3 LOOP
        exact := exact OR coalesce(paces[unit] / 8 < 2 * needed[unit], false);
    END LOOP;
    FOR unit IN 1..3 LOOP
        grants[unit] := CASE WHEN exact THEN least(needed[unit], rooms[unit])
            ELSE least(likes[unit], paces[unit] / 8) END;
        short := short OR grants[unit] < floors[unit];
    END LOOP;
    IF short THEN
        RETURN QUERY SELECT NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, h.id, h.room,
            coalesce(o.amount, 0)::bigint, o.until
        FROM unnest(hard_ids, hard_units, hard_rooms) AS h (id, unit, room) LEFT JOIN LATERAL (
            SELECT sum((ARRAY[l.money, l.tokens, l.requests])[h.unit]) AS amount, min(l.reclaim_at) AS until
            FROM billing_budgetlease l
            WHERE l.open AND NOT l.fully_reserved AND l.tenant_id = tenant AND h.id = ANY(l.budget_period_ids)
        ) o ON true
        WHERE h.room < floors[h.unit];
        RETURN;
    END IF;
    UPDATE billing_budgetperiod p
    SET reserved = p.reserved + grants[{{unit}}], rejected = p.rejected + (p.id = ANY(over))::integer
    WHERE p.id = ANY(wanted);
    RETURN QUERY INSERT INTO billing_budgetlease AS l (tenant_id, gateway_id, fencing_token, budget_period_ids, money,
        tokens, requests, settled_money, settled_tokens, settled_requests, fully_reserved, open, created_at,
        leased_until, reclaim_at)
    VALUES (tenant, gateway, 1 + floor(random() * 2000000000)::integer, wanted, grants[1], grants[2], grants[3],
        0, 0, 0, grants = needed, true, now(), now() + lasting, now() + lasting + longest)
    RETURNING l.id, l.fencing_token, l.money, l.tokens, l.requests, NULL::bigint, NULL::bigint, NULL::bigint,
        NULL::timestamptz;
END
$$;
