"""Functions that move budget periods and leases: one function for each step, each in one transaction.

NOTE: every function locks leases first, then budget periods, both in the order of their ids. So no two of them can
deadlock. Units are in the order money, tokens, requests. `used` of a budget period is in millionths of its unit.

Early release: a gateway may release the unused part of a reservation before its usage event is settled, and only once.
A row of `billing_earlyrelease` exists from then until the settlement, or until the lease is reclaimed. The release and
the settlement both lock the lease's row first. The second of them finds what the first has done: the usage event, or
the row.
"""

from typing import Any

from django.db import migrations

LIMIT = "b.amount + p.rolled_over + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END"
UNIT = "array_position(ARRAY['money', 'tokens', 'requests'], p.unit::text)"

# Returns the budget periods that apply to a request at an instant, and creates those that are missing.
OPEN_PERIODS = """
CREATE FUNCTION billing_open_budget_periods(tenant bigint, project bigint, key bigint, moment timestamptz)
RETURNS TABLE (budget_period_id bigint, budget_id bigint, name text, unit text, period text, mode text,
    reduce_max_tokens boolean, starts timestamptz, ends timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    zone text := coalesce(
        (SELECT e.time_zone FROM billing_billingprofile p JOIN billing_billingentity e ON e.id = p.entity_id
            WHERE p.tenant_id = tenant),
        (SELECT time_zone FROM billing_billingentity WHERE slug = 'default'), 'UTC');
    member bigint := (SELECT created_by_id FROM tenants_apikey WHERE id = key);
    found bigint[];
    begun timestamptz[];
BEGIN
    SELECT array_agg(b.id), array_agg(CASE b.period WHEN 'lifetime' THEN '1970-01-01 00:00:00+00'::timestamptz
            ELSE date_trunc(b.period::text, moment AT TIME ZONE zone) AT TIME ZONE zone END)
    INTO found, begun FROM billing_budget b
    WHERE b.active AND b.tenant_id = tenant AND (b.project_id IS NULL OR b.project_id = project)
        AND (b.key_id IS NULL OR b.key_id = key) AND (b.member_id IS NULL OR b.member_id = member);
    PERFORM billing_create_budget_periods(array_agg(n.id), array_agg(n.starts), zone)
    FROM unnest(found, begun) AS n (id, starts)
    WHERE NOT EXISTS (SELECT FROM billing_budgetperiod p WHERE p.budget_id = n.id AND p.period_start = n.starts);
    RETURN QUERY SELECT p.id, b.id, b.name::text, b.unit::text, b.period::text, b.mode::text, b.reduce_max_tokens,
        p.period_start, p.period_end
    FROM unnest(found, begun) AS n (id, starts) JOIN billing_budget b ON b.id = n.id
    JOIN billing_budgetperiod p ON p.budget_id = n.id AND p.period_start = n.starts
    ORDER BY p.id;
END
$$
"""

