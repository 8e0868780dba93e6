"""The database's own rules: whose rows are seen, that projects and keys are their tenant's, that the log only grows."""

from django.db import migrations

from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM

# In whatever schema the tables are made; later tables get the same from the default privileges.
GRANTS = f"""
DO $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO {APP}, {SYSTEM}', current_schema());
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO {APP}, {SYSTEM}', current_schema());
    EXECUTE format('GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA %I TO {APP}, {SYSTEM}', current_schema());
    EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA %I'
        ' GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {APP}, {SYSTEM}', current_schema());
    EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA %I GRANT USAGE, SELECT ON SEQUENCES TO {APP}, {SYSTEM}',
        current_schema());
END
$$
"""
UNDO_GRANTS = f"""
DO $$
BEGIN
    EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA %I REVOKE ALL ON TABLES FROM {APP}, {SYSTEM}', current_schema());
    EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA %I REVOKE ALL ON SEQUENCES FROM {APP}, {SYSTEM}',
        current_schema());
    EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA %I FROM {APP}, {SYSTEM}', current_schema());
    EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA %I FROM {APP}, {SYSTEM}', current_schema());
    EXECUTE format('REVOKE USAGE ON SCHEMA %I FROM {APP}, {SYSTEM}', current_schema());
END
$$
"""

REFUSE_CHANGE = """
CREATE FUNCTION tenants_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'table % is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$
"""

# table, column, what it must be a row of, together with tenant_id
BELONGS = (
    ("tenants_apikey", "project_id", "tenants_project"),
    ("tenants_keysnapshot", "key_id", "tenants_apikey"),
    ("tenants_keyuse", "key_id", "tenants_apikey"),
    ("tenants_limitset", "project_id", "tenants_project"),
    ("tenants_limitset", "key_id", "tenants_apikey"),
)
ROWS = (
    "project",
    "membership",
    "invitation",
    "apikey",
    "keysnapshot",
    "keyuse",
    "limitset",
    "routingpolicy",
    "auditentry",
    "changelog",
    "idempotentanswer",
)


def belongs(table: str, column: str, to: str) -> migrations.RunSQL:
    """The same tenant on both sides. Added without a look at the rows, which would hold up writers, then validated."""
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        [
            f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id)"
            f" REFERENCES {to} (id, tenant_id) NOT VALID",
            f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}",
        ],
        [f"ALTER TABLE {table} DROP CONSTRAINT {name}"],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0002_tenancy'),
    ]

    operations = [
        migrations.RunPython(rls.ensure_roles, migrations.RunPython.noop),
        migrations.RunSQL([GRANTS], [UNDO_GRANTS]),
        migrations.RunSQL(
            [f"REVOKE INSERT, UPDATE, DELETE ON django_migrations FROM {APP}, {SYSTEM}"], migrations.RunSQL.noop
        ),
        migrations.RunSQL([REFUSE_CHANGE], ["DROP FUNCTION tenants_refuse_change()"]),
        rls.append_only("tenants_auditentry"),
        *(belongs(*rule) for rule in BELONGS),
        rls.operations("tenants_tenant", "id"),
        *(rls.operations(f"tenants_{name}") for name in ROWS),
    ]
