"""Fast cleanup of the database after tests that commit.

Django empties every table with TRUNCATE and creates permissions and content types again. That takes 0.3 seconds a test
for this schema. Here only tables that were written to are emptied, by DELETE.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

# Tables that `post_migrate` fills and no test changes.
KEPT = ("auth_permission", "django_content_type", "django_migrations")
# A table that was never written to has no pages. An insert that is not yet committed has already added one.
_WRITTEN = """
    SELECT c.relname, pg_relation_size(c.oid) FROM pg_class c
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relname <> ALL (%s)
      AND pg_relation_size(c.oid) > 0
"""
_MAX_BYTES = 2**18  # larger tables are vacuumed, so that their pages are not read again after each test


def empty_tables(url: str) -> None:
    """Delete all rows of the database, in one transaction. `url`: the database as a superuser.

    Triggers and foreign keys are not enforced. The tables are locked, so that transactions that still write have ended.
    """
    with psycopg.connect(url) as connection:
        sizes = dict(connection.execute(_WRITTEN, [list(KEPT)]).fetchall())
        if not sizes:
            return
        tables = [sql.Identifier(name) for name in sizes]
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.SQL(", ").join(tables)))
        for table in tables:
            connection.execute(sql.SQL("DELETE FROM {}").format(table))
        connection.commit()
        large = [sql.Identifier(name) for name, size in sizes.items() if size > _MAX_BYTES]
        if large:
            connection.autocommit = True
            connection.execute(sql.SQL("VACUUM {}").format(sql.SQL(", ").join(large)))
