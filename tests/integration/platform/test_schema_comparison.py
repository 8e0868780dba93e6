"""The comparison of two databases' schemas finds each type of difference, and ignores the order of columns."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tools import compare_schemas

SCHEMA = """
CREATE TABLE events ({columns}, CHECK (number > 0 AND name <> ''), PRIMARY KEY (at, id)) PARTITION BY RANGE (at);
CREATE TABLE events_{year} (LIKE events INCLUDING ALL);
ALTER TABLE events ATTACH PARTITION events_{year} FOR VALUES FROM ('{year}-01-01') TO ('{year}-12-01');
ALTER TABLE events_{year} ENABLE ROW LEVEL SECURITY;
CREATE INDEX events_name ON events (name);
CREATE INDEX events_at ON events USING brin (at) WITH (pages_per_range = 16, autosummarize = on);
CREATE VIEW names AS SELECT name FROM events;
CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER events_no_change BEFORE UPDATE ON events FOR EACH ROW EXECUTE FUNCTION reject();
CREATE POLICY own ON events USING (id = 1);
CREATE SEQUENCE numbers;
CREATE TYPE texts AS RANGE (subtype = text);
"""
COLUMNS = ("at date", "id bigint", "number integer DEFAULT 1", "name text NOT NULL")
CHANGES = {
    "tables": "ALTER TABLE events FORCE ROW LEVEL SECURITY",
    "columns": "ALTER TABLE events ALTER number SET DEFAULT 2",
    "constraints": "ALTER TABLE events ADD CONSTRAINT small CHECK (number < 9)",
    "indexes": "CREATE INDEX events_number ON events (number)",
    "views": "CREATE OR REPLACE VIEW names AS SELECT name FROM events WHERE id > 1",
    "functions": "CREATE OR REPLACE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
    "types": "CREATE TYPE colors AS ENUM ('red')",
    "triggers": "ALTER TABLE events DISABLE TRIGGER events_no_change",
    "policies": "ALTER POLICY own ON events USING (id = 2)",
    "sequences": "ALTER SEQUENCE numbers INCREMENT 2",
    "grants": "GRANT SELECT (name) ON events TO millrace_app",
    "default grants": "ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO millrace_app",
    "partitions": "ALTER TABLE events_2031 DISABLE ROW LEVEL SECURITY",
}


@pytest.fixture
def urls() -> Iterator[tuple[str, str]]:
    """Two databases with the same schema: another order of columns, and a partition of another year."""
    server = os.environ["MILLRACE_DATABASE_URL"]
    names = ("comparison_first", "comparison_second")
    with psycopg.connect(server, autocommit=True) as connection:
        for name in names:
            connection.execute(f"CREATE DATABASE {name}".encode())
    try:
        first, second = (make_conninfo(server, dbname=name) for name in names)
        for url, columns, year in ((first, COLUMNS, "2030"), (second, COLUMNS[::-1], "2031")):
            with psycopg.connect(url) as connection:
                connection.execute(SCHEMA.format(columns=", ".join(columns), year=year).encode())
        yield first, second
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            for name in names:
                connection.execute(f"DROP DATABASE {name}".encode())


def test_differences_are_found(urls: tuple[str, str]) -> None:
    first, second = map(compare_schemas.read_schema, urls)
    assert list(compare_schemas.find_differences(first, second)) == []
    for kind, change in CHANGES.items():
        with psycopg.connect(urls[1], autocommit=True) as connection:
            connection.execute(change.encode())
        changed = compare_schemas.read_schema(urls[1])
        found = list(compare_schemas.find_differences(second, changed))
        assert any(kind in line for line in found), (kind, found)
        second = changed


def test_a_stored_schema_is_compared(urls: tuple[str, str], tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_schemas.main(["--dump", urls[0]]) == 0
    stored = tmp_path / "schema.json"
    stored.write_text(capsys.readouterr().out)
    assert compare_schemas.main([str(stored), urls[1]]) == 0
    with psycopg.connect(urls[1], autocommit=True) as connection:
        connection.execute("DROP VIEW names")
    capsys.readouterr()
    assert compare_schemas.main([str(stored), urls[1]]) == 1
    assert "- views: names: " in capsys.readouterr().out
