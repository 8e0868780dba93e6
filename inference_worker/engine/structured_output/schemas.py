"""JSON Schemas for structured output. Imports neither torch nor the grammar library.

An unsupported keyword is rejected with its name and place, never ignored. So a complete output is valid under its
schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inference_worker.contract.request import RequestRejected
from inference_worker.contract.schema_keywords import LISTED, MAX_SCHEMA_DEPTH, NAMED, SINGLE, is_unenforceable

MAX_SCHEMA_BYTES = 256 << 10

Schema = dict[str, Any]

_V1 = "https://json-schema.org/v1"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

# A blank, or a line break with indentation. It is bounded, so that a weak model cannot write blanks until max_tokens.
_OPTIONS = {"whitespace_pattern": " |\n[ \t]{0,32}"}

# Additions to the library's formats: invalid days, leap seconds at any time, the length of a host name.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)"
_YEAR = "^0{0,3}[1-9]"  # few programs accept a year 0
_SECOND = "^[^:]*:[0-9]{2}:[0-5]"
_FORMATS: dict[str, list[Schema]] = {
    "date": [{"pattern": _DAY}, {"pattern": _YEAR}],
    "date-time": [{"pattern": _DAY}, {"pattern": _YEAR}, {"pattern": _SECOND}],
    "time": [{"pattern": _SECOND}],
    "hostname": [{"maxLength": 253}],
}


def read_object(text: str, subject: str, param: str) -> Schema:
    """Return the JSON object in `text`.

    Raises:
        RequestRejected: `invalid_schema`: the text is not a JSON object or is too large.
    """
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestRejected("invalid_schema", f"{subject} is larger than {MAX_SCHEMA_BYTES >> 10} KiB", param)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise RequestRejected("invalid_schema", f"{subject} is not valid JSON: {str(exc)[:200]}", param) from None
    if not isinstance(value, dict):
        raise RequestRejected("invalid_schema", f"{subject} must be a JSON object", param)
    return value


def enforceable(schema: Schema, param: str) -> Schema:
    """Return `schema` in the form for the grammar library.

    Raises:
        RequestRejected: `unsupported_schema` with the keyword and its place, or `invalid_schema`.
    """
    rewritten = {**_rewritten(schema, "#", 0, param), "x-guidance": _OPTIONS}
    if str(rewritten.get("$schema", "")).rstrip("#") == _V1:  # its additions to 2020-12 are rejected below
        rewritten["$schema"] = _DRAFT_2020
    return rewritten


def _rewritten(schema: Any, pointer: str, depth: int, param: str) -> Any:
    if not isinstance(schema, dict):
        return schema  # true or false; the grammar library rejects anything else
    if depth > MAX_SCHEMA_DEPTH:
        message = f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise RequestRejected("unsupported_schema", message, param)
    for keyword in _refused(schema, depth):
        raise RequestRejected("unsupported_schema", f"{keyword} (at {pointer}) is not supported", param)
    rewritten = dict(schema)
    for keyword in SINGLE:
        if isinstance(schema.get(keyword), dict):
            rewritten[keyword] = _rewritten(schema[keyword], f"{pointer}/{keyword}", depth + 1, param)
    for keyword in NAMED:
        if isinstance(schema.get(keyword), dict):
            rewritten[keyword] = {
                name: _rewritten(value, f"{pointer}/{keyword}/{name}", depth + 1, param)
                for name, value in schema[keyword].items()
            }
    for keyword in LISTED:
        if isinstance(schema.get(keyword), list):
            rewritten[keyword] = [
                _rewritten(value, f"{pointer}/{keyword}/{i}", depth + 1, param)
                for i, value in enumerate(schema[keyword])
            ]
    if (more := _FORMATS.get(str(schema.get("format")))) is not None:
        rewritten["allOf"] = [*rewritten.get("allOf", ()), *more]
    return rewritten


def _refused(schema: Schema, depth: int) -> Iterator[str]:
    for keyword in schema:
        if is_unenforceable(keyword, schema[keyword]):
            yield keyword
    if depth and ("$id" in schema or "id" in schema):
        yield "$id below the top"
    if "x-guidance" in schema:
        yield "x-guidance"
    least = schema.get("minProperties", 0)
    # Names that no keyword lists could occur twice, and count once.
    if isinstance(least, int) and least > max(1, len(schema.get("required", ()))):
        yield "minProperties beyond 1 and the number of required properties"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
