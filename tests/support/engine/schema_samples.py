"""JSON schemas for tests of structured output: from the JSON Schema test suite, from real tools, and generated."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

DATA = Path(__file__).resolve().parents[2] / "data"
Schema = dict[str, Any]


def suite() -> list[dict[str, Any]]:
    """Return the suite's groups whose schemas are objects."""
    with gzip.open(DATA / "json_schema/groups.jsonl.gz", "rt", encoding="utf-8") as lines:
        groups = [json.loads(line) for line in lines]
    return [group for group in groups if isinstance(group["schema"], dict)]


def tools() -> list[dict[str, Any]]:
    """Return real tools: name, description and parameters."""
    with gzip.open(DATA / "traces/taubench_system_and_tools.json.gz", "rt", encoding="utf-8") as file:
        return [tool["function"] for tool in json.load(file)["tools"]]


def made_up(count: int) -> Iterator[Schema]:
    """Return schemas of objects as applications use them, the same ones each time."""
    for seed in range(count):
        yield _Maker(random.Random(seed)).top()


def errors_of(schema: Schema, text: str) -> list[str]:
    """Return the errors of the JSON `text` under `schema`, including formats."""
    kind = validator_for(schema, default=Draft202012Validator)
    return [error.message for error in kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(text))]


class _Maker:
    _NAMES = ("id", "name", "title", "price", "tags", "when", "address", "note", "status", "items", "größe", "a b")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def top(self) -> Schema:
        schema = self._object(0)
        if self._rng.random() < 0.3:
            schema["$defs"] = {"node": self._object(2)}
            schema["properties"]["node"] = {"$ref": "#/$defs/node"}
            schema["required"] = [*schema["required"], "node"]
        return schema

    def _any(self, depth: int) -> Schema:
        kinds = [self._string, self._number, self._choice, self._format]
        if depth < 3:
            kinds += [lambda: self._object(depth + 1), lambda: self._array(depth + 1), lambda: self._either(depth + 1)]
        return self._rng.choice(kinds)()

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(self._NAMES, self._rng.randint(1, 4))
        closed = self._rng.random() < 0.8
        return {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
            "additionalProperties": False if closed else {"type": "integer"},
        }

    def _array(self, depth: int) -> Schema:
        least = self._rng.randint(0, 2)
        return {"type": "array", "items": self._any(depth + 1), "minItems": least, "maxItems": least + 2}

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth + 1), {"type": "null"}]}

    def _string(self) -> Schema:
        kind = self._rng.randrange(3)
        if kind == 0:
            return {"type": "string", "minLength": self._rng.randint(0, 3), "maxLength": self._rng.randint(3, 12)}
        if kind == 1:
            return {
                "type": "string",
                "pattern": self._rng.choice(("^[A-Z]{2}[0-9]{3}$", "^(red|green)-[a-f]+$", "b{2}")),
            }
        return {"type": "string", "maxLength": 20}

    def _number(self) -> Schema:
        low = self._rng.randint(-50, 50)
        kind = self._rng.choice(("integer", "number"))
        step = {"multipleOf": 5} if kind == "integer" and self._rng.random() < 0.3 else {}
        return {"type": kind, "minimum": low, "maximum": low + 100, **step}

    def _choice(self) -> Schema:
        return self._rng.choice(({"enum": ["low", "high", 3, None]}, {"const": {"a": [1, "x"]}}, {"type": "boolean"}))

    def _format(self) -> Schema:
        named = ("date", "date-time", "time", "uuid", "email", "ipv4", "ipv6", "hostname")
        return {"type": "string", "format": self._rng.choice(named), "maxLength": 60}


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a schema with keywords that can be enforced, that cannot, and that are malformed."""
    schema: Schema = {}
    for _ in range(rng.randint(1, 3)):
        schema |= _random_keyword(rng, depth)
    if depth == 3:
        schema["$defs"] = {"x": random_schema(rng, 1), "y[z]": random_schema(rng, 1)}
    return schema


def _random_keyword(rng: random.Random, depth: int) -> Schema:
    def inner() -> Any:
        return True if rng.random() < 0.05 else random_schema(rng, depth - 1)

    names = ["a", "b", "c"]
    flat = [
        {"type": rng.choice(["string", "integer", "number", "object", "array", ["string", "null"]])},
        {"enum": rng.choice([[1, 2], ["a", "b"], [None, 1.5], [{"a": 1}]])},
        {"const": rng.choice([1, "a", None])},
        {"required": rng.sample(names, rng.randint(0, 2))},
        {rng.choice(["minProperties", "maxProperties", "minItems", "maxItems"]): rng.randint(0, 2)},
        {rng.choice(["minLength", "maxLength"]): rng.choice([0, 1, 2**31, 3.0])},
        {rng.choice(["minimum", "maximum", "exclusiveMinimum"]): rng.choice([0, 1, -5, 2**63, 1e300, 0.5])},
        {"multipleOf": rng.choice([1, 2, 0.01, 0.007, 3.14159])},
        {"pattern": rng.choice(["^a", "b$", r"a\Z", "(?=a)b", r"^\w+$"])},
        {"format": rng.choice(["path", "int64"])},
        {"$ref": rng.choice(["#/$defs/x", "#/$defs/y[z]", "#/$defs/gone"])},
        rng.choice([{"title": "x"}, {"not": {"type": "null"}}, {"uniqueItems": True}, {"if": {"type": "null"}}]),
    ]
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(flat)
    deep: list[Callable[[], Schema]] = [
        lambda: {"properties": {name: inner() for name in rng.sample(names, rng.randint(1, 3))}},
        lambda: {"additionalProperties": rng.choice([False, inner()])},
        lambda: {"patternProperties": {name: inner() for name in rng.sample(["^a", "^b", "b$", "(?=c)"], 2)}},
        lambda: {"items": inner()},
        lambda: {"prefixItems": [inner()], "items": inner()},
        lambda: {rng.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(rng.randint(1, 3))]},
    ]
    return rng.choice(deep)()


def random_instance(rng: random.Random, depth: int = 2) -> Any:
    """Return a small JSON value."""
    if depth and rng.random() < 0.6:
        parts = [random_instance(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        return parts if rng.random() < 0.3 else dict(zip("abc", parts, strict=False))
    return rng.choice([None, True, 0, 1, 2, -7, 0.5, 2**63, "", "a", "b", "ab", "cb", "a\n"])
