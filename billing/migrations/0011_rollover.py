"""Roll-over across periods without requests, and never twice of the same money; the reaper keeps to this clock; what
was returned before may be returned again."""

from importlib import import_module

from django.db import migrations, models

before = import_module("billing.migrations.0006_window_functions")
UNIT = before.UNIT

# The windows that count for a request at an instant; those of a period that is new are made. What a budget's period did
# not use is carried over, up to its cap; what is still held then counts as used. A period without requests left all of
# it: budgets that roll over have a row for each, from the one they were made in on. What is carried over is taken from
# the period before, which a late request may still draw on.
OPEN = """
CREATE OR REPLACE FUNCTION billing_open_windows(tenant bigint, project bigint, key bigint, moment timestamptz)
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
    PERFORM billing_make_windows(array_agg(n.id), array_agg(n.starts), zone)
    FROM unnest(found, begun) AS n (id, starts)
    WHERE NOT EXISTS (SELECT FROM billing_window w WHERE w.budget_id = n.id AND w.period_start = n.starts);
    RETURN QUERY SELECT w.id, b.id, b.name::text, b.unit::text, b.period::text, b.mode::text, b.clamp, w.period_start,
        w.period_end
    FROM unnest(found, begun) AS n (id, starts) JOIN billing_budget b ON b.id = n.id
    JOIN billing_window w ON w.budget_id = n.id AND w.period_start = n.starts
    ORDER BY w.id;
END
$$
"""

# NOTE: it waits for older windows in the order of their ids, as all functions do, before it makes any.
MAKE = """
CREATE FUNCTION billing_make_windows(budgets bigint[], begun timestamptz[], zone text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b record;
    last billing_window;
    start timestamptz;
    step interval;
    carry bigint;
BEGIN
    PERFORM 1 FROM billing_window w WHERE w.id IN (
        SELECT DISTINCT ON (o.budget_id) o.id FROM unnest(budgets, begun) AS n (id, starts)
        JOIN billing_window o ON o.budget_id = n.id AND o.period_start < n.starts
        ORDER BY o.budget_id, o.period_start DESC
    ) ORDER BY w.id FOR NO KEY UPDATE;
    FOR b IN
        SELECT c.*, n.starts, CASE WHEN c.rollover_cap = 0 OR c.period = 'lifetime' THEN n.starts ELSE coalesce(
            (SELECT max(o.period_start) FROM billing_window o WHERE o.budget_id = c.id AND o.period_start < n.starts),
            least(n.starts, date_trunc(c.period::text, c.created_at AT TIME ZONE zone) AT TIME ZONE zone)) END AS since
        FROM unnest(budgets, begun) AS n (id, starts) JOIN billing_budget c ON c.id = n.id ORDER BY c.id
    LOOP
        step := CASE b.period WHEN 'month' THEN interval '1 month' ELSE interval '1 day' END;
        FOR start IN
            SELECT s AT TIME ZONE zone
            FROM generate_series(b.since AT TIME ZONE zone, b.starts AT TIME ZONE zone, step) AS s
        LOOP
            carry := 0;
            SELECT * INTO last FROM billing_window o WHERE o.budget_id = b.id AND o.period_end = start
                AND b.rollover_cap > 0 FOR NO KEY UPDATE;
            IF FOUND THEN
                carry := greatest(0, least(b.rollover_cap,
                    b.amount + last.carried - ceil(last.used / 1000000)::bigint - last.held));
            END IF;
            INSERT INTO billing_window
                (tenant_id, budget_id, unit, period_start, period_end, carried, used, held, refused)
            VALUES (b.tenant_id, b.id, b.unit, start,
                CASE WHEN b.period <> 'lifetime' THEN (start AT TIME ZONE zone + step) AT TIME ZONE zone END,
                carry, 0, 0, 0)
            ON CONFLICT (budget_id, period_start) DO NOTHING;
            IF FOUND AND carry > 0 THEN
                UPDATE billing_window w SET carried = w.carried - carry WHERE w.id = last.id;
            END IF;
        END LOOP;
    END LOOP;
END
$$
"""

# Takes back what slices hold for requests that cannot run any more: their gateway died, or an end was never told. Never
# before this clock says so, whatever the caller's says: it is the one that leases are given by.
REAP = before.REAP.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").replace(
    "s.reap_at <= before\n", "s.reap_at <= least(before, now())\n"
)
# A slice may have gone back before: then there is nothing to move.
RETURN = before.RETURN.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").replace(
    "ARRAY[cardinality(moved)]", "ARRAY[coalesce(cardinality(moved), 0)]"
)
OLD_RETURN = before.RETURN.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
OLD_REAP = before.REAP.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
OLD_OPEN = before.OPEN.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
assert REAP != OLD_REAP and RETURN != OLD_RETURN


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0010_usage_archives'),
    ]

    operations = [
        migrations.RemoveConstraint(model_name='window', name='window_counts'),
        migrations.AddConstraint(
            model_name='window',
            constraint=models.CheckConstraint(
                condition=models.Q(('held__gte', 0), ('refused__gte', 0), ('used__gte', 0)), name='window_counts'
            ),
        ),
        # The old rule again needs rows that keep it.
        migrations.RunSQL(migrations.RunSQL.noop, "UPDATE billing_window SET carried = 0 WHERE carried < 0"),
        migrations.AlterField(
            model_name='window',
            name='carried',
            field=models.BigIntegerField(
                default=0, help_text='taken over from the period before, less what the next took over; added to the limit'
            ),
        ),
        migrations.RunSQL([MAKE], ["DROP FUNCTION billing_make_windows"]),
        migrations.RunSQL([OPEN], [OLD_OPEN]),
        migrations.RunSQL([REAP], [OLD_REAP]),
        migrations.RunSQL([RETURN], [OLD_RETURN]),
    ]
