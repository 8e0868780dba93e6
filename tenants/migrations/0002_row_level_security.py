"""Rules of the database: row-level security, grants, composite foreign keys, an append-only audit log, and the function
by which gateways rehash keys."""

from django.db import migrations

from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM

# For all tables in the schema. Tables of later migrations get the same grants from the default privileges.
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
REVOKE_GRANTS = f"""
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

# Locks the tenant as actions do, so that no snapshot is compiled with the old hash at the same time. The snapshot's
# contents do not change, so gateways are not notified.
REHASH = """
CREATE FUNCTION tenants_rehash_key(old bytea, new bytea, new_pepper text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    old_row tenants_apikey;
BEGIN
    SELECT * INTO old_row FROM tenants_apikey WHERE key_hash = old;
    PERFORM FROM tenants_tenant WHERE id = old_row.tenant_id FOR NO KEY UPDATE;
    UPDATE tenants_apikey SET key_hash = new, pepper = new_pepper WHERE id = old_row.id AND key_hash = old;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE tenants_apikeysnapshot SET key_hash = new WHERE key_id = old_row.id;
    INSERT INTO tenants_auditentry
        (created_at, tenant_id, action, actor, request_id, object_type, object_id, object_name, before, after)
    VALUES (clock_timestamp(), old_row.tenant_id, 'key.rehashed', 'gateway', '', 'apikey', old_row.id,
        old_row.name || ' (' || old_row.prefix || '…)',
        jsonb_build_object('pepper', old_row.pepper), jsonb_build_object('pepper', new_pepper));
    RETURN true;
END
$$
"""

# table, column, referenced table
COMPOSITE_KEYS = (
    ("tenants_apikey", "project_id", "tenants_project"),
    ("tenants_apikeysnapshot", "key_id", "tenants_apikey"),
    ("tenants_apikeyusage", "key_id", "tenants_apikey"),
    ("tenants_limitset", "project_id", "tenants_project"),
    ("tenants_limitset", "key_id", "tenants_apikey"),
)
TABLES = (
    *("project", "membership", "invitation", "apikey", "apikeysnapshot", "apikeyusage", "limitset", "routingpolicy"),
    *("auditentry", "changeevent", "idempotentresponse"),
    *("webhookendpoint", "webhookevent", "webhookdelivery", "webhookattempt", "outboxemail"),
)


def composite_key(table: str, column: str, referenced: str) -> migrations.RunSQL:
    """Require that a row and the row it refers to belong to the same tenant."""
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id)"
        f" REFERENCES {referenced} (id, tenant_id)",
        f"ALTER TABLE {table} DROP CONSTRAINT {name}",
    )


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0001_initial'),
    ]

    operations = [
        migrations.RunPython(rls.ensure_roles, migrations.RunPython.noop),
        migrations.RunSQL([GRANTS], [REVOKE_GRANTS]),
        migrations.RunSQL(
            [f"REVOKE INSERT, UPDATE, DELETE ON django_migrations FROM {APP}, {SYSTEM}"], migrations.RunSQL.noop
        ),
        migrations.RunSQL([REFUSE_CHANGE], ["DROP FUNCTION tenants_refuse_change()"]),
        rls.append_only("tenants_auditentry"),
        *(composite_key(*rule) for rule in COMPOSITE_KEYS),
        rls.operations("tenants_tenant", "id"),
        *(rls.operations(f"tenants_{table}") for table in TABLES),
        migrations.RunSQL([REHASH], ["DROP FUNCTION tenants_rehash_key(bytea, bytea, text)"]),
    ]
