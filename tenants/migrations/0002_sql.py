"""Roles and grants, row-level security, composite foreign keys, an append-only audit log, and the rehashing of keys."""

from django.db import migrations

from tenants.isolation import rls
from tenants.isolation.db_roles import APP, SYSTEM
from tenants.migration_operations import SqlFiles, combine

SQL = SqlFiles(__file__)

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
COMPOSITE_KEYS = (
    ("tenants_apikey", "project_id", "tenants_project"),
    ("tenants_apikeysnapshot", "key_id", "tenants_apikey"),
    ("tenants_apikeyusage", "key_id", "tenants_apikey"),
    ("tenants_limitset", "project_id", "tenants_project"),
    ("tenants_limitset", "key_id", "tenants_apikey"),
)
TABLES = (
    *("project", "membership", "invitation", "apikey", "apikeysnapshot", "apikeyusage", "limitset"),
    *("routingpolicy", "routingpolicydraft", "experiment", "savedview", "tenantjob", "upstreamcredential"),
    *("auditentry", "changeevent", "idempotentresponse"),
    *("webhookendpoint", "webhookevent", "webhookdelivery", "webhookattempt", "outboxemail"),
)


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0001_schema'),
    ]

    operations = [
        migrations.RunPython(rls.ensure_roles, migrations.RunPython.noop),
        combine(
            migrations.RunSQL([GRANTS], [REVOKE_GRANTS]),
            migrations.RunSQL([f"REVOKE INSERT, UPDATE, DELETE ON django_migrations FROM {APP}, {SYSTEM}"], []),
            SQL.functions("tenants_refuse_change", "tenants_rehash_key"),
            rls.append_only("tenants_auditentry"),
            *(rls.same_tenant(*key) for key in COMPOSITE_KEYS),
            rls.operations("tenants_tenant", "id"),
            *(rls.operations(f"tenants_{table}") for table in TABLES),
        ),
    ]
