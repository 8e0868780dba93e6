"""Early release: the unused part of a reservation goes back before its usage event is settled, and only once.

A row of `billing_earlyrelease` exists from the release by a gateway until the settlement, or until the lease is
reclaimed. The release and the settlement both lock the lease's row first. The one that is second finds what the first
has done: the usage event, or the row.

Deployment: the functions keep their signatures, so gateways and settlers of the release before run beside new ones. A
settler of the release before calls the new `billing_settle`, which subtracts what was released early. It leaves
`released_by` empty. A gateway of the release before never releases early. Adding the column waits for every settlement
that is under way, so none of them runs the old function after a gateway has released by the new one.
"""

from importlib import import_module

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import SYSTEM

functions = import_module("billing.migrations.0006_window_functions")
rollover = import_module("billing.migrations.0011_rollover")
UNIT = functions.UNIT

# Releases the unused parts of reservations whose executions have ended, and keeps `kept_…` for their settlement. An
# execution that is settled, or whose lease was reclaimed, is skipped: its reservation is back already.
RELEASE = f"""
CREATE FUNCTION billing_release_unused(slices bigint[], fences integer[], times timestamptz[], requests text[],
    executions smallint[], moneys bigint[], tokenses bigint[], kept_moneys bigint[], kept_tokenses bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    moved bigint[];
    amounts bigint[];
BEGIN
    PERFORM 1 FROM billing_slice s WHERE s.id = ANY(slices) ORDER BY s.id FOR NO KEY UPDATE;
    WITH released AS (
        INSERT INTO billing_earlyrelease AS r
            (admitted_at, request_id, execution, slice_id, money, tokens, kept_money, kept_tokens)
        SELECT n.admitted_at, n.request_id, n.execution, n.slice_id, n.money, n.tokens, n.kept_money, n.kept_tokens
        FROM unnest(slices, fences, times, requests, executions, moneys, tokenses, kept_moneys, kept_tokenses)
            AS n (slice_id, fence, admitted_at, request_id, execution, money, tokens, kept_money, kept_tokens)
        JOIN billing_slice s ON s.id = n.slice_id AND s.fence = n.fence
        WHERE NOT EXISTS (SELECT FROM billing_usageevent e WHERE e.admitted_at = n.admitted_at
            AND e.request_id = n.request_id AND e.execution = n.execution)
        ON CONFLICT DO NOTHING
        RETURNING r.slice_id, r.money, r.tokens
    ), sums AS (
        SELECT d.slice_id, sum(d.money)::bigint AS money, sum(d.tokens)::bigint AS tokens
        FROM released d GROUP BY d.slice_id
    ), done AS (
        UPDATE billing_slice s SET money = s.money - d.money, tokens = s.tokens - d.tokens
        FROM sums d WHERE s.id = d.slice_id
        RETURNING s.windows, d.money, d.tokens
    )
    SELECT array_agg(w.id), array_agg(-(ARRAY[d.money, d.tokens, 0])[{UNIT}]) INTO moved, amounts
    FROM done d JOIN billing_window w ON w.id = ANY(d.windows);
    PERFORM billing_move(moved, amounts, array_fill(0::numeric, ARRAY[coalesce(cardinality(moved), 0)]));
END
$$
"""

