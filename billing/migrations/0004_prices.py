"""The price book, guarded by the database itself; what a leg costs, on its usage event; rated lines as a view."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

# A text as a range of one: what an exclusion constraint compares must be a range, without an extension for texts.
# tenant_id, tier and component hold no slash, so no two keys are written alike.
NO_OVERLAP = """
ALTER TABLE billing_price ADD CONSTRAINT price_no_overlap EXCLUDE USING gist (
    billing_textrange(
        book_id::text || '/' || coalesce(tenant_id::text, '') || '/' || tier || '/' || component || '/' || model,
        book_id::text || '/' || coalesce(tenant_id::text, '') || '/' || tier || '/' || component || '/' || model, '[]'
    ) WITH &&,
    int4range(from_tokens, until_tokens) WITH &&,
    int4range(from_minute, until_minute) WITH &&,
    tstzrange(effective_from, effective_until) WITH &&
)
"""
GUARD_PRICE = """
CREATE FUNCTION billing_guard_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' OR to_jsonb(NEW) - 'effective_until' <> to_jsonb(OLD) - 'effective_until'
        OR NEW.effective_until IS NULL OR NEW.effective_until > OLD.effective_until THEN
        RAISE EXCEPTION 'price % never changes, it can only end earlier: % refused', OLD.id, TG_OP
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$
"""
# People may be forgotten; what they decided may not.
GUARD_VERSION = """
CREATE FUNCTION billing_guard_price_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state = 'published' AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - ARRAY['created_by_id', 'decided_by_id']
        <> to_jsonb(OLD) - ARRAY['created_by_id', 'decided_by_id']) THEN
        RAISE EXCEPTION 'price version % is published: % refused', OLD.id, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
TRIGGERS = [
    "CREATE TRIGGER billing_price_guard BEFORE UPDATE OR DELETE ON billing_price"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_price()",
    "CREATE TRIGGER billing_priceversion_guard BEFORE UPDATE OR DELETE ON billing_priceversion"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_price_version()",
    *(
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()"
        for table in ("billing_price", "billing_priceversion")
    ),
]
UNDO_TRIGGERS = [
    "DROP FUNCTION billing_guard_price() CASCADE",
    "DROP FUNCTION billing_guard_price_version() CASCADE",
    "DROP TRIGGER billing_price_no_truncate ON billing_price",
    "DROP TRIGGER billing_priceversion_no_truncate ON billing_priceversion",
]
RATED_LINE = """
CREATE VIEW billing_rated_line WITH (security_invoker = true) AS
SELECT e.tenant_id, e.project_id, e.key_id, e.admitted_at, e.request_id, e.leg, e.invoice_period,
    used.component, used.price_id, used.tokens::bigint AS tokens,
    used.tokens::numeric(38, 0) * price.nano_per_million AS femto
FROM billing_usageevent e
CROSS JOIN LATERAL unnest(
    ARRAY['uncached', 'cache_read', 'cache_write_5m', 'cache_write_1h', 'output',
        'answer_hit_input', 'answer_hit_output'],
    ARRAY[e.uncached, e.cache_read, e.cache_write_5m, e.cache_write_1h, e.output,
        e.answer_hit_input, e.answer_hit_output],
    e.price_ids
) AS used (component, tokens, price_id)
JOIN billing_price price ON price.id = used.price_id
"""


