"""How windows and slices move: one function a step, each one transaction.

NOTE: every function locks slices first, then windows, both in the order of their ids: so none waits in a circle. Units
stand in the order money, tokens, requests. A window's `used` is in millionths of its unit.
"""

from django.db import migrations

LIMIT = "b.amount + w.carried + CASE WHEN b.raise_until > now() THEN b.raise_amount ELSE 0 END"
UNIT = "array_position(ARRAY['money', 'tokens', 'requests'], w.unit::text)"

# The windows that count for a request at an instant; those of a period that is new are made. A budget's unused rest of
# the period before is carried over, up to its cap; what is still held then counts as used.
OPEN = """
CREATE FUNCTION billing_open_windows(tenant bigint, project bigint, key bigint, moment timestamptz)
RETURNS TABLE (window_id bigint, budget_id bigint, name text, unit text, period text, mode text, clamp boolean,
    starts timestamptz, ends timestamptz)
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
    INSERT INTO billing_window AS w (tenant_id, budget_id, unit, period_start, period_end, carried, used, held, refused)
    SELECT tenant, b.id, b.unit, n.starts,
        CASE b.period WHEN 'lifetime' THEN NULL
            ELSE (n.starts AT TIME ZONE zone + ('1 ' || b.period)::interval) AT TIME ZONE zone END,
        CASE WHEN b.rollover_cap > 0 AND b.period <> 'lifetime' THEN coalesce((
            SELECT greatest(0, least(b.rollover_cap, b.amount + old.carried - ceil(old.used / 1000000) - old.held))
            FROM billing_window old WHERE old.budget_id = b.id AND old.period_end = n.starts
        ), 0) ELSE 0 END, 0, 0, 0
    FROM unnest(found, begun) AS n (id, starts) JOIN billing_budget b ON b.id = n.id
    ORDER BY b.id
    ON CONFLICT (budget_id, period_start) DO NOTHING;
    RETURN QUERY SELECT w.id, b.id, b.name::text, b.unit::text, b.period::text, b.mode::text, b.clamp, w.period_start,
        w.period_end
    FROM unnest(found, begun) AS n (id, starts) JOIN billing_budget b ON b.id = n.id
    JOIN billing_window w ON w.budget_id = n.id AND w.period_start = n.starts
    ORDER BY w.id;
END
$$
"""

# Adds to what windows hold and what was used of them; `ids` may name a window more than once.
MOVE = """
CREATE FUNCTION billing_move(ids bigint[], helds bigint[], useds numeric[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM billing_window w WHERE w.id = ANY(ids) ORDER BY w.id FOR NO KEY UPDATE;
    UPDATE billing_window w SET held = w.held + m.held, used = w.used + m.used
    FROM (SELECT n.id, sum(n.held) AS held, sum(n.used) AS used FROM unnest(ids, helds, useds) AS n (id, held, used)
        GROUP BY n.id) m
    WHERE w.id = m.id;
END
$$
"""

# Gateways give back what they have not admitted from slices, which are sealed by it. Done at most once for each: what is
# sealed is given back only untouched, that is whole.
RETURN = f"""
CREATE FUNCTION billing_return(ids bigint[], fences integer[], moneys bigint[], tokenses bigint[], requestses bigint[],
    untouched boolean[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_slice s WHERE s.id = ANY(ids) ORDER BY s.id FOR NO KEY UPDATE;
    WITH done AS (
        UPDATE billing_slice s SET money = s.money - n.money, tokens = s.tokens - n.tokens,
            requests = s.requests - n.requests, sealed = true, open = s.requests > n.requests
        FROM unnest(ids, fences, moneys, tokenses, requestses, untouched)
            AS n (id, fence, money, tokens, requests, untouched)
        WHERE s.id = n.id AND s.fence = n.fence AND (NOT s.sealed OR n.untouched AND s.requests = n.requests)
        RETURNING s.windows, n.money, n.tokens, n.requests
    )
    SELECT array_agg(w.id), array_agg(-(ARRAY[d.money, d.tokens, d.requests])[{UNIT}]) INTO moved, amounts
    FROM done d JOIN billing_window w ON w.id = ANY(d.windows);
    PERFORM billing_move(moved, amounts, array_fill(0::numeric, ARRAY[cardinality(moved)]));
END
$$
"""

