"""Validation of answers: correct, and bounded for schemas of any client."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import _WrappedReferencingError as WRAPPED_ERROR

from millrace.gateway.protocols.schema_check import MAX_ANSWER_CHARACTERS, all_valid
from tests.support.engine.schema_samples import random_instance, random_schema

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


NUMBERS = list(range(3000))


def check(schema: Any, *answers: str) -> bool | None:
    return all_valid([(json.dumps(schema), answer) for answer in answers])


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
        ({"type": "string", "pattern": "a(?=b)"}, '"ab"'),
        ({"patternProperties": {"(?=a)": False}}, '{"a": 1}'),
        ({"items": {"pattern": "(a|b){1,900}c"}}, json.dumps(["a" * 1000] * 1000)),
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


@pytest.mark.parametrize(
    ("schema", "answer", "expected"),
    [
        ({"pattern": "^(a+)+$"}, '"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"', False),
        ({"pattern": "b{2}"}, '"abba"', True),
        ({"pattern": "^a|b$"}, '"xb"', None),  # an anchor of one alternative
        ({"pattern": "^(?:a|b)$"}, '"b"', True),
        ({"pattern": r"^\\w+$"}, '"größe"', None),  # ECMAScript and Python differ
        ({"pattern": "^größe$"}, '"größe"', True),
        ({"pattern": "a.b"}, json.dumps("a\nb"), None),
        ({"patternProperties": {"^(a+)+$": False}}, '{"a": 1}', False),
        ({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False}, '{"ab": "x"}', True),
        ({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False}, '{"b": "x"}', False),
        ({"patternProperties": {"(?=a)": {}}, "additionalProperties": False}, '{"b": "x"}', None),
        ({"properties": {"a": {"pattern": "(?=a)"}, "b": {"type": "integer"}}}, '{"a": "a", "b": "x"}', False),
        ({"properties": {"a": {"pattern": "(?=a)"}, "b": {"type": "integer"}}}, '{"a": "a", "b": 1}', None),
        ({"not": {"pattern": "(?=a)"}}, '"a"', None),
        ({"oneOf": [{"pattern": "(?=a)"}, {"type": "string"}]}, '"a"', None),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}, "b": False}}, '{"a": 1}', None),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}, "b": False}}, '{"a": 1, "b": 1}', False),
        ({"unevaluatedProperties": False, "required": ["b"]}, '{"a": 1}', False),
        ({"format": "path"}, '"x"', True),
        ({"type": "integer", "maximum": 2**63 - 1}, "1", True),
        ({"oneOf": [{"minimum": 2}, {"type": "integer"}]}, "3", False),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "integer"}, '"x"', False),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}], "additionalItems": False},
            "[1, 2]",
            False,
        ),
    ],
)
def test_what_cannot_be_decided_is_left_out(schema: Any, answer: str, expected: bool | None) -> None:
    began = time.process_time()
    assert check(schema, answer) is expected
    assert time.process_time() - began < 1


def test_the_schemas_of_a_request_share_their_limit() -> None:
    schema = {"items": {"type": "integer", "minimum": 0}}
    pairs = [(json.dumps({**schema, "title": str(number)}), json.dumps(NUMBERS[:1500])) for number in range(4)]
    assert all_valid(pairs[:1]) is True
    assert all_valid(pairs) is None
    assert all_valid([("", "1")]) is None


def library_result(schema: Any, instance: Any) -> bool | None:
    try:
        return bool(Draft202012Validator(schema).is_valid(instance))
    except WRAPPED_ERROR:  # a reference that cannot be followed, before another keyword fails
        return None


def test_an_answer_that_is_reported_as_valid_is_valid() -> None:
    results: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for seed in range(300):
        rng = random.Random(seed)
        schema = random_schema(rng)
        for _ in range(6):
            instance = random_instance(rng)
            result = check(schema, json.dumps(instance))
            results[result] += 1
            if result is not None:
                assert library_result(schema, instance) in (result, None if result is False else True), (
                    schema,
                    instance,
                )
    assert min(results[True], results[False]) > 200
