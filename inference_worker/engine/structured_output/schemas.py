"""JSON Schemas that answers can be held to. Free of torch and of the grammar library.

What cannot be enforced is refused by name and place, and never passed over: an answer that has ended by itself is
valid under its schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inference_worker.contract.request import RequestRejected

MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64

Schema = dict[str, Any]

# Keywords by what they hold: a schema, schemas by name, a list of schemas.
_ONE = ("additionalItems", "additionalProperties", "items")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")

_UNSUPPORTED = frozenset(
    (
        "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "contentEncoding", "contentMediaType",
        "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    )
)  # fmt: skip
_V1 = "https://json-schema.org/v1"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

# A blank, or a new line and its indentation. Unbounded, a weak model could go on with blanks until max_tokens.
_OPTIONS = {"whitespace_pattern": " |\n[ \t]{0,32}"}

# What the library's formats leave out: days that are none, leap seconds at any time, the length of a whole name.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)"
_YEAR = "^0{0,3}[1-9]"  # few programs read a year 0
_SECOND = "^[^:]*:[0-9]{2}:[0-5]"
_FORMATS: dict[str, list[Schema]] = {
    "date": [{"pattern": _DAY}, {"pattern": _YEAR}],
    "date-time": [{"pattern": _DAY}, {"pattern": _YEAR}, {"pattern": _SECOND}],
    "time": [{"pattern": _SECOND}],
    "hostname": [{"maxLength": 253}],
}


def read_object(text: str, what: str, param: str) -> Schema:
    """Return the JSON object `text`.

    Raises:
        RequestRejected: `invalid_schema`: it is none, or too large.
    """
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestRejected("invalid_schema", f"{what} is larger than {MAX_SCHEMA_BYTES >> 10} KiB", param)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise RequestRejected("invalid_schema", f"{what} is no JSON: {str(exc)[:200]}", param) from None
    if not isinstance(value, dict):
        raise RequestRejected("invalid_schema", f"{what} must be a JSON object", param)
    return value


def enforceable(schema: Schema, param: str) -> Schema:
    """Return `schema` in the form for the grammar library.

    Raises:
        RequestRejected: `unsupported_schema`, naming the keyword and where it stands; `invalid_schema`.
    """
    made = {**_rewritten(schema, "#", 0, param), "x-guidance": _OPTIONS}
    if str(made.get("$schema", "")).rstrip("#") == _V1:  # what it has beyond 2020-12 is refused anyway
        made["$schema"] = _DRAFT_2020
    return made


def _rewritten(schema: Any, at: str, depth: int, param: str) -> Any:
    if not isinstance(schema, dict):
        return schema  # true, false; anything else is for the grammar library to refuse
    if depth > MAX_SCHEMA_DEPTH:
        message = f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise RequestRejected("unsupported_schema", message, param)
    for keyword in _refused(schema, depth):
        raise RequestRejected("unsupported_schema", f"{keyword} (at {at}) is not supported", param)
    made = dict(schema)
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            made[keyword] = _rewritten(schema[keyword], f"{at}/{keyword}", depth + 1, param)
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), dict):
            made[keyword] = {
                name: _rewritten(value, f"{at}/{keyword}/{name}", depth + 1, param)
                for name, value in schema[keyword].items()
            }
    for keyword in _LISTED:
        if isinstance(schema.get(keyword), list):
            made[keyword] = [
                _rewritten(value, f"{at}/{keyword}/{i}", depth + 1, param) for i, value in enumerate(schema[keyword])
            ]
    if (more := _FORMATS.get(str(schema.get("format")))) is not None:
        made["allOf"] = [*made.get("allOf", ()), *more]
    return made


def _refused(schema: Schema, depth: int) -> Iterator[str]:
    for keyword in schema:
        if keyword in _UNSUPPORTED and not (keyword == "uniqueItems" and schema[keyword] is False):
            yield keyword
    if depth and ("$id" in schema or "id" in schema):
        yield "$id below the top"
    if "x-guidance" in schema:
        yield "x-guidance"
    least = schema.get("minProperties", 0)
    # Names that no one keyword lists could come twice, and count once.
    if isinstance(least, int) and least > max(1, len(schema.get("required", ()))):
        yield "minProperties beyond 1 and the number of required properties"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
