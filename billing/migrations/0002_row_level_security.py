"""Row-level security of billing, and the rules that the database enforces: guards, partitions, checks and views."""

from datetime import UTC, date, datetime
from typing import Any

from django.db import migrations

from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM
from tenants.migration_operations import combine

# 1. Rows that never change

REJECT_CHANGE = """
CREATE FUNCTION billing_reject_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'table % is append-only: % rejected', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$
"""
# An empty table may be truncated, which Django's tests do with every table. A snapshot that was taken earlier in the
# transaction could miss rows, so the check is valid only under READ COMMITTED.
REJECT_TRUNCATE = """
CREATE FUNCTION billing_reject_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE filled boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO filled;
    IF filled OR current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'table % is append-only: TRUNCATE rejected', TG_TABLE_NAME
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END
$$
"""
# Constraint triggers look at entries at the end of their transaction. An entry that is not visible then is rejected.
CHECK_BALANCE = """
CREATE FUNCTION billing_check_balance() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    rest numeric;
BEGIN
    SELECT sum(nano) INTO rest FROM billing_ledgerentry WHERE transaction_id = NEW.transaction_id;
    IF rest IS DISTINCT FROM 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', NEW.transaction_id
            USING ERRCODE = 'check_violation';
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
        RAISE EXCEPTION 'invoice % is final: % rejected', OLD.number, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
# The share lock makes a line wait for a transaction that finalizes its invoice.
GUARD_LINE = """
CREATE FUNCTION billing_guard_line() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    pk bigint;
BEGIN
    FOREACH pk IN ARRAY ARRAY[OLD.invoice_id, NEW.invoice_id] LOOP
        CONTINUE WHEN pk IS NULL;
        PERFORM FROM billing_invoice WHERE id = pk AND state = 'draft' FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'invoice % is final: % of a line rejected', pk, TG_OP USING ERRCODE = 'restrict_violation';
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
        RAISE EXCEPTION 'period % is fixed: % rejected', OLD.label, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