# Creates the periods that start at these instants. The unused amount of the period before rolls over, up to the
# budget's limit; reserved amounts count as used. A budget with rollover gets a row for every period since the last one,
# because a period without requests leaves its whole amount. What rolls over is subtracted from the period before, on
# which late usage may still draw.
CREATE_PERIODS = """
CREATE FUNCTION billing_create_budget_periods(budgets bigint[], begun timestamptz[], zone text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b record;
    last billing_budgetperiod;
    start timestamptz;
    step interval;
    carry bigint;
BEGIN
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id IN (
        SELECT DISTINCT ON (o.budget_id) o.id FROM unnest(budgets, begun) AS n (id, starts)
        JOIN billing_budgetperiod o ON o.budget_id = n.id AND o.period_start < n.starts
        ORDER BY o.budget_id, o.period_start DESC
    ) ORDER BY p.id FOR NO KEY UPDATE;
    FOR b IN
        SELECT c.*, n.starts, CASE WHEN c.rollover_limit = 0 OR c.period = 'lifetime' THEN n.starts ELSE coalesce(
            (SELECT max(o.period_start) FROM billing_budgetperiod o
                WHERE o.budget_id = c.id AND o.period_start < n.starts),
            least(n.starts, date_trunc(c.period::text, c.created_at AT TIME ZONE zone) AT TIME ZONE zone)) END AS since
        FROM unnest(budgets, begun) AS n (id, starts) JOIN billing_budget c ON c.id = n.id ORDER BY c.id
    LOOP
        step := CASE b.period WHEN 'month' THEN interval '1 month' ELSE interval '1 day' END;
        FOR start IN
            SELECT s AT TIME ZONE zone
            FROM generate_series(b.since AT TIME ZONE zone, b.starts AT TIME ZONE zone, step) AS s
        LOOP
            carry := 0;
            SELECT * INTO last FROM billing_budgetperiod o WHERE o.budget_id = b.id AND o.period_end = start
                AND b.rollover_limit > 0 FOR NO KEY UPDATE;
            IF FOUND THEN
                carry := greatest(0, least(b.rollover_limit,
                    b.amount + last.rolled_over - ceil(last.used / 1000000)::bigint - last.reserved));
            END IF;
            INSERT INTO billing_budgetperiod
                (tenant_id, budget_id, unit, period_start, period_end, rolled_over, used, reserved, rejected)
            VALUES (b.tenant_id, b.id, b.unit, start,
                CASE WHEN b.period <> 'lifetime' THEN (start AT TIME ZONE zone + step) AT TIME ZONE zone END,
                carry, 0, 0, 0)
            ON CONFLICT (budget_id, period_start) DO NOTHING;
            IF FOUND AND carry > 0 THEN
                UPDATE billing_budgetperiod p SET rolled_over = p.rolled_over - carry WHERE p.id = last.id;
            END IF;
        END LOOP;
    END LOOP;
END
$$
"""

# Adds to the reserved and used amounts of budget periods. `ids` may name a period more than once.
MOVE = """
CREATE FUNCTION billing_move_amounts(ids bigint[], reserved_changes bigint[], used_changes numeric[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id = ANY(ids) ORDER BY p.id FOR NO KEY UPDATE;
    UPDATE billing_budgetperiod p SET reserved = p.reserved + m.reserved, used = p.used + m.used
    FROM (SELECT n.id, sum(n.reserved) AS reserved, sum(n.used) AS used
        FROM unnest(ids, reserved_changes, used_changes) AS n (id, reserved, used) GROUP BY n.id) m
    WHERE p.id = m.id;
END
$$
"""

# Returns what gateways have not admitted from leases, which become fully reserved by it. Each lease returns at most
# once: a fully reserved one only if it is untouched, and then all of it.
RETURN = f"""
CREATE FUNCTION billing_return_leases(ids bigint[], fencing_tokens integer[], money_amounts bigint[],
    token_amounts bigint[], request_counts bigint[], untouched boolean[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(ids) ORDER BY l.id FOR NO KEY UPDATE;
    WITH done AS (
        UPDATE billing_budgetlease l SET money = l.money - n.money, tokens = l.tokens - n.tokens,
            requests = l.requests - n.requests, fully_reserved = true, open = l.requests > n.requests
        FROM unnest(ids, fencing_tokens, money_amounts, token_amounts, request_counts, untouched)
            AS n (id, fencing_token, money, tokens, requests, untouched)
        WHERE l.id = n.id AND l.fencing_token = n.fencing_token
            AND (NOT l.fully_reserved OR n.untouched AND l.requests = n.requests)
        RETURNING l.budget_period_ids, n.money, n.tokens, n.requests
    )
    SELECT array_agg(p.id), array_agg(-(ARRAY[d.money, d.tokens, d.requests])[{UNIT}]) INTO moved, amounts
    FROM done d JOIN billing_budgetperiod p ON p.id = ANY(d.budget_period_ids);
    PERFORM billing_move_amounts(moved, amounts, array_fill(0::numeric, ARRAY[coalesce(cardinality(moved), 0)]));
END
$$
"""

