"""The types of the values of JSON schemas. Imports neither torch nor the grammar library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_SCHEMA_DEPTH = 64


def resolve(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return the schema to which a reference such as `#/$defs/NAME` refers; other schemas unchanged."""
    for _ in range(MAX_SCHEMA_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        _, _, path = str(reference).partition("#/")
        keyword, _, name = path.partition("/")
        named = definitions.get(keyword)
        if not path or not isinstance(named, dict) or name not in named:
            return schema
        schema = named[name]
    return True


def value_types(
    schema: Any, definitions: Mapping[str, Any], depth: int = 0, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the JSON types of the schema's values; empty: any type.

    Args:
        definitions: the schema with the definitions to which references refer.
        known: types by the identity of a schema, so that a definition is read once. A schema that includes itself has
            any type. Calls for several schemas with the same definitions can share it.
    """
    known = {} if known is None else known
    schema = resolve(schema, definitions)
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = frozenset()
        known[id(schema)] = _value_types(schema, definitions, depth, known)
    return known[id(schema)]


def _value_types(
    schema: dict[str, Any], definitions: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    if (types := schema.get("type")) is not None:
        return frozenset(map(str, types if isinstance(types, list) else [types]))
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(type_name, schema.get("enum", [schema.get("const")])))
    parts = [part for key in ("anyOf", "oneOf") for part in _list(schema.get(key))]
    if parts:
        found = [value_types(part, definitions, depth + 1, known) for part in parts]
        return frozenset().union(*found) if all(found) else frozenset()
    common = (value_types(part, definitions, depth + 1, known) for part in _list(schema.get("allOf")))
    return next((types for types in common if types), frozenset())


def type_name(value: Any) -> str:
    """Return the JSON type of a decoded value."""
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
