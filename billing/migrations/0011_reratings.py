"""Store re-ratings, the invoices that they changed, and one-off lines. The previous release ignores all of them."""

import billing.models.invoicing
import django.contrib.postgres.fields
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

# Users may be deleted. What they decided may not.
GUARD = """
CREATE FUNCTION billing_guard_rerating() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state = 'applied' AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - ARRAY['created_by_id', 'decided_by_id']
        <> to_jsonb(OLD) - ARRAY['created_by_id', 'decided_by_id']) THEN
        RAISE EXCEPTION 're-rating % is applied: % rejected', OLD.id, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
TRIGGER = (
    "CREATE TRIGGER billing_rerating_guard BEFORE UPDATE OR DELETE ON billing_rerating"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_rerating()"
)
# Table and column of a row that must belong to an invoice of the same tenant.
OF_INVOICES = (
    ("billing_reratedinvoice", "invoice_id"),
    ("billing_reratedinvoice", "note_id"),
    ("billing_oneoffline", "invoice_id"),
)


def same_tenant(table: str, column: str) -> migrations.RunSQL:
    """Add a foreign key to an invoice of the same tenant."""
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        [
            f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id)"
            " REFERENCES billing_invoice (id, tenant_id)"
        ],
        [f"ALTER TABLE {table} DROP CONSTRAINT {name}"],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0010_upstream_costs'),
        ('tenants', '0006_invitation_email'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AlterField(
            model_name='invoice',
            name='invoice_type',
            field=models.CharField(choices=[('invoice', 'Invoice'), ('purchase', 'Purchase'), ('correction', 'Correction'), ('credit_note', 'Credit Note'), ('debit_note', 'Debit Note')], default='invoice', max_length=12),
        ),
        migrations.AlterField(
            model_name='invoiceline',
            name='line_type',
            field=models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('prepaid', 'Prepaid'), ('credit', 'Credit'), ('one_off', 'One Off'), ('rounding', 'Rounding')], default='usage', max_length=10),
        ),
        migrations.CreateModel(
            name='Rerating',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField(help_text="whose own prices are corrected; None: the book's", null=True)),
                ('number', models.IntegerField(help_text='the order in which re-ratings were applied', null=True, unique=True)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('applied', 'Applied'), ('discarded', 'Discarded')], default='draft', max_length=10)),
                ('body', models.JSONField()),
                ('starts_at', models.DateTimeField()),
                ('ends_at', models.DateTimeField()),
                ('reason', models.CharField(max_length=200, validators=[billing.models.invoicing.check_line])),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('decided_at', models.DateTimeField(null=True)),
                ('book', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.pricebook')),
                ('created_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('decided_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='ReratedInvoice',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('closed_periods', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), help_text="the billing periods whose adjustments of the invoice's usage it includes", size=None)),
                ('rounding_femto', models.DecimalField(decimal_places=0, default=0, help_text='billed too much by rounding; 0 with a note, which has it', max_digits=38)),
                ('invoice', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='reratings', to='billing.invoice')),
                ('note', models.OneToOneField(help_text='None: it changes no cent', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='rerated', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
                ('rerating', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='invoices', to='billing.rerating')),
            ],
        ),
        migrations.CreateModel(
            name='OneOffLine',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('month', models.CharField(max_length=7)),
                ('description', models.CharField(max_length=200, validators=[billing.models.invoicing.check_line])),
                ('cents', models.BigIntegerField()),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('invoice', models.ForeignKey(help_text='None: not billed yet', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='one_off_lines', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('invoice__isnull', True)), fields=['month'], name='one_off_line_due')],
                'constraints': [models.CheckConstraint(condition=models.Q(('cents__gt', 0)), name='one_off_line_amount')],
            },
        ),
        migrations.AddConstraint(
            model_name='rerating',
            constraint=models.CheckConstraint(condition=models.Q(('starts_at__lt', models.F('ends_at'))), name='rerating_range'),
        ),
        migrations.AddConstraint(
            model_name='rerating',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('number__isnull', False), ('state', 'applied')), models.Q(('state', 'applied'), _negated=True), _connector='OR'), name='rerating_numbered'),
        ),
        migrations.AddConstraint(
            model_name='rerating',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('state', 'applied'), _negated=True), ('decided_by__isnull', True), models.Q(('decided_by', models.F('created_by')), _negated=True), _connector='OR'), name='rerating_second_person'),
        ),
        migrations.AddConstraint(
            model_name='reratedinvoice',
            constraint=models.UniqueConstraint(fields=('rerating', 'invoice'), name='rerated_invoice_once'),
        ),
        migrations.RunSQL([GUARD, TRIGGER], ["DROP FUNCTION billing_guard_rerating() CASCADE"]),
        *(same_tenant(*rule) for rule in OF_INVOICES),
        rls.system_only("billing_rerating"),
        rls.operations("billing_reratedinvoice"),
        rls.operations("billing_oneoffline"),
        rls.append_only("billing_reratedinvoice"),
        migrations.RunSQL(
            [
                f"REVOKE ALL ON billing_rerating FROM {APP}",
                f"REVOKE INSERT, UPDATE, DELETE ON billing_reratedinvoice, billing_oneoffline FROM {APP}",
            ],
            [
                f"GRANT INSERT, UPDATE, DELETE ON billing_reratedinvoice, billing_oneoffline TO {APP}",
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON billing_rerating TO {APP}",
            ],
        ),
    ]
