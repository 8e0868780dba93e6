"""Validation of answers: correct, and bounded for schemas of any client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.responses.body import read_response
from millrace.gateway.protocols.schema_check import MAX_ANSWER_CHARACTERS, are_valid

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


NUMBERS = list(range(3000))


def check(schema: Any, *answers: str) -> bool | None:
    return are_valid(json.dumps(schema), answers)


def test_answers_are_validated() -> None:
    assert check(UNIQUE, "[1, 2]") is True
    assert check(UNIQUE, "[1, 2]", "[1, 1]") is False
    assert check(UNIQUE, "[1, 2") is False  # ended by the length limit
    either = {"if": {"required": ["a"]}, "then": {"required": ["b"]}}
    assert [check(either, text) for text in ("{}", '{"a": 1}', '{"a": 1, "b": 1}')] == [True, False, True]


def test_a_long_answer_is_validated() -> None:
    countries = [f"C{n}" for n in range(200)]
    schema = {"items": {"enum": countries}, "uniqueItems": True, "contains": {"const": "C7"}}
    assert check(schema, json.dumps(countries)) is True
    assert check({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}}, json.dumps(NUMBERS)) is True
    assert check(schema, json.dumps([*countries, "C7"])) is False


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema whose check takes 2**levels steps."""
    names = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/l0", "$defs": {**names, f"l{levels}": {"type": "integer"}}}


def evaluating(levels: int) -> dict[str, Any]:
    """Return a schema for whose unevaluated properties 2**levels references are followed before any keyword."""
    refs = [f"#/$defs/l{n}" for n in range(levels + 1)]
    names = {f"l{n}": {"$ref": refs[n + 1], "$dynamicRef": refs[n + 1]} for n in range(levels)}
    return {"unevaluatedProperties": False, "$ref": refs[0], "$defs": {**names, f"l{levels}": {}}}


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (doubling(40), "1"),
        ({"$ref": "#"}, "1"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "1"),
        ({"type": "string", "pattern": "^(a+)+$"}, '"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"'),
        ({"patternProperties": {"^(a+)+$": False}}, '{"a": 1}'),
        (evaluating(40), "{}"),
        ({"items": {"enum": [f"v{n}" for n in range(3000)]}}, json.dumps(["v2999"] * 4000)),
        ({"$defs": {"a": {"const": NUMBERS}}, "allOf": [{"$ref": "#/$defs/a"}] * 2000}, json.dumps(NUMBERS)),
        ({"anyOf": [{"const": n} for n in range(3000)]}, json.dumps("a" * 200_000)),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {f"k{n}": 1 for n in range(9000)}}}, json.dumps([1] * 9000)),
        ({"items": {"$ref": "#b"}, "$defs": {f"k{n}": {"$anchor": "b"} for n in range(1000)}}, json.dumps([1] * 9000)),
        ({"type": "array", "uniqueItems": True}, json.dumps([{"a": n} for n in range(5000)])),
        ({"type": 7}, "1"),
        ({"minimum": "a"}, "1"),
        ({"type": "string"}, json.dumps("a" * MAX_ANSWER_CHARACTERS)),
    ],
)
def test_a_schema_that_may_take_long_or_is_invalid_is_not_used(schema: Any, answer: str) -> None:
    assert check(schema, answer) is None


def test_only_schemas_with_removed_keywords_are_kept() -> None:
    def chat(schema: Any, **options: Any) -> str | None:
        format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **options}}
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": format_}
        return read_chat(json.dumps(body).encode()).checked_schema

    assert json.loads(chat(UNIQUE) or "") == UNIQUE
    assert chat({**UNIQUE, "uniqueItems": False}) is None
    assert chat(UNIQUE, strict=True) is None  # refused later
    text = {"format": {"type": "json_schema", "name": "a", "schema": UNIQUE}}
    found = read_response(json.dumps({"model": "m", "input": "Hi", "text": text}).encode()).checked_schema
    assert json.loads(found or "") == UNIQUE