def readable(table: str) -> migrations.RunSQL:
    """Have the app's role read everybody's rows and the open tenant's, and change none."""
    return migrations.RunSQL(
        [
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            f"CREATE POLICY own_or_all ON {table} USING (tenant_id IS NULL OR tenant_id = {rls.TENANT})",
            f"REVOKE INSERT, UPDATE, DELETE ON {table} FROM {APP}",
        ],
        [
            f"GRANT INSERT, UPDATE, DELETE ON {table} TO {APP}",
            f"DROP POLICY own_or_all ON {table}",
            f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY",
        ],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0003_invoicing'),
        ('tenants', '0002_row_level_security'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='BookAssignment',
            fields=[
                ('tenant', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, serialize=False, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='CompiledSheet',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField(null=True)),
                ('model', models.CharField(max_length=128)),
                ('tier', models.CharField(max_length=10)),
                ('effective_from', models.DateTimeField()),
                ('rates', models.BinaryField()),
            ],
            options={
                'db_table': 'billing_pricesheet',
            },
        ),
        migrations.CreateModel(
            name='Price',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField(null=True)),
                ('model', models.CharField(max_length=128)),
                ('tier', models.CharField(choices=[('standard', 'standard'), ('batch', 'batch'), ('flex', 'flex'), ('priority', 'priority')], max_length=10)),
                ('component', models.CharField(choices=[('uncached', 'uncached'), ('cache_read', 'cache_read'), ('cache_write_5m', 'cache_write_5m'), ('cache_write_1h', 'cache_write_1h'), ('output', 'output'), ('answer_hit_input', 'answer_hit_input'), ('answer_hit_output', 'answer_hit_output')], max_length=20)),
                ('from_tokens', models.IntegerField(default=0)),
                ('until_tokens', models.IntegerField(default=2147483647)),
                ('from_minute', models.SmallIntegerField(default=0)),
                ('until_minute', models.SmallIntegerField(default=1440)),
                ('nano_per_million', models.BigIntegerField()),
                ('effective_from', models.DateTimeField()),
                ('effective_until', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='PriceBook',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.SlugField(unique=True)),
            ],
        ),
        migrations.CreateModel(
            name='PriceVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField(null=True)),
                ('number', models.IntegerField(help_text="counts the book's publications", null=True)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('published', 'Published'), ('discarded', 'Discarded')], default='draft', max_length=10)),
                ('note', models.CharField(blank=True, max_length=200)),
                ('body', models.JSONField()),
                ('effective_from', models.DateTimeField(help_text='None, in a draft: when it is published', null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('decided_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.AddField(
            model_name='usageevent',
            name='answer_hit_input',
            field=models.IntegerField(db_default=0),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='answer_hit_output',
            field=models.IntegerField(db_default=0),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='changed_at',
            field=models.IntegerField(help_text="the prompt's first token that differs from a known prefix", null=True),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='cost_femto',
            field=models.DecimalField(db_default=0, decimal_places=0, max_digits=38),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='invoice_period',
            field=models.BigIntegerField(help_text='the period whose invoice it is on', null=True),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='miss_reason',
            field=models.CharField(db_default='', help_text='why the prefix cache did not give it all', max_length=32),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='price_ids',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(null=True), help_text='in the order of pricing.COMPONENTS; None: not priced', null=True, size=None),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='saved_femto',
            field=models.DecimalField(db_default=0, decimal_places=0, help_text='by caches; negative if writing to them cost more', max_digits=38),
        ),
        migrations.AddField(
            model_name='usageevent',
            name='unpinned_tokens',
            field=models.IntegerField(db_default=0, help_text='asked to be kept, and not, for want of room'),
        ),
        migrations.AddConstraint(
            model_name='usageevent',
            constraint=models.CheckConstraint(condition=models.Q(('answer_hit_input__range', (0, 100000000)), ('answer_hit_output__range', (0, 100000000)), ('cost_femto__gte', 0)), name='billing_usage_rated'),
        ),
        migrations.AddIndex(
            model_name='compiledsheet',
            index=models.Index(fields=['model', 'tier', 'tenant_id'], name='price_sheet_model'),
        ),
        migrations.AddField(
            model_name='price',
            name='book',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.pricebook'),
        ),
        migrations.AddField(
            model_name='bookassignment',
            name='book',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.pricebook'),
        ),
        migrations.AddField(
            model_name='priceversion',
            name='book',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.pricebook'),
        ),
        migrations.AddField(
            model_name='priceversion',
            name='created_by',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL),
        ),
        migrations.AddField(
            model_name='priceversion',
            name='decided_by',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL),
        ),
        migrations.AddField(
            model_name='price',
            name='version',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.priceversion'),
        ),
        migrations.AddConstraint(
            model_name='priceversion',
            constraint=models.UniqueConstraint(fields=('book', 'number'), name='price_version_once'),
        ),
        migrations.AddConstraint(
            model_name='priceversion',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('state', 'published'), _negated=True), models.Q(('effective_from__isnull', False), ('number__isnull', False)), _connector='OR'), name='price_version_published'),
        ),
        migrations.AddConstraint(
            model_name='priceversion',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('state', 'published'), _negated=True), ('decided_by__isnull', True), models.Q(('decided_by', models.F('created_by')), _negated=True), _connector='OR'), name='price_version_second_person'),
        ),
        migrations.AddIndex(
            model_name='price',
            index=models.Index(fields=['model', 'tier'], name='price_model'),
        ),
        migrations.AddConstraint(
            model_name='price',
            constraint=models.CheckConstraint(condition=models.Q(('nano_per_million__range', (0, 1000000000000000000))), name='price_whole'),
        ),
        migrations.AddConstraint(
            model_name='price',
            constraint=models.CheckConstraint(condition=models.Q(('from_tokens__gte', 0), ('from_tokens__lt', models.F('until_tokens')), ('from_minute__gte', 0), ('from_minute__lt', models.F('until_minute')), ('until_minute__lte', 1440), models.Q(('effective_until__isnull', True), ('effective_until__gte', models.F('effective_from')), _connector='OR')), name='price_ranges'),
        ),
        migrations.RunSQL(
            ['CREATE TYPE billing_textrange AS RANGE (subtype = text, collation = "C")', NO_OVERLAP],
            ["ALTER TABLE billing_price DROP CONSTRAINT price_no_overlap", "DROP TYPE billing_textrange"],
        ),
        migrations.RunSQL([GUARD_PRICE, GUARD_VERSION, *TRIGGERS], [*UNDO_TRIGGERS]),
        migrations.RunSQL([RATED_LINE], ["DROP VIEW billing_rated_line"]),
        readable("billing_price"),
        readable("billing_pricesheet"),
        rls.append_only("billing_pricesheet"),
        rls.operations("billing_bookassignment"),
        rls.system_only("billing_priceversion"),
        migrations.RunSQL(
            [f"REVOKE ALL ON billing_priceversion FROM {APP}", f"REVOKE UPDATE, DELETE ON billing_pricebook FROM {APP}"],
            [
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON billing_priceversion TO {APP}",
                f"GRANT UPDATE, DELETE ON billing_pricebook TO {APP}",
            ],
        ),
    ]