# Leases a slice of all the windows, or none. `holds` is what the request needs, `floors` what it can do with, `likes`
# what the gateway would like for more of the kind. While there is plenty a slice is up to an eighth of what is left;
# then it is for this one request alone, and sealed. A refusal tells of each window that is short what room it has, and
# how much, at most, others could give back, and until when they may keep it.
LEASE = f"""
CREATE FUNCTION billing_lease(tenant bigint, gateway text, wanted bigint[], floors bigint[], holds bigint[],
    likes bigint[], lasting interval, longest interval, old bigint, old_fence integer, rest bigint[])
RETURNS TABLE (slice_id bigint, fence integer, money bigint, tokens bigint, requests bigint,
    window_id bigint, room bigint, elsewhere bigint, until timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    w record;
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
        PERFORM billing_return(ARRAY[old], ARRAY[old_fence], rest[1:1], rest[2:2], rest[3:3], ARRAY[false]);
    END IF;
    FOR w IN
        SELECT w.id, {UNIT} AS unit, b.mode,
            (div(({LIMIT})::numeric * 1000000 - w.used, 1000000) - w.held)::bigint AS room
        FROM billing_window w LEFT JOIN billing_budget b ON b.id = w.budget_id AND b.active AND b.mode <> 'soft'
        WHERE w.id = ANY(wanted) ORDER BY w.id FOR NO KEY UPDATE OF w
    LOOP
        CONTINUE WHEN w.mode IS NULL;
        paces[w.unit] := least(paces[w.unit], w.room);
        IF w.mode = 'hard' THEN
            rooms[w.unit] := least(rooms[w.unit], w.room);
            hard_ids := hard_ids || w.id;
            hard_units := hard_units || w.unit;
            hard_rooms := hard_rooms || w.room;
        ELSIF w.room < holds[w.unit] THEN
            over := over || w.id;
        END IF;
    END LOOP;
    FOR unit IN 1..3 LOOP
        exact := exact OR coalesce(paces[unit] / 8 < 2 * holds[unit], false);
    END LOOP;
    FOR unit IN 1..3 LOOP
        grants[unit] := CASE WHEN exact THEN least(holds[unit], rooms[unit]) ELSE least(likes[unit], paces[unit] / 8) END;
        short := short OR grants[unit] < floors[unit];
    END LOOP;
    IF short THEN
        RETURN QUERY SELECT NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, h.id, h.room,
            coalesce(o.amount, 0)::bigint, o.until
        FROM unnest(hard_ids, hard_units, hard_rooms) AS h (id, unit, room) LEFT JOIN LATERAL (
            SELECT sum((ARRAY[s.money, s.tokens, s.requests])[h.unit]) AS amount, min(s.reap_at) AS until
            FROM billing_slice s WHERE s.open AND NOT s.sealed AND s.tenant_id = tenant AND h.id = ANY(s.windows)
        ) o ON true
        WHERE h.room < floors[h.unit];
        RETURN;
    END IF;
    UPDATE billing_window w SET held = w.held + grants[{UNIT}], refused = w.refused + (w.id = ANY(over))::integer
    WHERE w.id = ANY(wanted);
    RETURN QUERY INSERT INTO billing_slice AS s (tenant_id, gateway_id, fence, windows, money, tokens, requests,
        settled_money, settled_tokens, settled_requests, sealed, open, made_at, leased_until, reap_at)
    VALUES (tenant, gateway, 1, wanted, grants[1], grants[2], grants[3], 0, 0, 0, grants = holds, true, now(),
        now() + lasting, now() + lasting + longest)
    RETURNING s.id, s.fence, s.money, s.tokens, s.requests, NULL::bigint, NULL::bigint, NULL::bigint, NULL::timestamptz;
END
$$
"""

