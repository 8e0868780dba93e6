"""Row-level security in migrations: `operations` for a new table of tenants' rows.

The policies and triggers are in `tenants/isolation/sql`. Row-level security is forced, so the owner who migrates sees
no rows of tenants. A data migration therefore runs `SET LOCAL ROLE millrace_system` first, and `RESET ROLE` after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import ProgrammingError, migrations, transaction

from inference_worker.contract.script_files import read_script
from tenants.isolation.db_roles import APP, GRANT_SQL, ROLES_SQL, SYSTEM
from tenants.migration_operations import combine

_SQL = Path(__file__).parent / "sql"
TENANT = "nullif(current_setting('millrace.tenant', true), '')::bigint"


def operations(table: str, column: str = "tenant_id") -> migrations.RunSQL:
    """Return the operation that limits the app's role to the rows of the open tenant scope."""
    return combine(
        system_only(table),
        _from_file("tenant_rows", [f"DROP POLICY tenant_rows ON {table}"], table=table, column=column, tenant=TENANT),
    )


def shared_or_own(table: str) -> migrations.RunSQL:
    """Return the operation that limits the app's role to rows without a tenant and those of the open tenant scope."""
    return combine(
        system_only(table),
        _from_file("own_or_all", [f"DROP POLICY own_or_all ON {table}"], table=table, tenant=TENANT),
    )


def system_only(table: str) -> migrations.RunSQL:
    """Return the operation that hides all rows of the table from the app's role."""
    reverse = [f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY", f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"]
    return _from_file("row_security", reverse, table=table)


def append_only(table: str) -> migrations.RunSQL:
    """Return the operation that makes a table append-only: triggers reject changes, also by the owner."""
    reverse = [
        f"GRANT UPDATE, DELETE ON {table} TO {APP}, {SYSTEM}",
        f"DROP TRIGGER {table}_no_truncate ON {table}",
        f"DROP TRIGGER {table}_no_change ON {table}",
    ]
    return _from_file("append_only", reverse, table=table)


def same_tenant(table: str, column: str, referenced: str) -> migrations.RunSQL:
    """Return the operation that requires that a row and the row it refers to belong to the same tenant."""
    reverse = [f"ALTER TABLE {table} DROP CONSTRAINT {table}_{column}_of_tenant"]
    return _from_file("same_tenant", reverse, table=table, column=column, referenced=referenced)


def revoke(privileges: str, *tables: str, roles: str = APP) -> migrations.RunSQL:
    """Return the operation that revokes privileges, of those that all tables grant to both roles.

    `privileges`: such as "INSERT, UPDATE, DELETE", or "ALL".
    """
    names = ", ".join(tables)
    granted = "SELECT, INSERT, UPDATE, DELETE" if privileges == "ALL" else privileges
    return migrations.RunSQL(
        [f"REVOKE {privileges} ON {names} FROM {roles}"], [f"GRANT {granted} ON {names} TO {roles}"]
    )


def _from_file(name: str, reverse: Sequence[str], **values: str) -> migrations.RunSQL:
    return migrations.RunSQL([read_script(_SQL / f"{name}.sql", **values)], tuple(reverse))


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
