"""Invoices, credits and the ledger, and the database's own rules for them: whose rows are seen, and what may never change."""

from typing import Any

import django.contrib.postgres.fields
import django.core.validators
import django.db.models.deletion
import tenants.models.records
from django.db import migrations, models

from tenants.isolation import rls

# Entries are looked at when their transaction ends. One that cannot be seen then is refused as well.
CHECK_BALANCE = """
CREATE FUNCTION billing_check_balance() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    rest numeric;
BEGIN
    SELECT sum(nano) INTO rest FROM billing_ledgerentry WHERE transaction_id = NEW.transaction_id;
    IF rest IS DISTINCT FROM 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', NEW.transaction_id USING ERRCODE = 'check_violation';
    END IF;
    PERFORM FROM billing_ledgertransaction WHERE id = NEW.transaction_id AND xid = pg_current_xact_id();
    IF NOT FOUND THEN
        RAISE EXCEPTION 'ledger transaction % is complete', NEW.transaction_id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END
$$
"""
GUARD_INVOICE = """
CREATE FUNCTION billing_guard_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state <> 'draft' AND (
        TG_OP = 'DELETE'
        OR to_jsonb(NEW) - 'state' <> to_jsonb(OLD) - 'state'
        OR (OLD.state, NEW.state) NOT IN (
            ('open', 'paid'), ('paid', 'open'), ('open', 'void'), ('open', 'uncollectible')
        )
    ) THEN
        RAISE EXCEPTION 'invoice % is final: % refused', OLD.number, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
# The share lock makes a line wait for whoever finalizes its invoice at this instant.
GUARD_LINE = """
CREATE FUNCTION billing_guard_line() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    pk bigint;
BEGIN
    FOREACH pk IN ARRAY ARRAY[OLD.invoice_id, NEW.invoice_id] LOOP
        CONTINUE WHEN pk IS NULL;
        PERFORM FROM billing_invoice WHERE id = pk AND state = 'draft' FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'invoice % is final: % of a line refused', pk, TG_OP USING ERRCODE = 'restrict_violation';
        END IF;
    END LOOP;
    RETURN coalesce(NEW, OLD);
END
$$
"""
GUARD_PERIOD = """
CREATE FUNCTION billing_guard_period() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (TG_OP = 'DELETE' AND OLD.closed_at IS NOT NULL)
        OR (TG_OP = 'UPDATE' AND to_jsonb(NEW) - '{closed_at,invoiced_at}'::text[]
            <> to_jsonb(OLD) - '{closed_at,invoiced_at}'::text[])
        OR (TG_OP = 'UPDATE' AND OLD.closed_at IS NOT NULL AND NEW.closed_at IS DISTINCT FROM OLD.closed_at)
    THEN
        RAISE EXCEPTION 'period % is fixed: % refused', OLD.label, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
FUNCTIONS = {
    "billing_check_balance": CHECK_BALANCE,
    "billing_guard_invoice": GUARD_INVOICE,
    "billing_guard_line": GUARD_LINE,
    "billing_guard_period": GUARD_PERIOD,
}
TRIGGERS: list[Any] = [
    "CREATE CONSTRAINT TRIGGER billing_ledgerentry_balance AFTER INSERT ON billing_ledgerentry"
    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_check_balance()",
    "CREATE TRIGGER billing_invoice_guard BEFORE UPDATE OR DELETE ON billing_invoice"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_invoice()",
    "CREATE TRIGGER billing_invoiceline_guard BEFORE INSERT OR UPDATE OR DELETE ON billing_invoiceline"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_line()",
    "CREATE TRIGGER billing_period_guard BEFORE UPDATE OR DELETE ON billing_period"
    " FOR EACH ROW EXECUTE FUNCTION billing_guard_period()",
    *(
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()"
        for table in ("billing_invoice", "billing_invoiceline", "billing_period")
    ),
]

