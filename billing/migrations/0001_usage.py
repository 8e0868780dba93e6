"""The usage table, partitioned by month and append-only, and the quarantine beside it."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db import migrations, models

TABLE = """
CREATE TABLE billing_usageevent (
    admitted_at timestamptz NOT NULL,
    request_id varchar(64) NOT NULL,
    execution smallint NOT NULL,
    tenant_id bigint NOT NULL,
    project_id bigint NOT NULL,
    key_id bigint NOT NULL,
    model varchar(128) NOT NULL,
    attempt integer NOT NULL,
    outcome varchar(16) NOT NULL,
    finish_reason varchar(64) NOT NULL,
    uncached integer NOT NULL,
    cache_read integer NOT NULL,
    cache_write_5m integer NOT NULL,
    cache_write_1h integer NOT NULL,
    output integer NOT NULL,
    replica_id varchar(128) NOT NULL,
    block_size integer NOT NULL,
    queue_us bigint NOT NULL,
    ttft_us bigint NOT NULL,
    duration_us bigint NOT NULL,
    price_version bigint,
    slice_id bigint,
    fence bigint,
    hold bigint,
    settled_at timestamptz NOT NULL,
    CONSTRAINT billing_usage_counts CHECK (
        uncached BETWEEN 0 AND 100000000 AND cache_read BETWEEN 0 AND 100000000
        AND cache_write_5m BETWEEN 0 AND 100000000 AND cache_write_1h BETWEEN 0 AND 100000000
        AND output BETWEEN 0 AND 100000000
        AND duration_us >= 0 AND queue_us >= 0 AND ttft_us >= 0 AND attempt >= 0 AND block_size >= 0 AND execution >= 0
    ),
    CONSTRAINT billing_usage_outcome CHECK (outcome IN ('completed', 'cancelled', 'failed')),
    CONSTRAINT billing_usage_hold CHECK (hold IS NULL OR hold >= 0),
    CONSTRAINT billing_usage_ids CHECK (
        tenant_id > 0 AND project_id > 0 AND key_id > 0 AND request_id <> '' AND model <> ''
    ),
    PRIMARY KEY (admitted_at, request_id, execution)
) PARTITION BY RANGE (admitted_at)
"""

INDEXES = (
    "CREATE INDEX billing_usage_tenant_time ON billing_usageevent (tenant_id, admitted_at DESC)",
    "CREATE INDEX billing_usage_key_time ON billing_usageevent (key_id, admitted_at DESC)",
    "CREATE INDEX billing_usage_request ON billing_usageevent (request_id)",
)

REFUSE_CHANGE = """
CREATE FUNCTION billing_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'table % is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$
"""

# An empty table loses nothing and may be truncated, which is what Django's tests do to every table. A snapshot taken
# earlier in the transaction could miss rows, so that is believed under READ COMMITTED alone.
REFUSE_TRUNCATE = """
CREATE FUNCTION billing_refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE filled boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO filled;
    IF filled OR current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'table % is append-only: TRUNCATE refused', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END
