"""Row-level security in migrations: `operations` for a new table of tenants' rows, `as_system` for data migrations.

Row-level security is forced, so the owner who migrates sees no rows of tenants. A data migration therefore calls
`as_system(schema_editor)` first, which applies until the end of its transaction.
"""

from __future__ import annotations

from typing import Any

from django.db import ProgrammingError, migrations, transaction

from tenants.isolation.db_roles import APP, GRANT_SQL, ROLES_SQL, SYSTEM

TENANT = "nullif(current_setting('millrace.tenant', true), '')::bigint"


def operations(table: str, column: str = "tenant_id") -> migrations.RunSQL:
    """Return the operation that limits the app's role to the rows of the open tenant scope."""
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
    """Return the operation that hides all rows of the table from the app's role."""
    return migrations.RunSQL(
        [f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY", f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY"],
        [f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY", f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"],
    )


def append_only(table: str) -> migrations.RunSQL:
    """Return the operation that makes a table append-only: triggers reject changes, also by the owner."""
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
    """Make all rows visible until the end of the migration's transaction."""
    schema_editor.execute(f"SET LOCAL ROLE {SYSTEM}")


def update_rows(forward: str, reverse: str) -> migrations.RunPython:
    """Return the operation that runs a statement on the rows of all tenants, and its reverse statement."""

    def run(statement: str) -> Any:
        def execute(apps: Any, schema_editor: Any) -> None:
            as_system(schema_editor)
            schema_editor.execute(statement)
            schema_editor.execute("RESET ROLE")  # the next operations need the owner

        return execute

    return migrations.RunPython(run(forward), run(reverse))


def ensure_roles(apps: Any, schema_editor: Any) -> None:
    """Create the roles if they do not exist, and allow the owner to set them.

    Raises:
        RuntimeError: the owner may not create roles. The message contains the SQL that a superuser must run once.
    """
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user, count(*) FROM pg_roles WHERE rolname IN (%s, %s)", [APP, SYSTEM])
        owner, count = cursor.fetchone()
        if count == 2:
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
            f"The database lacks the roles {APP} and {SYSTEM}, and {owner} may not create them ({exc})."
            f" Have a superuser run this once, then migrate again:\n{ROLES_SQL};\n{grant};\n"
        ) from exc