GUARD_PRICE = """
CREATE FUNCTION billing_guard_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' OR to_jsonb(NEW) - 'effective_until' <> to_jsonb(OLD) - 'effective_until'
        OR NEW.effective_until IS NULL OR NEW.effective_until > OLD.effective_until THEN
        RAISE EXCEPTION 'price % never changes, it can only end earlier: % rejected', OLD.id, TG_OP
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$
"""
# Users may be deleted. What they decided may not.
GUARD_VERSION = """
CREATE FUNCTION billing_guard_price_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state = 'published' AND (TG_OP = 'DELETE' OR to_jsonb(NEW) - ARRAY['created_by_id', 'decided_by_id']
        <> to_jsonb(OLD) - ARRAY['created_by_id', 'decided_by_id']) THEN
        RAISE EXCEPTION 'price version % is published: % rejected', OLD.id, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
FUNCTIONS: dict[str, Any] = {
    "billing_reject_change": REJECT_CHANGE,
    "billing_reject_truncate": REJECT_TRUNCATE,
    "billing_check_balance": CHECK_BALANCE,
    "billing_guard_invoice": GUARD_INVOICE,
    "billing_guard_line": GUARD_LINE,
    "billing_guard_period": GUARD_PERIOD,
    "billing_guard_price": GUARD_PRICE,
    "billing_guard_price_version": GUARD_VERSION,
}
GUARDS = {
    "billing_period": ("billing_period_guard", "UPDATE OR DELETE", "billing_guard_period"),
    "billing_invoice": ("billing_invoice_guard", "UPDATE OR DELETE", "billing_guard_invoice"),
    "billing_invoiceline": ("billing_invoiceline_guard", "INSERT OR UPDATE OR DELETE", "billing_guard_line"),
    "billing_price": ("billing_price_guard", "UPDATE OR DELETE", "billing_guard_price"),
    "billing_priceversion": ("billing_priceversion_guard", "UPDATE OR DELETE", "billing_guard_price_version"),
}
TRIGGERS: list[Any] = [
    "CREATE TRIGGER billing_usage_no_change BEFORE UPDATE OR DELETE ON billing_usageevent"
    " FOR EACH ROW EXECUTE FUNCTION billing_reject_change()",
    "CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON billing_usageevent"
    " FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate()",
    "CREATE CONSTRAINT TRIGGER billing_ledgerentry_balance AFTER INSERT ON billing_ledgerentry"
    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_check_balance()",
    *(
        f"CREATE TRIGGER {name} BEFORE {events} ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"
        for table, (name, events, function) in GUARDS.items()
    ),
    *(
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate()"
        for table in GUARDS
    ),
]

# A text as a range of one value, because exclusion constraints compare texts only with an extension. tenant_id, tier
# and component have no slash, so two keys never have the same text.
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

# 2. Partitions of usage events

# Runs as the tables' owner, because no other role may change tables. A partition is created as a separate table and
# attached, which does not block inserts, unlike CREATE ... PARTITION OF. Attaching creates the row triggers, but not
# the trigger against TRUNCATE, row-level security or privileges.
CREATE_PARTITIONS = f"""
CREATE FUNCTION billing_create_partitions(months date[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp AS $$
DECLARE
    month date;
    name text;
    created text[] := '{{{{}}}}';
BEGIN
    PERFORM pg_advisory_xact_lock(125780073312884);  -- an arbitrary number, used only here
    FOREACH month IN ARRAY months LOOP
        month := date_trunc('month', month);
        name := 'billing_usageevent_' || to_char(month, 'YYYY_MM');
        CONTINUE WHEN to_regclass(name) IS NOT NULL;  -- created by another process before the lock was granted
        EXECUTE format('CREATE TABLE %I (LIKE billing_usageevent INCLUDING ALL)', name);
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format($policy$CREATE POLICY tenant_rows ON %I USING (tenant_id = {rls.TENANT})$policy$, name);
        EXECUTE format('REVOKE ALL ON %I FROM {APP}, {SYSTEM}', name);
        EXECUTE format('GRANT SELECT ON %I TO {APP}, {SYSTEM}', name);
        EXECUTE format('ALTER TABLE billing_usageevent ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', name,
            to_char(month, 'YYYY-MM-DD') || ' 00:00:00+00',
            to_char(month + interval '1 month', 'YYYY-MM-DD') || ' 00:00:00+00');
        EXECUTE format('CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON %I'
            ' FOR EACH STATEMENT EXECUTE FUNCTION billing_reject_truncate()', name);
        created := created || name;
    END LOOP;
    RETURN created;
END
$$
"""
PROTECT_EVENTS: list[Any] = [
    "ALTER TABLE billing_usageevent ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE billing_usageevent FORCE ROW LEVEL SECURITY",
    f"CREATE POLICY tenant_rows ON billing_usageevent USING (tenant_id = {rls.TENANT})",
    f"REVOKE ALL ON billing_usageevent FROM {APP}, {SYSTEM}",
    f"GRANT SELECT ON billing_usageevent TO {APP}, {SYSTEM}",
    f"GRANT INSERT ON billing_usageevent TO {SYSTEM}",
]
# Unprotected partitions would show their rows to every tenant.
UNPROTECT_EVENTS = """
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT relid::regclass::text FROM pg_partition_tree('billing_usageevent') WHERE level > 0 LOOP
        EXECUTE format('DROP TABLE %s', name);
    END LOOP;
    DROP POLICY tenant_rows ON billing_usageevent;
    ALTER TABLE billing_usageevent NO FORCE ROW LEVEL SECURITY;
    ALTER TABLE billing_usageevent DISABLE ROW LEVEL SECURITY;
END
$$
"""


def create_partitions(apps: Any, schema_editor: Any) -> None:
    """Create the function, and the partitions of the last, the current and the next three months."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT quote_ident(current_schema())")
        schema = cursor.fetchone()[0]
    schema_editor.execute(CREATE_PARTITIONS.format(schema=schema), None)
    schema_editor.execute("REVOKE ALL ON FUNCTION billing_create_partitions(date[]) FROM PUBLIC")
    schema_editor.execute(f"GRANT EXECUTE ON FUNCTION billing_create_partitions(date[]) TO {SYSTEM}")
    current = datetime.now(UTC).date().replace(day=1)
    months = []
    for offset in range(-1, 4):
        years, index = divmod(current.year * 12 + current.month - 1 + offset, 12)
        months.append(date(years, index + 1, 1))
    schema_editor.execute("SELECT billing_create_partitions(%s)", [months])


def drop_partition_function(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute("DROP FUNCTION billing_create_partitions(date[])")


# 3. Views

# Events and adjustments, one row for each priced component.
RATED_LINE = """
CREATE VIEW billing_rated_line WITH (security_invoker = true) AS
SELECT e.tenant_id, e.project_id, e.key_id, e.admitted_at, e.request_id, e.execution, e.invoice_period,
    used.component, used.price_id, used.tokens::bigint AS tokens,
    used.tokens::numeric(38, 0) * price.nano_per_million AS femto
FROM (
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, uncached, cache_read,
        cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, price_ids
    FROM billing_usageevent
    UNION ALL
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, uncached, cache_read,
        cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, price_ids
    FROM billing_adjustment
) AS e
CROSS JOIN LATERAL unnest(
    ARRAY['uncached', 'cache_read', 'cache_write_5m', 'cache_write_1h', 'output',
        'answer_hit_input', 'answer_hit_output'],
    ARRAY[e.uncached, e.cache_read, e.cache_write_5m, e.cache_write_1h, e.output,
        e.answer_hit_input, e.answer_hit_output],
    e.price_ids
) AS used (component, tokens, price_id)
JOIN billing_price price ON price.id = used.price_id
"""
# The tokens of a failed execution do not count. An adjustment subtracts tokens, and may change the outcome.
USAGE_CHANGE = """
CREATE VIEW billing_usagechange WITH (security_invoker = true) AS
SELECT e.admitted_at, e.request_id, e.execution, e.settled_at, e.tenant_id, e.project_id, e.key_id, e.model,
    coalesce(rate_card.tier, '') AS tier, e.miss_reason,
    (e.outcome = 'completed')::int AS completed, (e.outcome = 'cancelled')::int AS cancelled,
    (e.outcome = 'failed')::int AS failed,
    e.uncached * billed AS uncached, e.cache_read * billed AS cache_read,
    e.cache_write_5m * billed AS cache_write_5m, e.cache_write_1h * billed AS cache_write_1h,
    e.output * billed AS output, e.answer_hit_input * billed AS answer_hit_input,
    e.answer_hit_output * billed AS answer_hit_output, e.unpinned_tokens * billed AS unpinned_tokens,
    e.cost_femto, e.saved_femto
FROM billing_usageevent e
CROSS JOIN LATERAL (SELECT (e.outcome <> 'failed')::int AS billed) AS counted
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = e.price_version
UNION ALL
SELECT a.admitted_at, a.request_id, a.execution, a.created_at, a.tenant_id, a.project_id, a.key_id, a.model,
    coalesce(rate_card.tier, ''), e.miss_reason,
    CASE WHEN a.outcome IN ('failed', 'cancelled') THEN -(e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN -(e.outcome = 'cancelled')::int
        WHEN 'cancelled' THEN (e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN (e.outcome <> 'failed')::int ELSE 0 END,
    a.uncached, a.cache_read, a.cache_write_5m, a.cache_write_1h, a.output, a.answer_hit_input, a.answer_hit_output, 0,
    a.cost_femto, a.saved_femto
FROM billing_adjustment a
JOIN billing_usageevent e USING (admitted_at, request_id, execution)
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = a.price_version
"""

# 4. Rows by tenant

# Table, column, and the table of the row that it must refer to, with the same tenant_id.
SAME_TENANT = (
    ("billing_invoice", "refers_to_id", "billing_invoice"),
    ("billing_invoiceline", "invoice_id", "billing_invoice"),
    ("billing_invoicefile", "invoice_id", "billing_invoice"),
    ("billing_invoiceemail", "invoice_id", "billing_invoice"),
    ("billing_payment", "invoice_id", "billing_invoice"),
    ("billing_creditapplication", "invoice_id", "billing_invoice"),
    ("billing_creditapplication", "grant_id", "billing_creditgrant"),
    ("billing_ledgerentry", "invoice_id", "billing_invoice"),
    ("billing_ledgerentry", "transaction_id", "billing_ledgertransaction"),
)
WRITTEN_BY_APP = (
    *("billingprofile", "invoice", "invoiceline", "invoicefile", "invoiceemail", "commitment", "creditgrant"),
    *("creditapplication", "payment", "ledgertransaction", "ledgerentry"),
    *("budget", "budgetalert", "pricebookassignment"),
)
READ_BY_APP = ("budgetperiod", "budgetlease", "adjustment", "budgetcorrection", "usagerollup")
SHARED_OR_OWN = ("price", "compiledratecard")
SYSTEM_ONLY = (
    *("billingentity", "taxrule", "exchangerate", "period", "numberseries", "priceversion", "usagequarantine"),
    *("reconciliation", "earlyrelease"),
)
APPEND_ONLY = (
    *("invoicefile", "creditgrant", "creditapplication", "payment", "ledgertransaction", "ledgerentry"),
    *("compiledratecard", "adjustment", "budgetcorrection"),
)


def same_tenant(table: str, column: str, to: str) -> migrations.RunSQL:
    """Add a foreign key to a row of the same tenant."""
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        [f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id) REFERENCES {to} (id, tenant_id)"],
        [f"ALTER TABLE {table} DROP CONSTRAINT {name}"],
    )


def read_only(*names: str) -> migrations.RunSQL:
    """Have the app's role read the tables and change nothing."""
    tables = ", ".join(f"billing_{name}" for name in names)
    return migrations.RunSQL(
        [f"REVOKE INSERT, UPDATE, DELETE ON {tables} FROM {APP}"],
        [f"GRANT INSERT, UPDATE, DELETE ON {tables} TO {APP}"],
    )


def shared_or_own(table: str) -> migrations.RunSQL:
    """Have the app's role read the rows without a tenant and those of the open tenant scope."""
    return migrations.RunSQL(
        [
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            f"CREATE POLICY own_or_all ON {table} USING (tenant_id IS NULL OR tenant_id = {rls.TENANT})",
        ],
        [
            f"DROP POLICY own_or_all ON {table}",
            f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY",
        ],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0001_initial'),
    ]

    operations = [
        combine(
            migrations.RunSQL(
                list(FUNCTIONS.values()), [f"DROP FUNCTION {name}() CASCADE" for name in reversed(FUNCTIONS)]
            ),
            migrations.RunSQL(TRIGGERS, []),
            migrations.RunSQL(
                ['CREATE TYPE billing_textrange AS RANGE (subtype = text, collation = "C")', NO_OVERLAP],
                ["ALTER TABLE billing_price DROP CONSTRAINT price_no_overlap", "DROP TYPE billing_textrange"],
            ),
            migrations.RunSQL(PROTECT_EVENTS, [UNPROTECT_EVENTS]),
        ),
        migrations.RunPython(create_partitions, drop_partition_function),
        combine(
            migrations.RunSQL([RATED_LINE], ["DROP VIEW billing_rated_line"]),
            migrations.RunSQL([USAGE_CHANGE], ["DROP VIEW billing_usagechange"]),
            *(same_tenant(*rule) for rule in SAME_TENANT),
            *(rls.operations(f"billing_{name}") for name in (*WRITTEN_BY_APP, *READ_BY_APP)),
            *(shared_or_own(f"billing_{name}") for name in SHARED_OR_OWN),
            *(rls.system_only(f"billing_{name}") for name in SYSTEM_ONLY),
            *(rls.append_only(f"billing_{name}") for name in APPEND_ONLY),
            read_only(*READ_BY_APP, *SHARED_OR_OWN, "rollupstate", "usagearchive"),
            migrations.RunSQL(
                [
                    f"REVOKE ALL ON billing_usagequarantine, billing_priceversion FROM {APP}",
                    f"REVOKE UPDATE, DELETE ON billing_pricebook FROM {APP}",
                    f"REVOKE INSERT, UPDATE, DELETE ON billing_usagearchive FROM {SYSTEM}",
                ],
                [
                    f"GRANT INSERT, UPDATE, DELETE ON billing_usagearchive TO {SYSTEM}",
                    f"GRANT UPDATE, DELETE ON billing_pricebook TO {APP}",
                    f"GRANT SELECT, INSERT, UPDATE, DELETE ON billing_usagequarantine, billing_priceversion TO {APP}",
                ],
            ),
        ),
    ]
