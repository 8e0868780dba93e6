"""Results of experiments, and the triggers that add and renew observations. A tenant sees only its own rows."""

import django.db.models.functions.datetime
from django.db import migrations, models

from tenants.isolation import rls

COUNT_DELAY = "interval '20 seconds'"  # after a request's end, its usage is settled
TRIGGERS = f"""
CREATE FUNCTION experiments_observe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO experiments_observation (tenant_id, request_id, experiment_id, arm, unit, started_at, due_at)
    VALUES (NEW.tenant_id, NEW.request_id, NEW.experiment_id, NEW.experiment_arm, NEW.experiment_unit, NEW.started_at,
        now() + {COUNT_DELAY})
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER experiments_observe AFTER INSERT ON request_log_requestrecord
    FOR EACH ROW WHEN (NEW.experiment_id IS NOT NULL) EXECUTE FUNCTION experiments_observe();
CREATE FUNCTION experiments_renew() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE experiments_observation SET due_at = now()
    WHERE tenant_id = NEW.tenant_id AND request_id = NEW.request_id;
    RETURN NULL;
END $$;
CREATE TRIGGER experiments_renew AFTER INSERT ON feedback_submittedfeedback
    FOR EACH ROW EXECUTE FUNCTION experiments_renew();
"""
NO_TRIGGERS = """
DROP TRIGGER experiments_renew ON feedback_submittedfeedback;
DROP FUNCTION experiments_renew();
DROP TRIGGER experiments_observe ON request_log_requestrecord;
DROP FUNCTION experiments_observe();
"""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0010_experiment'),
        ('feedback', '0001_initial'),
        ('request_log', '0006_retry_index'),
    ]

    operations = [
        migrations.CreateModel(
            name='ArmTotal',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'arm', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('experiment_id', models.BigIntegerField()),
                ('arm', models.SmallIntegerField()),
                ('requests', models.BigIntegerField(default=0)),
                ('moments', models.JSONField(default=dict, help_text='metric -> the fields of `Moments`')),
            ],
        ),
        migrations.CreateModel(
            name='ExperimentPoint',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'hour', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('experiment_id', models.BigIntegerField()),
                ('hour', models.DateTimeField()),
                ('requests', models.BigIntegerField()),
                ('sample_ratio_p', models.FloatField(help_text='the smallest one so far')),
                ('changes', models.JSONField(help_text='of each treatment: metric -> estimate, low, high; or null')),
            ],
        ),
        migrations.CreateModel(
            name='UnitTotal',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'arm', 'unit', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('experiment_id', models.BigIntegerField()),
                ('arm', models.SmallIntegerField()),
                ('unit', models.CharField(max_length=32)),
                ('totals', models.JSONField(default=dict, help_text='metric -> its count and sum')),
            ],
        ),
        migrations.CreateModel(
            name='Observation',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('request_id', models.CharField(max_length=64)),
                ('experiment_id', models.BigIntegerField()),
                ('arm', models.SmallIntegerField()),
                ('unit', models.CharField(max_length=32)),
                ('started_at', models.DateTimeField()),
                ('added_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('due_at', models.DateTimeField(help_text='when it is counted, or counted again; null: counted', null=True)),
                ('counted', models.JSONField(help_text='metric -> its count and sum; null: not counted yet', null=True)),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('due_at__isnull', False)), fields=['experiment_id', 'due_at'], name='experiments_observation_due'), models.Index(fields=['added_at'], name='experiments_observation_added')],
            },
        ),
        rls.operations('experiments_observation'),
        rls.operations('experiments_unittotal'),
        rls.operations('experiments_armtotal'),
        rls.operations('experiments_experimentpoint'),
        migrations.RunSQL(TRIGGERS, NO_TRIGGERS),
    ]
