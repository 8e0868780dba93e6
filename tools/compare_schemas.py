"""Compare the schemas of two PostgreSQL databases: `python -m tools.compare_schemas FIRST SECOND`.

A database is named by its URL, or by a file that `python -m tools.compare_schemas --dump URL` printed. The differences
are printed, and the status is 1 if there are any. Use it for a reset of the migrations (docs/guides/development.md).

Columns are compared as sets, since their order depends on the order of the migrations. The partitions of a table are
compared by their properties, since their names depend on the month in which they were created.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import LiteralString

import psycopg

Schema = dict[str, list[str]]  # kind of object -> its objects, each with its properties as text

# Each query returns the table of the object or null, its name or null, and its properties.
_QUERIES: dict[str, LiteralString] = {
    "tables": """
        SELECT c.relname, NULL, concat_ws(' ', c.relkind, c.relpersistence, 'owner', c.relowner::regrole,
            'row security', c.relrowsecurity, 'forced', c.relforcerowsecurity, 'identity', c.relreplident,
            'options', c.reloptions, 'partitioned by', pg_get_partkeydef(c.oid))
        FROM relations c WHERE c.relkind IN ('r', 'p')
    """,
    "columns": """
        SELECT c.relname, a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
            CASE WHEN a.attnotnull THEN 'not null' END, 'identity ' || nullif(a.attidentity::text, ''),
            'generated ' || nullif(a.attgenerated::text, ''), 'default ' || pg_get_expr(d.adbin, d.adrelid),
            'collation ' || nullif(a.attcollation, t.typcollation)::regcollation::text)
        FROM relations c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relkind IN ('r', 'p', 'v')
    """,
    # NOT NULL is a property of columns, and its constraint has the name that the column had at first.
    "constraints": """
        SELECT c.relname, o.conname, concat_ws(' ', pg_get_constraintdef(o.oid), 'validated', o.convalidated)
        FROM relations c JOIN pg_constraint o ON o.conrelid = c.oid WHERE o.contype <> 'n'
    """,
    "indexes": """
        SELECT c.relname, i.relname, concat_ws(' ', pg_get_indexdef(x.indexrelid), 'valid', x.indisvalid)
        FROM relations c JOIN pg_index x ON x.indrelid = c.oid JOIN pg_class i ON i.oid = x.indexrelid
    """,
    "views": """
        SELECT c.relname, NULL, concat_ws(' ', c.relkind, 'owner', c.relowner::regrole, 'options', c.reloptions,
            pg_get_viewdef(c.oid))
        FROM relations c WHERE c.relkind IN ('v', 'm')
    """,
    "functions": """
        SELECT NULL, p.oid::regprocedure::text, concat_ws(' ', 'owner', p.proowner::regrole, pg_get_functiondef(p.oid))
        FROM functions p
    """,
    "types": """
        SELECT NULL, t.typname, concat_ws(' ', t.typtype, 'owner', t.typowner::regrole, r.rngsubtype::regtype,
            r.rngcollation::regcollation,
            (SELECT string_agg(e.enumlabel, ',' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid))
        FROM pg_type t LEFT JOIN pg_range r ON r.rngtypid = t.oid
        WHERE t.typnamespace = current_schema()::regnamespace AND t.typtype IN ('d', 'e', 'r')
    """,
    "triggers": """
        SELECT c.relname, t.tgname, concat_ws(' ', pg_get_triggerdef(t.oid), 'enabled', t.tgenabled)
        FROM relations c JOIN pg_trigger t ON t.tgrelid = c.oid WHERE NOT t.tgisinternal
    """,
    "policies": """
        SELECT c.relname, p.polname, concat_ws(' ', p.polcmd, CASE WHEN p.polpermissive THEN 'permissive' END,
            'roles', (SELECT array_agg(CASE r WHEN 0 THEN 'PUBLIC' ELSE r::regrole::text END ORDER BY 1)
                FROM unnest(p.polroles) r),
            'using', pg_get_expr(p.polqual, c.oid), 'with check', pg_get_expr(p.polwithcheck, c.oid))
        FROM relations c JOIN pg_policy p ON p.polrelid = c.oid
    """,
    "sequences": """
        SELECT c.relname, NULL, concat_ws(' ', 'owner', c.relowner::regrole, s.seqtypid::regtype, s.seqstart,
            s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
            (SELECT 'of ' || d.refobjid::regclass::text || '.' || a.attname FROM pg_depend d
                JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i')))
        FROM relations c JOIN pg_sequence s ON s.seqrelid = c.oid
    """,
    "grants": """
        SELECT c.relname, NULL, GRANTS FROM relations c, aclexplode(coalesce(c.relacl,
            acldefault(CASE c.relkind WHEN 'S' THEN 's'::"char" ELSE 'r' END, c.relowner))) a
        WHERE c.relkind NOT IN ('i', 'I')
        UNION ALL
        SELECT c.relname, t.attname, GRANTS FROM relations c JOIN pg_attribute t ON t.attrelid = c.oid,
            aclexplode(t.attacl) a
        UNION ALL
        SELECT NULL, p.oid::regprocedure::text, GRANTS FROM functions p,
            aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        UNION ALL
        SELECT NULL, t.typname, GRANTS FROM pg_type t, aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a
        WHERE t.typnamespace = current_schema()::regnamespace AND t.typtype IN ('d', 'e', 'r')
        UNION ALL
        SELECT NULL, 'schema', GRANTS FROM pg_namespace n,
            aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a WHERE n.nspname = current_schema()
    """,
    "default grants": """
        SELECT NULL, d.defaclobjtype::text, GRANTS || ' by ' || d.defaclrole::regrole::text
        FROM pg_default_acl d, aclexplode(d.defaclacl) a WHERE d.defaclnamespace = current_schema()::regnamespace
    """,
    "extensions": "SELECT NULL, extname, extversion FROM pg_extension",
}
# Without the objects of extensions.
_WITH: LiteralString = """
WITH relations AS (
    SELECT * FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND NOT EXISTS (
        SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
), functions AS (
    SELECT * FROM pg_proc p WHERE p.pronamespace = current_schema()::regnamespace AND NOT EXISTS (
        SELECT FROM pg_depend d WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e')
)
"""
_GRANT: LiteralString = (
    "concat_ws(' ', a.privilege_type, CASE WHEN a.is_grantable THEN 'grantable' END, 'to',"
    " CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)"
)
_PARTITIONS: LiteralString = """
    SELECT c.relname, p.relname FROM relations c JOIN pg_inherits i ON i.inhrelid = c.oid
    JOIN pg_class p ON p.oid = i.inhparent WHERE c.relispartition AND c.relkind IN ('r', 'p')
"""


def read_schema(url: str) -> Schema:
    """Return the schema of a database."""
    with psycopg.connect(url) as connection:
        parents: dict[str, str] = dict(connection.execute(_WITH + _PARTITIONS).fetchall())
        schema: Schema = {}
        for kind, query in _QUERIES.items():
            rows = connection.execute(_WITH + query.replace("GRANTS", _GRANT)).fetchall()
            schema[kind] = sorted({_describe(parents, kind, *row) for row in rows})
        return schema


def _describe(parents: dict[str, str], kind: str, table: str | None, name: str | None, properties: str) -> str:
    """Return an object as text, without the names of partitions, those that contain them, and those of their indexes.

    PostgreSQL shortens long names of indexes, and numbers them.
    """
    if table in parents:
        if name and (kind == "indexes" or name.startswith(table)):  # also the constraint of an index
            properties, name = properties.replace(name, "NAME"), None
        properties, table = properties.replace(table, "PARTITION"), f"partitions of {parents[table]}"
    return ": ".join((".".join(part for part in (table, name) if part), _sort_parts(properties)))


def _sort_parts(properties: str) -> str:
    """Return the properties with the conditions of a check and the options of an index in alphabetical order."""
    if found := re.fullmatch(r"CHECK \(\((.*)\)\)(.*)", properties):
        conditions = re.sub(r"\(NOT \(([^=]*) = ([^=()]*)\)\)", r"(\1 <> \2)", found[1])  # as Django writes it
        if " OR " not in conditions:
            return f"CHECK {' AND '.join(sorted(conditions.split(' AND ')))}{found[2]}"
    return re.sub(r" WITH \(([^()]*)\)", lambda found: f" WITH ({', '.join(sorted(found[1].split(', ')))})", properties)


def find_differences(first: Schema, second: Schema) -> Iterator[str]:
    """Yield a line for each object, or property of an object, that only one of the schemas has."""
    for kind in _QUERIES:
        left, right = set(first[kind]), set(second[kind])
        for mark, objects in (("-", left - right), ("+", right - left)):
            for description in sorted(objects):
                yield f"{mark} {kind}: {description}"


def _load(source: str) -> Schema:
    path = Path(source)
    if not path.is_file():
        return read_schema(source)
    schema: Schema = json.loads(path.read_text(encoding="utf-8"))
    return schema


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="URL or file", help="one with --dump, otherwise two")
    parser.add_argument("--dump", action="store_true", help="print the schema of one database as JSON")
    options = parser.parse_args(arguments)
    if len(options.sources) != (1 if options.dump else 2):
        parser.error("--dump needs one database, a comparison two")
    if options.dump:
        print(json.dumps(_load(options.sources[0]), indent=1))
        return 0
    differences = list(find_differences(*map(_load, options.sources)))
    print("\n".join(differences) or "The schemas are equal.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