# Leases a part of all these budget periods, or nothing. `needed` is what the request needs, `floors` the least that it
# accepts, `likes` what the gateway would like for more such requests. While budgets have room, a lease is up to an
# eighth of what is left. Otherwise it is for this one request, and fully reserved. A rejection reports for each period
# that is short its room, how much of it other leases could return at most, and until when they may keep it.
LEASE = f"""
CREATE FUNCTION billing_lease_budget(tenant bigint, gateway text, wanted bigint[], floors bigint[], needed bigint[],
    likes bigint[], lasting interval, longest interval, old bigint, old_fencing_token integer, rest bigint[])
RETURNS TABLE (lease_id bigint, fencing_token integer, money bigint, tokens bigint, requests bigint,
    budget_period_id bigint, room bigint, elsewhere bigint, until timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    p record;
    rooms bigint[] := '{{NULL, NULL, NULL}}';
    paces bigint[] := '{{NULL, NULL, NULL}}';
    grants bigint[] := '{{NULL, NULL, NULL}}';
    over bigint[] := '{{}}';
    hard_ids bigint[] := '{{}}';
    hard_units integer[] := '{{}}';
    hard_rooms bigint[] := '{{}}';
    exact boolean := false;
    short boolean := false;
BEGIN
    IF old IS NOT NULL THEN
        PERFORM billing_return_leases(
            ARRAY[old], ARRAY[old_fencing_token], rest[1:1], rest[2:2], rest[3:3], ARRAY[false]);
    END IF;
    FOR p IN
        SELECT p.id, {UNIT} AS unit, b.mode,
            (div(({LIMIT})::numeric * 1000000 - p.used, 1000000) - p.reserved)::bigint AS room
        FROM billing_budgetperiod p LEFT JOIN billing_budget b ON b.id = p.budget_id AND b.active AND b.mode <> 'soft'
        WHERE p.id = ANY(wanted) ORDER BY p.id FOR NO KEY UPDATE OF p
    LOOP
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
    SET reserved = p.reserved + grants[{UNIT}], rejected = p.rejected + (p.id = ANY(over))::integer
    WHERE p.id = ANY(wanted);
    RETURN QUERY INSERT INTO billing_budgetlease AS l (tenant_id, gateway_id, fencing_token, budget_period_ids, money,
        tokens, requests, settled_money, settled_tokens, settled_requests, fully_reserved, open, created_at,
        leased_until, reclaim_at)
    VALUES (tenant, gateway, 1, wanted, grants[1], grants[2], grants[3], 0, 0, 0, grants = needed, true, now(),
        now() + lasting, now() + lasting + longest)
    RETURNING l.id, l.fencing_token, l.money, l.tokens, l.requests, NULL::bigint, NULL::bigint, NULL::bigint,
        NULL::timestamptz;
END
$$
"""