# table, column, what it must be a row of, together with tenant_id
BELONGS = (
    ("billing_invoice", "refers_to_id", "billing_invoice"),
    ("billing_invoiceline", "invoice_id", "billing_invoice"),
    ("billing_invoicefile", "invoice_id", "billing_invoice"),
    ("billing_invoicemail", "invoice_id", "billing_invoice"),
    ("billing_payment", "invoice_id", "billing_invoice"),
    ("billing_credituse", "invoice_id", "billing_invoice"),
    ("billing_credituse", "grant_id", "billing_creditgrant"),
    ("billing_ledgerentry", "invoice_id", "billing_invoice"),
    ("billing_ledgerentry", "transaction_id", "billing_ledgertransaction"),
)
ROWS = (
    "billingprofile",
    "invoice",
    "invoiceline",
    "invoicefile",
    "invoicemail",
    "commitment",
    "creditgrant",
    "credituse",
    "payment",
    "ledgertransaction",
    "ledgerentry",
)
OPERATORS = ("billingentity", "taxrule", "exchangerate", "period", "numberseries")
APPENDED = ("invoicefile", "creditgrant", "credituse", "payment", "ledgertransaction", "ledgerentry")


def belongs(table: str, column: str, to: str) -> migrations.RunSQL:
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        [f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id) REFERENCES {to} (id, tenant_id)"],
        [f"ALTER TABLE {table} DROP CONSTRAINT {name}"],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0002_row_level_security'),
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.CreateModel(
            name='BillingEntity',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=200)),
                ('street', models.CharField(blank=True, max_length=200)),
                ('postcode', models.CharField(blank=True, max_length=20)),
                ('city', models.CharField(blank=True, max_length=100)),
                ('region', models.CharField(blank=True, max_length=100)),
                ('country', models.CharField(max_length=2, validators=[django.core.validators.RegexValidator('^[A-Z]{2}\\Z', 'Give the two letters of ISO 3166, for example DE.')])),
                ('vat_id', models.CharField(blank=True, max_length=20)),
                ('slug', models.SlugField(unique=True)),
                ('registration', models.CharField(blank=True, max_length=50)),
                ('email', models.EmailField(blank=True, max_length=254)),
                ('time_zone', models.CharField(default='UTC', max_length=64)),
                ('invoice_prefix', models.CharField(default='INV', max_length=16)),
                ('credit_note_prefix', models.CharField(default='CN', max_length=16)),
                ('terms_days', models.PositiveSmallIntegerField(default=14)),
                ('payment_details', models.TextField(blank=True)),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='Invoice',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('invoice', 'Invoice'), ('correction', 'Correction'), ('credit_note', 'Credit Note')], default='invoice', max_length=12)),
                ('revision', models.SmallIntegerField(default=1)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('open', 'Open'), ('paid', 'Paid'), ('void', 'Void'), ('uncollectible', 'Uncollectible')], default='draft', max_length=14)),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('number', models.CharField(max_length=40, null=True)),
                ('complete', models.BooleanField(default=False, help_text='drafted after its period was closed')),
                ('issued_at', models.DateTimeField(null=True)),
                ('due_on', models.DateField(null=True)),
                ('seller', models.JSONField(default=dict)),
                ('buyer', models.JSONField(default=dict)),
                ('events', models.BigIntegerField(default=0)),
                ('subtotal', models.BigIntegerField(default=0)),
                ('credits', models.JSONField(default=list)),
                ('taxable', models.BigIntegerField(default=0)),
                ('taxes', models.JSONField(default=list)),
                ('total', models.BigIntegerField(default=0)),
                ('residue_femto', models.DecimalField(decimal_places=0, default=0, max_digits=38)),
                ('saved_femto', models.DecimalField(decimal_places=0, default=0, max_digits=38)),
                ('display_currency', models.CharField(blank=True, max_length=3)),
                ('display_rate', models.BigIntegerField(null=True)),
                ('sha256', models.CharField(blank=True, max_length=64)),
                ('entity', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.billingentity')),
                ('refers_to', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='credit_notes', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='BillingProfile',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=200)),
                ('street', models.CharField(blank=True, max_length=200)),
                ('postcode', models.CharField(blank=True, max_length=20)),
                ('city', models.CharField(blank=True, max_length=100)),
                ('region', models.CharField(blank=True, max_length=100)),
                ('country', models.CharField(max_length=2, validators=[django.core.validators.RegexValidator('^[A-Z]{2}\\Z', 'Give the two letters of ISO 3166, for example DE.')])),
                ('vat_id', models.CharField(blank=True, max_length=20)),
                ('emails', django.contrib.postgres.fields.ArrayField(base_field=models.EmailField(max_length=254), blank=True, default=list, size=None)),
                ('po_number', models.CharField(blank=True, max_length=100)),
                ('currency', models.CharField(default='USD', help_text='to show beside USD', max_length=3, validators=[django.core.validators.RegexValidator('^[A-Z]{3}\\Z', 'Give the three letters of ISO 4217, for example EUR.')])),
                ('entity', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.billingentity')),
                ('tenant', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='Commitment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('fee', models.BigIntegerField(help_text='cents a month')),
                ('included_nano', models.BigIntegerField(help_text='nano-USD of use a month')),
                ('priority', models.SmallIntegerField(default=50)),
                ('first_month', models.CharField(max_length=7)),
                ('last_month', models.CharField(blank=True, max_length=7)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='CreditGrant',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('prepaid', 'Prepaid'), ('promotional', 'Promotional'), ('commitment', 'Commitment')], max_length=12)),
                ('nano', models.BigIntegerField()),
                ('priority', models.SmallIntegerField(default=100)),
                ('starts_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('note', models.CharField(blank=True, max_length=200)),
                ('commitment', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, to='billing.commitment')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='ExchangeRate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('currency', models.CharField(max_length=3, validators=[django.core.validators.RegexValidator('^[A-Z]{3}\\Z', 'Give the three letters of ISO 4217, for example EUR.')])),
                ('on', models.DateField()),
                ('micro_per_usd', models.BigIntegerField()),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('currency', 'on'), name='exchange_rate_once'), models.CheckConstraint(condition=models.Q(('micro_per_usd__gt', 0)), name='exchange_rate_positive')],
            },
        ),
        migrations.CreateModel(
            name='InvoiceFile',
            fields=[
                ('invoice', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, primary_key=True, related_name='file', serialize=False, to='billing.invoice')),
                ('pdf', models.BinaryField()),
                ('sha256', models.CharField(max_length=64)),
            ],
        ),
        migrations.CreateModel(
            name='CreditUse',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('nano', models.BigIntegerField()),
                ('at', models.DateTimeField(auto_now_add=True)),
                ('grant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='uses', to='billing.creditgrant')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
                ('invoice', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='credit_uses', to='billing.invoice')),
            ],
        ),
        migrations.CreateModel(
            name='InvoiceLine',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('position', models.IntegerField()),
                ('kind', models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('credit', 'Credit')], default='usage', max_length=10)),
                ('description', models.CharField(blank=True, max_length=200)),
                ('model', models.CharField(blank=True, max_length=128)),
                ('tier', models.CharField(blank=True, max_length=32)),
                ('component', models.CharField(blank=True, max_length=20)),
                ('band', models.BigIntegerField(default=0)),
                ('window', models.CharField(blank=True, max_length=100)),
                ('price_version', models.IntegerField(null=True)),
                ('price_id', models.BigIntegerField(null=True)),
                ('nano_per_million', models.BigIntegerField(null=True)),
                ('late_from', models.CharField(blank=True, max_length=7)),
                ('first_at', models.DateTimeField(null=True)),
                ('last_at', models.DateTimeField(null=True)),
                ('events', models.BigIntegerField(default=0)),
                ('tokens', models.BigIntegerField(default=0)),
                ('femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('cents', models.BigIntegerField()),
                ('invoice', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='lines', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'ordering': ['position'],
            },
        ),
        migrations.CreateModel(
            name='InvoiceMail',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('issued', 'Issued'), ('reminder', 'Reminder')], max_length=10)),
                ('number', models.SmallIntegerField(default=1)),
                ('made_at', models.DateTimeField(auto_now_add=True)),
                ('claimed_at', models.DateTimeField(null=True)),
                ('sent_at', models.DateTimeField(null=True)),
                ('sent_to', django.contrib.postgres.fields.ArrayField(base_field=models.EmailField(max_length=254), default=list, size=None)),
                ('attempts', models.SmallIntegerField(default=0)),
                ('invoice', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='mails', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='LedgerTransaction',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=100, unique=True)),
                ('at', models.DateTimeField(auto_now_add=True)),
                ('xid', tenants.models.records.Xid8Field(db_default=models.Func(function='pg_current_xact_id'))),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='LedgerEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('account', models.CharField(choices=[('receivable', 'Receivable'), ('cash', 'Cash'), ('deposits', 'Deposits'), ('credits', 'Credits'), ('promotions', 'Promotions'), ('commitments', 'Commitments'), ('revenue', 'Revenue'), ('tax', 'Tax'), ('breakage', 'Breakage'), ('bad_debt', 'Bad Debt')], max_length=12)),
                ('nano', models.BigIntegerField()),
                ('invoice', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='ledger_entries', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
                ('transaction', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='entries', to='billing.ledgertransaction')),
            ],
        ),
        migrations.CreateModel(
            name='NumberSeries',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('prefix', models.CharField(max_length=16)),
                ('year', models.SmallIntegerField()),
                ('last', models.IntegerField(default=0)),
                ('entity', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.billingentity')),
            ],
        ),
        migrations.CreateModel(
            name='Payment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('provider', models.CharField(max_length=20)),
                ('reference', models.CharField(max_length=200)),
                ('cents', models.BigIntegerField()),
                ('received_at', models.DateTimeField()),
                ('recorded_at', models.DateTimeField(auto_now_add=True)),
                ('note', models.CharField(blank=True, max_length=200)),
                ('invoice', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='payments', to='billing.invoice')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
        ),
        migrations.CreateModel(
            name='Period',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('label', models.CharField(max_length=7)),
                ('starts_at', models.DateTimeField()),
                ('ends_at', models.DateTimeField()),
                ('closed_at', models.DateTimeField(null=True)),
                ('invoiced_at', models.DateTimeField(null=True)),
                ('entity', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.billingentity')),
            ],
        ),
        migrations.AddField(
            model_name='invoice',
            name='period',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.period'),
        ),
        migrations.AddField(
            model_name='creditgrant',
            name='period',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, to='billing.period'),
        ),
        migrations.CreateModel(
            name='TaxRule',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('country', models.CharField(blank=True, max_length=2, validators=[django.core.validators.RegexValidator('^[A-Z]{2}\\Z', 'Give the two letters of ISO 3166, for example DE.')])),
                ('region', models.CharField(blank=True, max_length=100)),
                ('buyer', models.CharField(blank=True, choices=[('business', 'Business'), ('consumer', 'Consumer')], max_length=10)),
                ('category', models.CharField(choices=[('S', 'Standard'), ('AE', 'Reverse Charge'), ('Z', 'Zero'), ('E', 'Exempt'), ('G', 'Export'), ('O', 'Out Of Scope')], max_length=2)),
                ('rate_ppm', models.IntegerField(default=0, validators=[django.core.validators.MaxValueValidator(1000000)])),
                ('label', models.CharField(default='VAT', max_length=40)),
                ('note', models.CharField(blank=True, max_length=200)),
                ('starts_on', models.DateField()),
                ('ends_on', models.DateField(blank=True, null=True)),
                ('entity', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='billing.billingentity')),
            ],
        ),
        migrations.AddConstraint(
            model_name='commitment',
            constraint=models.CheckConstraint(condition=models.Q(('fee__gte', 0), ('included_nano__gt', 0)), name='commitment_amounts'),
        ),
        migrations.AddField(
            model_name='invoicefile',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant'),
        ),
        migrations.AddConstraint(
            model_name='credituse',
            constraint=models.CheckConstraint(condition=models.Q(('nano', 0), _negated=True), name='credit_use_some'),
        ),
        migrations.AddConstraint(
            model_name='invoiceline',
            constraint=models.UniqueConstraint(fields=('invoice', 'position'), name='invoice_line_once'),
        ),
        migrations.AddConstraint(
            model_name='invoicemail',
            constraint=models.UniqueConstraint(fields=('invoice', 'kind', 'number'), name='invoice_mail_once'),
        ),
        migrations.AddConstraint(
            model_name='ledgertransaction',
            constraint=models.UniqueConstraint(fields=('id', 'tenant'), name='ledger_of_tenant'),
        ),
        migrations.AddIndex(
            model_name='ledgerentry',
            index=models.Index(fields=['tenant', 'account'], name='ledger_tenant_account'),
        ),
        migrations.AddConstraint(
            model_name='ledgerentry',
            constraint=models.CheckConstraint(condition=models.Q(('nano', 0), _negated=True), name='ledger_entry_some'),
        ),
        migrations.AddConstraint(
            model_name='numberseries',
            constraint=models.UniqueConstraint(fields=('entity', 'prefix', 'year'), name='number_series_once'),
        ),
        migrations.AddConstraint(
            model_name='payment',
            constraint=models.UniqueConstraint(fields=('provider', 'reference'), name='payment_once'),
        ),
        migrations.AddConstraint(
            model_name='payment',
            constraint=models.CheckConstraint(condition=models.Q(('cents', 0), _negated=True), name='payment_some'),
        ),
        migrations.AddConstraint(
            model_name='period',
            constraint=models.UniqueConstraint(fields=('entity', 'label'), name='period_once'),
        ),
        migrations.AddConstraint(
            model_name='period',
            constraint=models.CheckConstraint(condition=models.Q(('starts_at__lt', models.F('ends_at'))), name='period_has_length'),
        ),
        migrations.AddIndex(
            model_name='invoice',
            index=models.Index(fields=['tenant', '-id'], name='invoice_tenant'),
        ),
        migrations.AddConstraint(
            model_name='invoice',
            constraint=models.UniqueConstraint(fields=('tenant', 'period', 'kind', 'revision'), name='invoice_once'),
        ),
        migrations.AddConstraint(
            model_name='invoice',
            constraint=models.UniqueConstraint(fields=('entity', 'number'), name='invoice_number_once'),
        ),
        migrations.AddConstraint(
            model_name='invoice',
            constraint=models.UniqueConstraint(fields=('id', 'tenant'), name='invoice_of_tenant'),
        ),
        migrations.AddConstraint(
            model_name='invoice',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('issued_at__isnull', True), ('number__isnull', True), ('state', 'draft')), models.Q(models.Q(('state', 'draft'), _negated=True), ('issued_at__isnull', False), ('number__isnull', False)), _connector='OR'), name='invoice_numbered'),
        ),
        migrations.AddConstraint(
            model_name='invoice',
            constraint=models.CheckConstraint(condition=models.Q(('taxable__gte', 0), ('total__gte', 0)), name='invoice_totals'),
        ),
        migrations.AddConstraint(
            model_name='creditgrant',
            constraint=models.CheckConstraint(condition=models.Q(('nano__gt', 0)), name='credit_positive'),
        ),
        migrations.AddConstraint(
            model_name='creditgrant',
            constraint=models.CheckConstraint(condition=models.Q(('expires_at__isnull', True), ('expires_at__gt', models.F('starts_at')), _connector='OR'), name='credit_has_a_life'),
        ),
        migrations.AddConstraint(
            model_name='creditgrant',
            constraint=models.UniqueConstraint(fields=('commitment', 'period'), name='commitment_credit_once'),
        ),
        migrations.AddConstraint(
            model_name='creditgrant',
            constraint=models.UniqueConstraint(fields=('id', 'tenant'), name='credit_of_tenant'),
        ),
        migrations.AddConstraint(
            model_name='taxrule',
            constraint=models.UniqueConstraint(fields=('entity', 'country', 'region', 'buyer', 'starts_on'), name='tax_rule_once'),
        ),
        migrations.AddConstraint(
            model_name='taxrule',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('category', 'S'), ('rate_ppm__gt', 0), ('rate_ppm__lte', 1000000)), models.Q(models.Q(('category', 'S'), _negated=True), ('rate_ppm', 0)), _connector='OR'), name='tax_rule_rate'),
        ),
        migrations.RunSQL(
            list(FUNCTIONS.values()), [f"DROP FUNCTION {name}() CASCADE" for name in reversed(FUNCTIONS)]
        ),
        migrations.RunSQL(
            TRIGGERS,
            [f"DROP TRIGGER {table}_no_truncate ON {table}"
             for table in ("billing_invoice", "billing_invoiceline", "billing_period")],
        ),
        *(belongs(*rule) for rule in BELONGS),
        *(rls.operations(f"billing_{name}") for name in ROWS),
        *(rls.system_only(f"billing_{name}") for name in OPERATORS),
        *(rls.append_only(f"billing_{name}") for name in APPENDED),
    ]
