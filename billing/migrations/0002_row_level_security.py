"""Usage by tenant: row-level security on the table and on each of its months, which the owner's function makes."""

from typing import Any

from django.db import migrations

from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM

# Runs as the tables' owner, whoever calls it: nobody else may change tables. A month's table is made beside the parent
# and attached, which, unlike CREATE ... PARTITION OF, blocks no inserts. Row triggers come with attaching; the one
# against TRUNCATE, row-level security and privileges do not.
MAKE_PARTITIONS = f"""
CREATE FUNCTION billing_make_partitions(months date[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {{schema}}, pg_temp AS $$
DECLARE
    month date;
    name text;
    made text[] := '{{{{}}}}';
BEGIN
    PERFORM pg_advisory_xact_lock(125780073312884);  -- any number that is ours alone
    FOREACH month IN ARRAY months LOOP
        month := date_trunc('month', month);
        name := 'billing_usageevent_' || to_char(month, 'YYYY_MM');
        CONTINUE WHEN to_regclass(name) IS NOT NULL;  -- another may have made it while we waited
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
            ' FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()', name);
        made := made || name;
    END LOOP;
    RETURN made;
END
$$
"""

# The parent and the months that are there.
PROTECT = f"""
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT relid::regclass::text FROM pg_partition_tree('billing_usageevent') LOOP
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', name);
        EXECUTE format($policy$CREATE POLICY tenant_rows ON %s USING (tenant_id = {rls.TENANT})$policy$, name);
        EXECUTE format('REVOKE ALL ON %s FROM {APP}, {SYSTEM}', name);
        EXECUTE format('GRANT SELECT ON %s TO {APP}, {SYSTEM}', name);
    END LOOP;
    GRANT INSERT ON billing_usageevent TO {SYSTEM};
END
$$
"""
UNPROTECT = f"""
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT relid::regclass::text FROM pg_partition_tree('billing_usageevent') LOOP
        EXECUTE format('DROP POLICY tenant_rows ON %s', name);
        EXECUTE format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', name);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO {APP}, {SYSTEM}', name);
    END LOOP;
END
$$
"""


def make_function(apps: Any, schema_editor: Any) -> None:
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT quote_ident(current_schema())")
        schema = cursor.fetchone()[0]
    schema_editor.execute(MAKE_PARTITIONS.format(schema=schema), None)
    schema_editor.execute("REVOKE ALL ON FUNCTION billing_make_partitions(date[]) FROM PUBLIC")
    schema_editor.execute(f"GRANT EXECUTE ON FUNCTION billing_make_partitions(date[]) TO {SYSTEM}")


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0001_usage'),
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.RunPython(
            make_function,
            lambda apps, schema_editor: schema_editor.execute("DROP FUNCTION billing_make_partitions(date[])"),
        ),
        migrations.RunSQL([PROTECT], [UNPROTECT]),
        rls.system_only("billing_usagequarantine"),
        migrations.RunSQL([f"REVOKE ALL ON billing_usagequarantine FROM {APP}"],
                          [f"GRANT SELECT, INSERT, UPDATE, DELETE ON billing_usagequarantine TO {APP}"]),
    ]