# Settles executions: for each lease, releases their reservations and adds what they used. Returns the leases that have
# another fencing token: their reservations were reclaimed before, and nothing was moved.
#
# What was released early is not released again. An event that was inserted before the early release must be inserted
# again, so that `released_by` is right. An execution that used more than was retained for it is rejected.
SETTLE = f"""
CREATE FUNCTION billing_settle(ids bigint[], fencing_tokens integer[], money_amounts bigint[], token_amounts bigint[],
    request_counts bigint[], used_money_amounts numeric[], used_token_amounts bigint[], used_request_counts bigint[])
RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    early_ids bigint[];
    early_money_amounts bigint[];
    early_token_amounts bigint[];
    raced boolean;
    over text;
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(ids) ORDER BY l.id FOR NO KEY UPDATE;
    WITH settled AS (
        DELETE FROM billing_earlyrelease r USING billing_usageevent e
        WHERE r.lease_id = ANY(ids)
            AND e.admitted_at = r.admitted_at AND e.request_id = r.request_id AND e.execution = r.execution
        RETURNING r.lease_id, r.money, r.tokens, r.request_id, e.released_by, e.outcome <> 'failed' AND (
            e.cost_femto > 1000000::numeric * r.retained_money
            OR e.uncached + e.cache_read + e.cache_write_5m + e.cache_write_1h + e.output > r.retained_tokens) AS over
    )
    SELECT array_agg(s.lease_id), array_agg(s.money), array_agg(s.tokens), bool_or(s.released_by = 'settler'),
        string_agg(s.request_id, ', ') FILTER (WHERE s.over)
    INTO early_ids, early_money_amounts, early_token_amounts, raced, over FROM settled s;
    IF raced THEN
        RAISE EXCEPTION 'a gateway released part of a reservation meanwhile' USING ERRCODE = 'serialization_failure';
    ELSIF over IS NOT NULL THEN
        RAISE EXCEPTION 'used more than was retained after an early release: %', over
            USING ERRCODE = 'check_violation', CONSTRAINT = 'billing_early_release_retained';
    END IF;
    IF early_ids IS NOT NULL THEN
        SELECT array_agg(n.money - coalesce(d.money, 0) ORDER BY n.place),
            array_agg(n.tokens - coalesce(d.tokens, 0) ORDER BY n.place)
        INTO money_amounts, token_amounts
        FROM unnest(ids, money_amounts, token_amounts) WITH ORDINALITY AS n (id, money, tokens, place) LEFT JOIN (
            SELECT r.id, sum(r.money)::bigint AS money, sum(r.tokens)::bigint AS tokens
            FROM unnest(early_ids, early_money_amounts, early_token_amounts) AS r (id, money, tokens) GROUP BY r.id
        ) d ON d.id = n.id;
    END IF;
    RETURN QUERY SELECT n.id FROM unnest(ids, fencing_tokens) AS n (id, fencing_token)
        WHERE NOT EXISTS (SELECT FROM billing_budgetlease l WHERE l.id = n.id AND l.fencing_token = n.fencing_token);
    PERFORM billing_move_amounts(array_agg(p.id),
        array_agg(-(ARRAY[n.money, n.tokens, n.requests])[{UNIT}]),
        array_agg((ARRAY[n.used_money, 1000000::numeric * n.used_tokens, 1000000::numeric * n.used_requests])[{UNIT}]))
    FROM unnest(ids, fencing_tokens, money_amounts, token_amounts, request_counts, used_money_amounts,
            used_token_amounts, used_request_counts)
        AS n (id, fencing_token, money, tokens, requests, used_money, used_tokens, used_requests)
    JOIN billing_budgetlease l ON l.id = n.id AND l.fencing_token = n.fencing_token
    JOIN billing_budgetperiod p ON p.id = ANY(l.budget_period_ids);
    UPDATE billing_budgetlease l SET money = l.money - n.money, tokens = l.tokens - n.tokens,
        requests = l.requests - n.requests, settled_money = l.settled_money + n.used_money,
        settled_tokens = l.settled_tokens + n.used_tokens, settled_requests = l.settled_requests + n.used_requests,
        open = NOT l.fully_reserved OR l.requests > n.requests
    FROM unnest(ids, fencing_tokens, money_amounts, token_amounts, request_counts, used_money_amounts,
            used_token_amounts, used_request_counts)
        AS n (id, fencing_token, money, tokens, requests, used_money, used_tokens, used_requests)
    WHERE l.id = n.id AND l.fencing_token = n.fencing_token;
END
$$
"""

# Adds to what was used through a lease, whatever its fencing token, without a reservation: late usage, if it must fit,
# or an adjustment. False: it does not fit, and nothing was moved.
ADJUST = f"""
CREATE FUNCTION billing_adjust(lease bigint, money numeric, tokens bigint, requests bigint, must_fit boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    period_ids bigint[] := (SELECT l.budget_period_ids FROM billing_budgetlease l WHERE l.id = lease FOR NO KEY UPDATE);
    amounts numeric[] := ARRAY[money, 1000000::numeric * tokens, 1000000::numeric * requests];
BEGIN
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id = ANY(period_ids) ORDER BY p.id FOR NO KEY UPDATE;
    IF must_fit AND EXISTS (
        SELECT FROM billing_budgetperiod p JOIN billing_budget b ON b.id = p.budget_id AND b.active AND b.mode = 'hard'
        WHERE p.id = ANY(period_ids)
            AND p.used + 1000000::numeric * p.reserved + amounts[{UNIT}] > ({LIMIT})::numeric * 1000000
    ) THEN
        RETURN false;
    END IF;
    UPDATE billing_budgetperiod p SET used = p.used + amounts[{UNIT}] WHERE p.id = ANY(period_ids);
    UPDATE billing_budgetlease l SET settled_money = l.settled_money + money,
        settled_tokens = l.settled_tokens + tokens, settled_requests = l.settled_requests + requests WHERE l.id = lease;
    RETURN true;
END
$$
"""

