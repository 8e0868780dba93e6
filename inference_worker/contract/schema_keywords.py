"""Keywords of JSON schemas that no grammar can enforce. Imports neither torch nor the grammar library."""

from __future__ import annotations

from typing import Any

MAX_SCHEMA_DEPTH = 64

UNENFORCEABLE = frozenset(
    (
        "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "contentEncoding", "contentMediaType",
        "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    )
)  # fmt: skip

# Keywords whose values are a schema, schemas by name, and a list of schemas.
SINGLE = ("additionalItems", "additionalProperties", "items")
NAMED = ("$defs", "definitions", "patternProperties", "properties")
LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")


def is_unenforceable(keyword: str, value: Any) -> bool:
    """Return whether the keyword constrains the output and no grammar can enforce it."""
    return keyword in UNENFORCEABLE and not (keyword == "uniqueItems" and value is False)


def without_unenforceable(schema: Any, removed: set[str], depth: int = 0) -> Any:
    """Return the schema without the keywords that cannot be enforced, whose names are added to `removed`."""
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in UNENFORCEABLE:
            if is_unenforceable(keyword, value):
                removed.add(keyword)
        elif keyword in NAMED and isinstance(value, dict):
            found[keyword] = {name: without_unenforceable(each, removed, depth + 1) for name, each in value.items()}
        elif keyword in LISTED and isinstance(value, list):
            found[keyword] = [without_unenforceable(each, removed, depth + 1) for each in value]
        elif keyword in SINGLE:
            found[keyword] = without_unenforceable(value, removed, depth + 1)
        else:
            found[keyword] = value
    return found
