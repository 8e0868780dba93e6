"""Removal of a test's database, also while the server vacuums it."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from millrace.local.postgres import Postgres


def drop_database(name: str) -> None:
    """Drop a database, and end its connections. Only a superuser may end those of autovacuum.

    A server that MILLRACE_TEST_DATABASE_URL names has no known superuser, so the role of that URL drops the database.
    """
    if "MILLRACE_TEST_DATABASE_URL" in os.environ:
        url = os.environ["MILLRACE_TEST_DATABASE_URL"]
    else:
        url = Postgres(Path(os.environ["MILLRACE_DATA_DIR"])).superuser_url
    with psycopg.connect(make_conninfo(url, dbname="postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
