"""JSON Schemas for structured output. Imports neither torch nor the grammar library.

An unsupported keyword is rejected with its name and place, never ignored. So a complete output is valid under its
schema.
"""

from __future__ import annotations

import json
from typing import Any

from inference_worker.contract.request import RequestRejected
from inference_worker.contract.schema_loosening import LISTED, NAMED, SINGLE, Schema, loosen

MAX_SCHEMA_BYTES = 256 << 10

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
    loosened = loosen(schema)
    for removed in loosened.removed:
        code = "invalid_schema" if removed.is_malformed else "unsupported_schema"
        raise RequestRejected(code, removed.message, param)
    return {**_add_format_rules(loosened.schema), "x-guidance": _OPTIONS}


def _add_format_rules(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    completed = dict(schema)
    for keyword in SINGLE & schema.keys():
        completed[keyword] = _add_format_rules(schema[keyword])
    for keyword in NAMED & schema.keys():
        completed[keyword] = {name: _add_format_rules(part) for name, part in schema[keyword].items()}
    for keyword in LISTED & schema.keys():
        completed[keyword] = [_add_format_rules(part) for part in schema[keyword]]
    if (more := _FORMATS.get(str(schema.get("format")))) is not None:
        completed["allOf"] = [*completed.get("allOf", ()), *more]
    return completed


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