# Reclaims the outstanding amounts of leases whose requests cannot run any more: their gateway was lost, or an end was
# never reported. Not before this clock allows it, because leases are given by this clock.
RECLAIM = f"""
CREATE FUNCTION billing_reclaim_leases(before timestamptz) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    overdue bigint[];
BEGIN
    SELECT array_agg(l.id) INTO overdue FROM (SELECT l.id FROM billing_budgetlease l
        WHERE l.open AND l.reclaim_at <= least(before, now())
        ORDER BY l.id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) l;
    PERFORM billing_move_amounts(array_agg(p.id), array_agg(-(ARRAY[l.money, l.tokens, l.requests])[{UNIT}]),
        array_agg(0::numeric))
    FROM billing_budgetlease l JOIN billing_budgetperiod p ON p.id = ANY(l.budget_period_ids) WHERE l.id = ANY(overdue);
    DELETE FROM billing_earlyrelease r WHERE r.lease_id = ANY(overdue);
    RETURN QUERY UPDATE billing_budgetlease l SET fencing_token = l.fencing_token + 1, money = 0, tokens = 0,
        requests = 0, fully_reserved = true, open = false WHERE l.id = ANY(overdue) RETURNING l.id;
END
$$
"""

# Releases the unused parts of reservations whose executions have ended, and retains the rest for their settlement. An
# execution that is settled, or whose lease was reclaimed, is skipped: its reservation was released before.
RELEASE = f"""
CREATE FUNCTION billing_release_unused(leases bigint[], fencing_tokens integer[], times timestamptz[],
    request_ids text[], executions smallint[], money_amounts bigint[], token_amounts bigint[],
    retained_money_amounts bigint[], retained_token_amounts bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_budgetlease l WHERE l.id = ANY(leases) ORDER BY l.id FOR NO KEY UPDATE;
    WITH released AS (
        INSERT INTO billing_earlyrelease AS r
            (admitted_at, request_id, execution, lease_id, money, tokens, retained_money, retained_tokens)
        SELECT n.admitted_at, n.request_id, n.execution, n.lease_id, n.money, n.tokens, n.retained_money,
            n.retained_tokens
        FROM unnest(leases, fencing_tokens, times, request_ids, executions, money_amounts, token_amounts,
                retained_money_amounts, retained_token_amounts)
            AS n (lease_id, fencing_token, admitted_at, request_id, execution, money, tokens, retained_money,
                retained_tokens)
        JOIN billing_budgetlease l ON l.id = n.lease_id AND l.fencing_token = n.fencing_token
        WHERE NOT EXISTS (SELECT FROM billing_usageevent e WHERE e.admitted_at = n.admitted_at
            AND e.request_id = n.request_id AND e.execution = n.execution)
        ON CONFLICT DO NOTHING
        RETURNING r.lease_id, r.money, r.tokens
    ), sums AS (
        SELECT d.lease_id, sum(d.money)::bigint AS money, sum(d.tokens)::bigint AS tokens
        FROM released d GROUP BY d.lease_id
    ), done AS (
        UPDATE billing_budgetlease l SET money = l.money - d.money, tokens = l.tokens - d.tokens
        FROM sums d WHERE l.id = d.lease_id
        RETURNING l.budget_period_ids, d.money, d.tokens
    )
    SELECT array_agg(p.id), array_agg(-(ARRAY[d.money, d.tokens, 0])[{UNIT}]) INTO moved, amounts
    FROM done d JOIN billing_budgetperiod p ON p.id = ANY(d.budget_period_ids);
    PERFORM billing_move_amounts(moved, amounts, array_fill(0::numeric, ARRAY[coalesce(cardinality(moved), 0)]));
END
$$
"""

FUNCTIONS: dict[str, Any] = {
    "billing_open_budget_periods": OPEN_PERIODS,
    "billing_create_budget_periods": CREATE_PERIODS,
    "billing_move_amounts": MOVE,
    "billing_return_leases": RETURN,
    "billing_lease_budget": LEASE,
    "billing_settle": SETTLE,
    "billing_adjust": ADJUST,
    "billing_reclaim_leases": RECLAIM,
    "billing_release_unused": RELEASE,
}


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0002_row_level_security'),
    ]

    operations = [
        migrations.RunSQL(list(FUNCTIONS.values()), [f"DROP FUNCTION {name}" for name in FUNCTIONS]),
    ]