# Of the executions that this transaction settles, what was released early is not released again. An event that was
# inserted before the release must be inserted again, so that `released_by` is right. An execution that used more than
# was kept for it is refused.
_EARLY = """
    WITH gone AS (
        DELETE FROM billing_earlyrelease r USING billing_usageevent e
        WHERE r.slice_id = ANY(ids) AND e.admitted_at = r.admitted_at AND e.request_id = r.request_id AND e.execution = r.execution
        RETURNING r.slice_id, r.money, r.tokens, r.request_id, e.released_by, e.outcome <> 'failed' AND (
            e.cost_femto > 1000000::numeric * r.kept_money
            OR e.uncached + e.cache_read + e.cache_write_5m + e.cache_write_1h + e.output > r.kept_tokens) AS over
    )
    SELECT array_agg(g.slice_id), array_agg(g.money), array_agg(g.tokens), bool_or(g.released_by = 'settler'),
        string_agg(g.request_id, ', ') FILTER (WHERE g.over)
    INTO early_ids, early_moneys, early_tokenses, raced, over FROM gone g;
    IF raced THEN
        RAISE EXCEPTION 'a gateway released part of a reservation meanwhile' USING ERRCODE = 'serialization_failure';
    ELSIF over IS NOT NULL THEN
        RAISE EXCEPTION 'used more than was kept after an early release: %', over
            USING ERRCODE = 'check_violation', CONSTRAINT = 'billing_early_release_kept';
    END IF;
    IF early_ids IS NOT NULL THEN
        SELECT array_agg(n.money - coalesce(d.money, 0) ORDER BY n.place),
            array_agg(n.tokens - coalesce(d.tokens, 0) ORDER BY n.place)
        INTO moneys, tokenses
        FROM unnest(ids, moneys, tokenses) WITH ORDINALITY AS n (id, money, tokens, place) LEFT JOIN (
            SELECT r.id, sum(r.money)::bigint AS money, sum(r.tokens)::bigint AS tokens
            FROM unnest(early_ids, early_moneys, early_tokenses) AS r (id, money, tokens) GROUP BY r.id
        ) d ON d.id = n.id;
    END IF;
"""
_LOCK = "    PERFORM 1 FROM billing_slice s WHERE s.id = ANY(ids) ORDER BY s.id FOR NO KEY UPDATE;\n"
_DECLARE = """DECLARE
    early_ids bigint[];
    early_moneys bigint[];
    early_tokenses bigint[];
    raced boolean;
    over text;
BEGIN
"""
OLD_SETTLE = functions.SETTLE.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
SETTLE = OLD_SETTLE.replace("BEGIN\n", _DECLARE, 1).replace(_LOCK, _LOCK + _EARLY, 1)
OLD_REAP = rollover.REAP
_REAPED = "    RETURN QUERY UPDATE billing_slice s SET fence"
REAP = OLD_REAP.replace(_REAPED, f"    DELETE FROM billing_earlyrelease r WHERE r.slice_id = ANY(dead);\n{_REAPED}")
assert SETTLE.count("early_ids") > 3 and _DECLARE in SETTLE and _LOCK + _EARLY in SETTLE and REAP != OLD_REAP

# What was released early and is not settled would be released again by the old functions.
REVERSIBLE = f"""
DO $$
DECLARE
    role text := current_setting('role');
BEGIN
    PERFORM set_config('role', '{SYSTEM}', true);  -- row-level security hides the rows from the owner
    IF EXISTS (SELECT FROM billing_earlyrelease) THEN
        RAISE EXCEPTION 'Reservations were released early and are not settled yet. Migrate again when they are.';
    END IF;
    PERFORM set_config('role', role, true);
END
$$
"""


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0013_alert_mail'),
    ]

    operations = [
        migrations.AddField(
            model_name='usageevent',
            name='released_by',
            field=models.CharField(
                choices=[('gateway', 'Gateway'), ('settler', 'Settler')],
                help_text='what released the unused part of its reservation; None: nothing was reserved',
                max_length=8,
                null=True,
            ),
        ),
        migrations.CreateModel(
            name='EarlyRelease',
            fields=[
                ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', blank=True, editable=False, primary_key=True, serialize=False)),
                ('admitted_at', models.DateTimeField()),
                ('request_id', models.CharField(max_length=64)),
                ('execution', models.SmallIntegerField()),
                ('slice_id', models.BigIntegerField()),
                ('money', models.BigIntegerField(help_text='released, in nano-USD')),
                ('tokens', models.BigIntegerField(help_text='released')),
                ('kept_money', models.BigIntegerField(help_text='what settlement will use at most, in nano-USD')),
                ('kept_tokens', models.BigIntegerField(help_text='what settlement will use at most')),
            ],
            options={
                'indexes': [models.Index(fields=['slice_id'], name='early_release_slice')],
                'constraints': [
                    models.CheckConstraint(
                        condition=models.Q(('kept_money__gte', 0), ('kept_tokens__gte', 0), ('money__gte', 0), ('tokens__gte', 0)),
                        name='early_release_counts',
                    ),
                ],
            },
        ),
        rls.system_only("billing_earlyrelease"),
        migrations.RunSQL(
            migrations.RunSQL.noop,
            ["LOCK TABLE billing_earlyrelease IN ACCESS EXCLUSIVE MODE", REVERSIBLE],
        ),
        migrations.RunSQL([SETTLE], [OLD_SETTLE]),
        migrations.RunSQL([REAP], [OLD_REAP]),
        migrations.RunSQL([RELEASE], ["DROP FUNCTION billing_release_unused"]),
    ]
