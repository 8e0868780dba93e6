"""Structured output by vLLM's parameters: `structured_outputs`, and the older names with `guided_`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from inference_worker.contract.request import StructuredSpec
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.json_numbers import decode_json
from millrace.gateway.protocols.unknown_fields import IgnoredFields, StrictFields

if TYPE_CHECKING:
    from millrace.gateway.protocols.openai.parameters import Common

MAX_CHOICES = 256


class StructuredOutputs(StrictFields):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def read_guided(body: Common, ignored: IgnoredFields) -> StructuredSpec | None:
    """Return the structured output that vLLM's parameters request, if any.

    Raises:
        ApiError: 400, there is more than one format, or a format is invalid.
    """
    outputs: StructuredOutputs = body.structured_outputs or StructuredOutputs()
    formats: dict[str, Any] = {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
        "structured_outputs.json": outputs.json,
        "structured_outputs.regex": outputs.regex,
        "structured_outputs.choice": outputs.choice,
        "structured_outputs.grammar": outputs.grammar,
        "structured_outputs.json_object": outputs.json_object or None,
    }
    given = [(param, value) for param, value in formats.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise invalid(given[1][0], f"{given[0][0]} and {given[1][0]} cannot be combined.")
    (param, value), *_ = given
    if param.endswith("json_object"):
        return StructuredSpec("json_object", param=param)
    if param.endswith("regex"):
        return StructuredSpec("regex", value, param)
    if param.endswith("grammar"):
        return StructuredSpec("grammar", value, param)
    if param.endswith("choice"):
        return StructuredSpec("grammar", _choices(param, value), param)
    return StructuredSpec("json_schema", _read_schema(value, param, ignored), param)


def _read_schema(value: dict[str, Any] | str, param: str, ignored: IgnoredFields) -> str:
    """Return the text of the schema that can be enforced. The worker rejects a text that is no schema."""
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = decode_json(value)
        except (msgspec.DecodeError, RecursionError):
            return value
        if not isinstance(schema, dict):
            return value
    return msgspec.json.encode(ignored.enforce(schema, param, strict=False)).decode()


def _choices(param: str, choices: Sequence[str]) -> str:
    """Return the grammar of a choice between texts."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise invalid(param, f"{param} must have 1 to {MAX_CHOICES} texts, none of which is empty.")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
