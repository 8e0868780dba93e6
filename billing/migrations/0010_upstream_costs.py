"""Book the operator's costs: cost cards, costs of executions, daily sums, and reserved spend of credentials.

Processes of the previous release write usage events of the engine without unbilled tokens.
"""

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

TABLES = ("costcard", "executioncost", "dailycost", "spendreservation")
APPEND_ONLY = ("costcard", "executioncost")
# Reserves an execution's maximum cost from its credential's limit of the UTC day. One transaction per credential at a
# time decides. What is booked and what is reserved are read in one statement, because a settlement exchanges the one
# for the other. A repeated call finds its reservation.
RESERVE = """
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
$$
"""


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0009_prepayment_and_dunning'),
    ]

    operations = [
        migrations.AddField(
            model_name='usageevent',
            name='unbilled_tokens',
            field=models.IntegerField(db_default=0, help_text='reported above the reservation; not charged, and in no other count'),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='usage_source',
            field=models.CharField(choices=[('engine', 'Engine'), ('upstream', 'Upstream'), ('estimated', 'Estimated')], db_default='engine', help_text='the origin of the token counts', max_length=9),
        ),
        migrations.CreateModel(
            name='DailyCost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('day', models.DateField()),
                ('tenant_id', models.BigIntegerField()),
                ('model', models.CharField(max_length=128)),
                ('credential_id', models.BigIntegerField(help_text='0: none')),
                ('executions', models.BigIntegerField()),
                ('estimated', models.BigIntegerField(help_text='executions whose tokens are estimated')),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('failed_femto', models.DecimalField(decimal_places=0, help_text='part of the cost: failed executions', max_digits=38)),
                ('uncosted_tokens', models.BigIntegerField()),
                ('unbilled_femto', models.DecimalField(decimal_places=0, max_digits=38)),
            ],
            options={
                'indexes': [models.Index(fields=['credential_id', 'day'], name='daily_cost_credential')],
                'constraints': [models.UniqueConstraint(fields=('day', 'tenant_id', 'model', 'credential_id'), name='daily_cost_once')],
            },
        ),
        migrations.CreateModel(
            name='ExecutionCost',
            fields=[
                ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', blank=True, editable=False, primary_key=True, serialize=False)),
                ('admitted_at', models.DateTimeField()),
                ('request_id', models.CharField(max_length=64)),
                ('execution', models.SmallIntegerField()),
                ('tenant_id', models.BigIntegerField()),
                ('model', models.CharField(max_length=128)),
                ('credential_id', models.BigIntegerField(help_text='the upstream credential that it used', null=True)),
                ('is_tenant_credential', models.BooleanField(help_text='the tenant pays the provider, so the cost is 0')),
                ('usage_source', models.CharField(max_length=9)),
                ('outcome', models.CharField(help_text='as reported with the tokens', max_length=16)),
                ('uncached', models.IntegerField()),
                ('cache_read', models.IntegerField()),
                ('cache_write_5m', models.IntegerField()),
                ('cache_write_1h', models.IntegerField()),
                ('output', models.IntegerField()),
                ('cost_card_id', models.BigIntegerField(help_text='None: the deployment had none', null=True)),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('uncosted_tokens', models.IntegerField(help_text='of classes without a price in the cost card')),
                ('unbilled_femto', models.DecimalField(decimal_places=0, help_text='the price of the tokens above the reservation, which are not charged', max_digits=38)),
                ('booked_at', models.DateTimeField()),
            ],
            options={
                'indexes': [models.Index(models.F('model'), models.OrderBy(models.F('admitted_at'), descending=True), name='execution_cost_model'), models.Index(models.F('tenant_id'), models.OrderBy(models.F('admitted_at'), descending=True), name='execution_cost_tenant'), models.Index(models.OrderBy(models.F('admitted_at'), descending=True), condition=models.Q(('unbilled_femto__gt', 0)), name='execution_cost_unbilled'), models.Index(fields=['request_id'], name='execution_cost_request')],
                'constraints': [models.CheckConstraint(condition=models.Q(('cost_femto__gte', 0), ('unbilled_femto__gte', 0), ('uncosted_tokens__gte', 0)), name='execution_cost_amounts')],
            },
        ),
        migrations.CreateModel(
            name='SpendReservation',
            fields=[
                ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', blank=True, editable=False, primary_key=True, serialize=False)),
                ('admitted_at', models.DateTimeField()),
                ('request_id', models.CharField(max_length=64)),
                ('execution', models.SmallIntegerField()),
                ('credential_id', models.BigIntegerField()),
                ('nano', models.BigIntegerField()),
                ('expires_at', models.DateTimeField()),
            ],
            options={
                'indexes': [models.Index(fields=['credential_id', 'expires_at'], name='spend_reservation_open')],
                'constraints': [models.CheckConstraint(condition=models.Q(('nano__gte', 0)), name='spend_reservation_amount')],
            },
        ),
        migrations.CreateModel(
            name='CostCard',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('model', models.CharField(help_text="the deployment's name", max_length=128)),
                ('effective_from', models.DateTimeField()),
                ('rates', models.BinaryField()),
                ('note', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'ordering': ['model', '-effective_from', '-id'],
                'indexes': [models.Index(fields=['model', '-effective_from'], name='cost_card_model')],
            },
        ),
        migrations.AlterField('Adjustment', 'outcome', models.CharField(choices=[('failed', 'Failed'), ('cancelled', 'Cancelled'), ('late', 'Late'), ('reconciled', 'Reconciled')], max_length=16)),
        *(rls.system_only(f'billing_{table}') for table in TABLES),
        *(rls.append_only(f'billing_{table}') for table in APPEND_ONLY),
        migrations.RunSQL(
            [f'REVOKE ALL ON billing_{table} FROM {APP}' for table in TABLES],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON billing_{table} TO {APP}' for table in TABLES],
        ),
        migrations.RunSQL([RESERVE], ['DROP FUNCTION billing_reserve_spend']),
    ]
