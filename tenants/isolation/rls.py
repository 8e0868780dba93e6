"""Row-level security in migrations: `operations` for a new table of tenants' rows, `as_system` for moving data.

Row-level security is forced, so the owner that migrates sees no tenant's row either. A data migration therefore calls
`as_system(schema_editor)` first, which holds until the migration's transaction ends.
"""

from __future__ import annotations

from typing import Any

from django.db import ProgrammingError, migrations, transaction

from tenants.isolation.db_roles import APP, GRANT_SQL, ROLES_SQL, SYSTEM

TENANT = "nullif(current_setting('millrace.tenant', true), '')::bigint"


def operations(table: str, column: str = "tenant_id") -> migrations.RunSQL:
    """Have the app's role see the rows of the tenant whose scope is open, and no others."""
    return migrations.RunSQL(
        [
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            f"CREATE POLICY tenant_rows ON {table} USING ({column} = {TENANT}) WITH CHECK ({column} = {TENANT})",
        ],
        [
            f"DROP POLICY tenant_rows ON {table}",
            f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY",
        ],
    )


def system_only(table: str) -> migrations.RunSQL:
    """Have the app's role see none of the rows."""
    return migrations.RunSQL(
        [f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY", f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY"],
        [f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY", f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"],
    )


def append_only(table: str) -> migrations.RunSQL:
    """Have triggers refuse every change but an insert, also to the owner; the roles may not even try."""
    return migrations.RunSQL(
        [
            f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION tenants_refuse_change()",
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION tenants_refuse_change()",
            f"REVOKE UPDATE, DELETE, TRUNCATE ON {table} FROM {APP}, {SYSTEM}",
        ],
        [
            f"GRANT UPDATE, DELETE ON {table} TO {APP}, {SYSTEM}",
            f"DROP TRIGGER {table}_no_truncate ON {table}",
            f"DROP TRIGGER {table}_no_change ON {table}",
        ],
    )


def as_system(schema_editor: Any) -> None:
    """For the rest of this migration's transaction, see every row."""
    schema_editor.execute(f"SET LOCAL ROLE {SYSTEM}")


def ensure_roles(apps: Any, schema_editor: Any) -> None:
    """See that the roles are there and that the owner may take them; make them if it may.

    Raises:
        RuntimeError: with what a superuser must run once.
    """
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user, count(*) FROM pg_roles WHERE rolname IN (%s, %s)", [APP, SYSTEM])
        owner, there = cursor.fetchone()
        if there == 2:
            cursor.execute("SELECT pg_has_role(%s, 'SET') AND pg_has_role(%s, 'SET')", [APP, SYSTEM])
            if cursor.fetchone()[0]:
                return
    grant = GRANT_SQL.format(owner=connection.ops.quote_name(owner))
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(ROLES_SQL)
            cursor.execute(grant)
    except ProgrammingError as exc:
        raise RuntimeError(
            f"The database lacks the roles {APP} and {SYSTEM}, and {owner} may not make them ({exc})."
            f" Have a superuser run this once, then migrate again:\n{ROLES_SQL};\n{grant};\n"
        ) from exc