# For each slice, what its settled requests had held goes back, and what they used is used. Returns the slices that have
# another fence now: what they held went back before, and nothing was moved.
SETTLE = f"""
CREATE FUNCTION billing_settle(ids bigint[], fences integer[], moneys bigint[], tokenses bigint[], requestses bigint[],
    used_moneys numeric[], used_tokenses bigint[], used_requestses bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM billing_slice s WHERE s.id = ANY(ids) ORDER BY s.id FOR NO KEY UPDATE;
    RETURN QUERY SELECT n.id FROM unnest(ids, fences) AS n (id, fence)
        WHERE NOT EXISTS (SELECT FROM billing_slice s WHERE s.id = n.id AND s.fence = n.fence);
    PERFORM billing_move(array_agg(w.id),
        array_agg(-(ARRAY[n.money, n.tokens, n.requests])[{UNIT}]),
        array_agg((ARRAY[n.used_money, 1000000::numeric * n.used_tokens, 1000000::numeric * n.used_requests])[{UNIT}]))
    FROM unnest(ids, fences, moneys, tokenses, requestses, used_moneys, used_tokenses, used_requestses)
        AS n (id, fence, money, tokens, requests, used_money, used_tokens, used_requests)
    JOIN billing_slice s ON s.id = n.id AND s.fence = n.fence
    JOIN billing_window w ON w.id = ANY(s.windows);
    UPDATE billing_slice s SET money = s.money - n.money, tokens = s.tokens - n.tokens,
        requests = s.requests - n.requests, settled_money = s.settled_money + n.used_money,
        settled_tokens = s.settled_tokens + n.used_tokens, settled_requests = s.settled_requests + n.used_requests,
        open = NOT s.sealed OR s.requests > n.requests
    FROM unnest(ids, fences, moneys, tokenses, requestses, used_moneys, used_tokenses, used_requestses)
        AS n (id, fence, money, tokens, requests, used_money, used_tokens, used_requests)
    WHERE s.id = n.id AND s.fence = n.fence;
END
$$
"""

# Adds to what was used through a slice, whatever its fence, without any hold: what came too late, if it must fit, or
# what an adjustment takes back. False: it does not fit, and nothing was moved.
ADJUST = f"""
CREATE FUNCTION billing_adjust(slice bigint, money numeric, tokens bigint, requests bigint, must_fit boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    its_windows bigint[] := (SELECT s.windows FROM billing_slice s WHERE s.id = slice FOR NO KEY UPDATE);
    amounts numeric[] := ARRAY[money, 1000000::numeric * tokens, 1000000::numeric * requests];
BEGIN
    PERFORM 1 FROM billing_window w WHERE w.id = ANY(its_windows) ORDER BY w.id FOR NO KEY UPDATE;
    IF must_fit AND EXISTS (
        SELECT FROM billing_window w JOIN billing_budget b ON b.id = w.budget_id AND b.active AND b.mode = 'hard'
        WHERE w.id = ANY(its_windows)
            AND w.used + 1000000::numeric * w.held + amounts[{UNIT}] > ({LIMIT})::numeric * 1000000
    ) THEN
        RETURN false;
    END IF;
    UPDATE billing_window w SET used = w.used + amounts[{UNIT}] WHERE w.id = ANY(its_windows);
    UPDATE billing_slice s SET settled_money = s.settled_money + money, settled_tokens = s.settled_tokens + tokens,
        settled_requests = s.settled_requests + requests WHERE s.id = slice;
    RETURN true;
END
$$
"""

# Takes back what slices hold for requests that cannot run any more: their gateway died, or an end was never told.
REAP = f"""
CREATE FUNCTION billing_reap(before timestamptz) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    dead bigint[];
BEGIN
    SELECT array_agg(s.id) INTO dead FROM (SELECT s.id FROM billing_slice s WHERE s.open AND s.reap_at <= before
        ORDER BY s.id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) s;
    PERFORM billing_move(array_agg(w.id), array_agg(-(ARRAY[s.money, s.tokens, s.requests])[{UNIT}]),
        array_agg(0::numeric))
    FROM billing_slice s JOIN billing_window w ON w.id = ANY(s.windows) WHERE s.id = ANY(dead);
    RETURN QUERY UPDATE billing_slice s SET fence = s.fence + 1, money = 0, tokens = 0, requests = 0, sealed = true,
        open = false WHERE s.id = ANY(dead) RETURNING s.id;
END
$$
"""

FUNCTIONS = {
    "billing_open_windows": OPEN,
    "billing_move": MOVE,
    "billing_return": RETURN,
    "billing_lease": LEASE,
    "billing_settle": SETTLE,
    "billing_adjust": ADJUST,
    "billing_reap": REAP,
}


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0005_windows'),
    ]

    operations = [
        migrations.RunSQL([sql], [f"DROP FUNCTION {name}"]) for name, sql in FUNCTIONS.items()
    ]
