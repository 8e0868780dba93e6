"""Row-level security of billing, and the rules that the database enforces: guards, partitions, checks and views.

The functions of budgets move budget periods and leases: one function for each step, each in one transaction.

NOTE: every one of them locks leases first, then budget periods, both in the order of their ids. So no two of them can
deadlock. Units are in the order money, tokens, requests. `used` of a budget period is in millionths of its unit.

Early release: a gateway may release the unused part of a reservation before its usage event is settled, and only once.
A row of `billing_earlyrelease` exists from then until the settlement, or until the lease is reclaimed. The release and
the settlement both lock the lease's row first. The second of them finds what the first has done: the usage event, or
the row.
"""

from datetime import UTC, date, datetime
from typing import Any

from django.db import migrations

from billing.usage_views import FIRST_CHANGES, usage_views
from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM
from tenants.migration_operations import SqlFiles, combine

# The columns of usage events and adjustments with the tokens of a priced component, in the order of `price_ids`.
TOKENS = (
    *("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("answer_hit_input", "answer_hit_output", "searches"),
)
SQL = SqlFiles(
    __file__,
    tenant=rls.TENANT,
    # Of a budget `b` and a budget period `p`.
    limit="b.amount + p.rolled_over + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END",
    unit="array_position(ARRAY['money', 'tokens', 'requests'], p.unit::text)",
)
GUARDS = (
    *("billing_reject_change", "billing_reject_truncate", "billing_check_balance", "billing_guard_invoice"),
    *("billing_guard_line", "billing_guard_period", "billing_guard_price", "billing_guard_price_version"),
    "billing_guard_rerating",
)
FUNCTIONS = (
    *("billing_open_budget_periods", "billing_create_budget_periods", "billing_move_amounts", "billing_return_leases"),
    *("billing_lease_budget", "billing_settle", "billing_adjust", "billing_reclaim_leases", "billing_release_unused"),
    *("billing_reserve_spend", "billing_rollup_bucket", "billing_rollup_settled_before", "billing_rollup_coarse"),
)

# Unprotected partitions would show their rows to every tenant.
DROP_PARTITIONS = """
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT relid::regclass::text FROM pg_partition_tree('billing_usageevent') WHERE level > 0 LOOP
        EXECUTE format('DROP TABLE %s', name);
    END LOOP;
END
$$
"""


def create_partitions(apps: Any, schema_editor: Any) -> None:
    """Create the function, and the partitions of the last, the current and the next three months."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT quote_ident(current_schema())")
        schema = cursor.fetchone()[0]
    schema_editor.execute(SQL.read("billing_create_partitions", schema=schema), None)
    schema_editor.execute("REVOKE ALL ON FUNCTION billing_create_partitions(date[]) FROM PUBLIC")
    schema_editor.execute(f"GRANT EXECUTE ON FUNCTION billing_create_partitions(date[]) TO {SYSTEM}")
    current = datetime.now(UTC).date().replace(day=1)
    months = []
    for offset in range(-1, 4):
        years, index = divmod(current.year * 12 + current.month - 1 + offset, 12)
        months.append(date(years, index + 1, 1))
    schema_editor.execute("SELECT billing_create_partitions(%s)", [months])


def drop_partitions(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute(DROP_PARTITIONS, None)
    schema_editor.execute("DROP FUNCTION billing_create_partitions(date[])")


# Table, column, and the table of the row that it must refer to, with the same tenant_id.
SAME_TENANT = (
    ("billing_invoice", "refers_to_id", "billing_invoice"),
    ("billing_invoiceline", "invoice_id", "billing_invoice"),
    ("billing_invoicefile", "invoice_id", "billing_invoice"),
    ("billing_invoiceemail", "invoice_id", "billing_invoice"),
    ("billing_payment", "invoice_id", "billing_invoice"),
    ("billing_creditapplication", "invoice_id", "billing_invoice"),
    ("billing_creditapplication", "grant_id", "billing_creditgrant"),
    ("billing_creditgrant", "purchase_id", "billing_invoice"),
    ("billing_creditgrant", "payment_id", "billing_payment"),
    ("billing_ledgerentry", "invoice_id", "billing_invoice"),
    ("billing_ledgerentry", "transaction_id", "billing_ledgertransaction"),
    ("billing_reratedinvoice", "invoice_id", "billing_invoice"),
    ("billing_reratedinvoice", "note_id", "billing_invoice"),
    ("billing_oneoffline", "invoice_id", "billing_invoice"),
)
WRITTEN_BY_APP = (
    *("billingprofile", "invoice", "invoiceline", "invoicefile", "invoiceemail", "commitment", "creditgrant"),
    *("creditapplication", "payment", "ledgertransaction", "ledgerentry", "meteredusage", "topup"),
    *("budget", "budgetalert", "pricebookassignment"),
)
READ_BY_APP = (
    *("budgetperiod", "budgetlease", "adjustment", "budgetcorrection", "usagerollup"),
    *("reratedinvoice", "oneoffline", "priceterm"),
)
SHARED_OR_OWN = ("price", "compiledratecard")
SYSTEM_ONLY = (
    *("billingentity", "taxrule", "exchangerate", "period", "numberseries", "reconciliation", "earlyrelease"),
)
# The app's role may not even read these.
HIDDEN_FROM_APP = (
    *("priceversion", "usagequarantine", "paymentevent", "rerating", "vatcheck", "invoicerunfailure"),
    *("costcard", "executioncost", "dailycost", "spendreservation"),
)
APPEND_ONLY = (
    *("invoicefile", "creditgrant", "creditapplication", "payment", "ledgertransaction", "ledgerentry"),
    *("compiledratecard", "adjustment", "budgetcorrection", "meteredusage", "reratedinvoice", "vatcheck"),
    *("costcard", "executioncost"),
)


def _tables(*names: str) -> list[str]:
    return [f"billing_{name}" for name in names]


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0001_schema'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            SQL.functions(*GUARDS, *FUNCTIONS),
            migrations.RunSQL(
                ['CREATE TYPE billing_textrange AS RANGE (subtype = text, collation = "C")'],
                ["DROP TYPE billing_textrange"],
            ),
            migrations.RunSQL(
                [SQL.read("price_no_overlap")], ["ALTER TABLE billing_price DROP CONSTRAINT price_no_overlap"]
            ),
            rls.system_only("billing_usageevent"),
            migrations.RunSQL(
                [
                    SQL.read("usage_event_rows"),
                    f"REVOKE ALL ON billing_usageevent FROM {APP}, {SYSTEM}",
                    f"GRANT SELECT ON billing_usageevent TO {APP}, {SYSTEM}",
                    f"GRANT INSERT ON billing_usageevent TO {SYSTEM}",
                ],
                ["DROP POLICY tenant_rows ON billing_usageevent"],
            ),
        ),
        migrations.RunPython(create_partitions, drop_partitions),
        combine(
            usage_views(TOKENS, changes=FIRST_CHANGES),
            *(rls.same_tenant(*key) for key in SAME_TENANT),
            *(rls.operations(table) for table in _tables(*WRITTEN_BY_APP, *READ_BY_APP)),
            *(rls.shared_or_own(table) for table in _tables(*SHARED_OR_OWN)),
            *(rls.system_only(table) for table in _tables(*SYSTEM_ONLY, *HIDDEN_FROM_APP)),
            *(rls.append_only(table) for table in _tables(*APPEND_ONLY)),
            rls.revoke("INSERT, UPDATE, DELETE", *_tables(*READ_BY_APP, *SHARED_OR_OWN, "rollupstate", "usagearchive")),
            rls.revoke("INSERT, UPDATE, DELETE", "billing_usagearchive", roles=SYSTEM),
            rls.revoke("INSERT", "billing_meteredusage"),
            rls.revoke("UPDATE, DELETE", "billing_pricebook"),
            rls.revoke("ALL", *_tables(*HIDDEN_FROM_APP)),
        ),
    ]