$$
"""

TRIGGERS = (
    "CREATE TRIGGER billing_usage_no_change BEFORE UPDATE OR DELETE ON billing_usageevent"
    " FOR EACH ROW EXECUTE FUNCTION billing_refuse_change()",
    "CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON billing_usageevent"
    " FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()",
)


def make_partitions(apps: Any, schema_editor: Any) -> None:
    """As billing.metering.partitions did when this migration was written."""
    current = datetime.now(UTC).date().replace(day=1)
    months = []
    for offset in range(-1, 4):
        years, index = divmod(current.year * 12 + current.month - 1 + offset, 12)
        months.append(date(years, index + 1, 1))
    for start in months:
        end = (start + timedelta(days=31)).replace(day=1)
        name = f"billing_usageevent_{start:%Y_%m}"
        schema_editor.execute(f"CREATE TABLE {name} (LIKE billing_usageevent INCLUDING ALL)")
        schema_editor.execute(
            f"ALTER TABLE billing_usageevent ATTACH PARTITION {name}"
            f" FOR VALUES FROM ('{start} 00:00:00+00') TO ('{end} 00:00:00+00')"
        )
        schema_editor.execute(
            f"CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON {name}"
            " FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()"
        )


class Migration(migrations.Migration):

    initial = True

    dependencies = []

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL([TABLE], ["DROP TABLE billing_usageevent"]),
                migrations.RunSQL(INDEXES, migrations.RunSQL.noop),
                migrations.RunSQL(
                    [REFUSE_CHANGE, REFUSE_TRUNCATE],
                    ["DROP FUNCTION billing_refuse_change() CASCADE", "DROP FUNCTION billing_refuse_truncate() CASCADE"],
                ),
                migrations.RunSQL(TRIGGERS, migrations.RunSQL.noop),
                migrations.RunPython(make_partitions, migrations.RunPython.noop),
            ],
            state_operations=[
                migrations.CreateModel(
                    name='UsageEvent',
                    fields=[
                        ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('admitted_at', models.DateTimeField()),
                        ('request_id', models.CharField(max_length=64)),
                        ('execution', models.SmallIntegerField()),
                        ('tenant_id', models.BigIntegerField()),
                        ('project_id', models.BigIntegerField()),
                        ('key_id', models.BigIntegerField()),
                        ('model', models.CharField(max_length=128)),
                        ('attempt', models.IntegerField()),
                        ('outcome', models.CharField(choices=[('completed', 'Completed'), ('cancelled', 'Cancelled'), ('failed', 'Failed')], max_length=16)),
                        ('finish_reason', models.CharField(max_length=64)),
                        ('uncached', models.IntegerField()),
                        ('cache_read', models.IntegerField()),
                        ('cache_write_5m', models.IntegerField()),
                        ('cache_write_1h', models.IntegerField()),
                        ('output', models.IntegerField()),
                        ('replica_id', models.CharField(max_length=128)),
                        ('block_size', models.IntegerField()),
                        ('queue_us', models.BigIntegerField()),
                        ('ttft_us', models.BigIntegerField()),
                        ('duration_us', models.BigIntegerField()),
                        ('price_version', models.BigIntegerField(null=True)),
                        ('slice_id', models.BigIntegerField(null=True)),
                        ('fence', models.BigIntegerField(null=True)),
                        ('hold', models.BigIntegerField(help_text='nano-USD held at admission', null=True)),
                        ('settled_at', models.DateTimeField()),
                    ],
                    options={
                        'indexes': [models.Index(models.F('tenant_id'), models.OrderBy(models.F('admitted_at'), descending=True), name='billing_usage_tenant_time'), models.Index(models.F('key_id'), models.OrderBy(models.F('admitted_at'), descending=True), name='billing_usage_key_time'), models.Index(models.F('request_id'), name='billing_usage_request')],
                        'constraints': [models.CheckConstraint(condition=models.Q(('uncached__range', (0, 100000000)), ('cache_read__range', (0, 100000000)), ('cache_write_5m__range', (0, 100000000)), ('cache_write_1h__range', (0, 100000000)), ('output__range', (0, 100000000)), ('duration_us__gte', 0), ('queue_us__gte', 0), ('ttft_us__gte', 0), ('attempt__gte', 0), ('block_size__gte', 0), ('execution__gte', 0)), name='billing_usage_counts'), models.CheckConstraint(condition=models.Q(('outcome__in', ['completed', 'cancelled', 'failed'])), name='billing_usage_outcome'), models.CheckConstraint(condition=models.Q(('hold__isnull', True), ('hold__gte', 0), _connector='OR'), name='billing_usage_hold'), models.CheckConstraint(condition=models.Q(('key_id__gt', 0), ('project_id__gt', 0), ('tenant_id__gt', 0), models.Q(('request_id', ''), _negated=True), models.Q(('model', ''), _negated=True)), name='billing_usage_ids')],
                    },
                ),
            ],
        ),
        migrations.CreateModel(
            name='UsageQuarantine',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('received_at', models.DateTimeField()),
                ('stream_id', models.CharField(max_length=64)),
                ('reason', models.CharField(choices=[('undecodable', 'Undecodable'), ('refused', 'Refused'), ('unplaceable', 'Unplaceable'), ('conflict', 'Conflict')], max_length=16)),
                ('detail', models.TextField()),
                ('payload', models.BinaryField()),
                ('payload_hash', models.BinaryField(unique=True)),
                ('resolved_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [models.Index(models.OrderBy(models.F('received_at'), descending=True), condition=models.Q(('resolved_at__isnull', True)), name='billing_quarantine_open')],
            },
        ),
    ]
