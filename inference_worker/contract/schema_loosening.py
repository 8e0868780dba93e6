"""The part of a JSON schema that a grammar can enforce.

`loosen` walks over a schema with a table of keywords and their supported values. It returns a schema without the
others, and names them. The result accepts everything that the schema accepts. The grammar library compiles the result
unless no value satisfies it or it is too complex.

References are rewritten: the result has `$defs` with the definitions that are used. `oneOf` becomes `anyOf`, which is
the same if its schemas exclude each other. Annotations are left out. The cost is bounded by `MAX_STEPS`. Imports
neither torch nor the grammar library.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from inference_worker.contract.schema_keywords import type_name
from inference_worker.contract.schema_patterns import are_disjoint_names, is_supported_pattern

MAX_STEPS = 200_000  # visited schemas, values and keywords
MAX_NESTING = 100  # levels of JSON in the result; the grammar library reads 128
MAX_BOUND = 2**62  # greatest absolute value of a number's bound
MAX_LENGTH = 2**31 - 1  # greatest length of strings, arrays and objects
MAX_MULTIPLE = 10_000  # digits of `multipleOf` without its decimal point, as a number
MAX_POINTER_CHARACTERS = 256
_MAX_HOPS = 8  # references and groups that a comparison of schemas follows

Schema = dict[str, Any]

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)  # fmt: skip
# Keywords that constrain the output and that no grammar can enforce.
UNENFORCEABLE = frozenset(
    (
        "$dynamicRef", "$recursiveRef", "contains", "contentEncoding", "contentMediaType", "contentSchema",
        "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if",
        "maxContains", "minContains", "not", "propertyDependencies", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems", "x-guidance",
    )
)  # fmt: skip
_DIALECTS = re.compile(
    r"https?://json-schema\.org/(draft-0[67]/schema|draft/(2019-09|2020-12)/schema|v1(/2026)?|schema)#?"
)
_WITHOUT_SIBLINGS = re.compile(r"https?://json-schema\.org/draft-0[4-7]/.*")  # drafts where a $ref has no siblings
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_GROUPS = ("allOf", "anyOf", "oneOf")
_STRUCTURE = frozenset({"additionalItems", "items", "prefixItems"})
_ITEMS = "\0items"  # the items of arrays, among names of properties
_ALL = "\0all"  # all names of properties
_UNSUPPORTED, _MALFORMED, _UNCONSTRAINED = object(), object(), object()


@dataclass(frozen=True, slots=True)
class Removed:
    """A keyword that was removed from the schema at a JSON pointer."""

    keyword: str
    pointer: str
    is_malformed: bool = False
    value: str = ""

    @property
    def message(self) -> str:
        problem = "has an invalid value" if self.is_malformed else "is not supported"
        value = f" {self.value}" if self.value else ""
        return f"{self.keyword}{value} (at {self.pointer}) {problem}"


@dataclass(frozen=True, slots=True)
class Loosened:
    """A schema that can be enforced, and what it lacks."""

    schema: Schema
    removed: tuple[Removed, ...]

    @property
    def keywords(self) -> list[str]:
        return sorted({removed.keyword for removed in self.removed})


class _TooLarge(Exception):
    """The walk would take too long."""


def loosen(schema: Schema) -> Loosened:
    """Return the part of a schema that can be enforced. The schema is unchanged."""
    walk = _Walk(schema)
    try:
        return Loosened(walk.run(), tuple(walk.removed))
    except (_TooLarge, RecursionError):
        return Loosened({}, (Removed("schema size", "#"),))


@dataclass(slots=True)
class _Reference:
    """A reference in the result."""

    container: Schema  # its schema in the result
    pointer: str
    keyword: str
    source: str  # definition that contains it
    target: str
    is_joined: bool  # the library intersects its target with another schema
    is_direct: bool  # it is about the same value as its definition


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a schema."""

    pointer: str
    nesting: int
    definition: str = ""
    joined: bool = False  # the schema is intersected with another one
    shared: bool = False  # the schemas of its properties and items are, too
    direct: bool = True
    foreign: bool = False  # below another $id, where references have another base

    def child(self, *names: object, levels: int, **changes: Any) -> _Place:
        pointer = "/".join([self.pointer, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])
        fields = {"joined": self.joined, "shared": self.shared, "direct": self.direct, "foreign": self.foreign}
        return _Place(pointer, self.nesting + levels, self.definition, **(fields | changes))


@dataclass
class _Walk:
    root: Schema
    removed: list[Removed] = field(default_factory=list)
    _steps: int = 0
    _targets: dict[tuple[str, bool, bool], str] = field(default_factory=dict)  # pointer, joined, shared -> definition
    _pending: list[tuple[str, Any, _Place]] = field(default_factory=list)
    _references: list[_Reference] = field(default_factory=list)
    _anchors: dict[str, tuple[str, Any]] | None = None

    def run(self) -> Schema:
        dialect = self.root.get("$schema")
        self._has_siblings = not _WITHOUT_SIBLINGS.fullmatch(str(dialect))
        if dialect is not None and not _DIALECTS.fullmatch(str(dialect)):
            self._remove("$schema", _Place("#", 0), dialect)
        body = self._schema(self.root, _Place("#", 1))
        result: Schema = body if isinstance(body, dict) else {}
        definitions: dict[str, Any] = {}
        while self._pending:
            name, target, place = self._pending.pop()
            definitions[name] = self._schema(target, place)
        self._remove_circular_references()
        return {**result, "$defs": definitions} if definitions else result

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooLarge

    def _remove(self, keyword: str, place: _Place, value: Any = None, *, is_malformed: bool = False) -> None:
        text = ""
        if isinstance(value, str):
            text = "with look-around" if keyword == "pattern" and _LOOK_AROUND.search(value) else repr(value[:80])
        self.removed.append(Removed(keyword, place.pointer[:MAX_POINTER_CHARACTERS], is_malformed, text))

    # One schema.

    def _schema(self, schema: Any, place: _Place) -> Any:
        self._count()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._remove(place.pointer.rpartition("/")[2], place, is_malformed=True)
            return {}
        if place.nesting > MAX_NESTING:
            if schema:
                self._remove(f"nesting beyond {MAX_NESTING} levels", place)
            return {}
        self._count(len(schema))
        if place.pointer != "#" and isinstance(schema.get("$id"), str) and not schema["$id"].startswith("#"):
            self._remove("$id", place)
            place = place.child(levels=0, foreign=True)
        if "$ref" in schema and not self._has_siblings:
            schema = {"$ref": schema["$ref"]}
        result: Schema = {}
        for keyword, value in schema.items():
            if (check := _VALUES.get(keyword)) is not None:
                supported = check(value, schema)
                if supported is _UNSUPPORTED or supported is _MALFORMED:
                    self._remove(keyword, place, value, is_malformed=supported is _MALFORMED)
                elif supported is not _UNCONSTRAINED:
                    result[keyword] = supported
            elif keyword in UNENFORCEABLE and not (keyword == "uniqueItems" and value is False):
                self._remove(keyword, place)
        self._combine(schema, result, place)
        return result

    def _combine(self, schema: Schema, result: Schema, place: _Place) -> None:
        """Add the keywords whose values contain schemas."""
        groups = {keyword: self._list(schema, keyword, place) for keyword in _GROUPS if keyword in schema}
        reference = self._resolve_reference(schema, place)
        # Each member is about the same value. `anyOf` and `oneOf` are one member each, as one of their schemas applies.
        members: dict[Any, frozenset[str]] = {"": self._names(schema, own=True)}
        if reference is not None:
            members["$ref"] = self._names(reference[1])
        for keyword, parts in groups.items():
            for number, part in enumerate(parts):
                key = (keyword, number) if keyword == "allOf" else keyword
                members[key] = members.get(key, frozenset()) | self._names(part)
        # The schema itself is no member if it only contains the others.
        own = any(keyword in _VALUES or keyword in _CONTAINERS for keyword in schema)
        joined = place.joined or len(members) > (1 if own else 2)
        counts = Counter(name for names in members.values() for name in names)

        def is_shared(key: Any) -> bool:
            """Return whether another member constrains a property that this member constrains."""
            names = members[key]
            others = {name for name, count in counts.items() if count > (name in names)}
            return place.shared or bool(names & others or (names and _ALL in others) or (others and _ALL in names))

        self._add_properties(schema, result, place.child(levels=0, joined=joined), shared=is_shared(""))
        self._add_items(schema, result, place, shared=is_shared(""))
        alternatives: list[list[Any]] = []
        for keyword, parts in groups.items():
            converted = []
            for number, part in enumerate(parts):
                key = (keyword, number) if keyword == "allOf" else keyword
                child = place.child(keyword, number, levels=2, joined=joined, shared=is_shared(key))
                converted.append(self._schema(part, child))
            if keyword == "oneOf" and not self._exclude_each_other(parts):
                self._remove(keyword, place)
            if keyword == "allOf":
                result["allOf"] = converted
            elif converted:
                alternatives.append(converted)
        if alternatives:
            result["anyOf"], *more = alternatives
            if more:
                result["allOf"] = [*result.get("allOf", ()), *({"anyOf": parts} for parts in more)]
        if reference is not None:
            self._add_reference(reference, result, place, joined=joined, shared=is_shared("$ref"))
        if not result.get("allOf", True):
            del result["allOf"]

    def _list(self, schema: Schema, keyword: str, place: _Place) -> list[Any]:
        value = schema[keyword]
        if isinstance(value, list) and value:
            return value
        self._remove(keyword, place, is_malformed=True)
        return []

    def _add_properties(self, schema: Schema, result: Schema, place: _Place, *, shared: bool) -> None:
        inner = {"joined": shared, "shared": shared, "direct": False}
        listed = schema.get("properties", {})
        if isinstance(listed, dict):
            if listed:
                result["properties"] = {
                    name: self._schema(part, place.child("properties", name, levels=2, **inner))
                    for name, part in listed.items()
                }
        else:
            self._remove("properties", place, is_malformed=True)
        is_open = False
        if (patterns := schema.get("patternProperties")) is not None:
            if not isinstance(patterns, dict):
                self._remove("patternProperties", place, is_malformed=True)
                is_open = True
            elif place.joined or not are_disjoint_names(list(patterns)):
                self._remove("patternProperties", place)
                is_open = True
            elif patterns:
                result["patternProperties"] = {
                    name: self._schema(part, place.child("patternProperties", name, levels=2, **inner))
                    for name, part in patterns.items()
                }
        if "additionalProperties" in schema:
            more = schema["additionalProperties"]
            if is_open and more is not True:
                self._remove("additionalProperties", place)
            else:
                child = place.child("additionalProperties", levels=1, **inner)
                result["additionalProperties"] = self._schema(more, child)
        required = set(result.get("required", ()))
        for keyword in ("minProperties", "maxProperties"):
            if (count := result.get(keyword)) is None:
                continue
            # The library counts only names that are required, and one more that no keyword lists.
            is_counted = set(result.get("properties", ())) <= required and not place.joined
            if not is_counted or (keyword == "minProperties" and count > max(1, len(required))):
                del result[keyword]
                if keyword == "maxProperties" or count > 0:
                    self._remove(keyword, place)

    def _add_items(self, schema: Schema, result: Schema, place: _Place, *, shared: bool) -> None:
        inner = {"joined": shared, "shared": shared, "direct": False}
        first, rest, name = schema.get("prefixItems"), schema.get("items"), "items"
        if isinstance(rest, list):  # the form of older drafts
            first, rest, name = rest, schema.get("additionalItems"), "additionalItems"
        if first is not None:
            keyword = "prefixItems" if name == "items" else "items"
            if not isinstance(first, list):
                self._remove(keyword, place, is_malformed=True)
                return
            result["prefixItems"] = [
                self._schema(part, place.child(keyword, number, levels=2, **inner)) for number, part in enumerate(first)
            ]
        if rest is not None:
            result["items"] = self._schema(rest, place.child(name, levels=1, **inner))

    # References.

    def _resolve_reference(self, schema: Schema, place: _Place) -> tuple[str, Any] | None:
        """Return the pointer and the schema of a reference; None if there is none, or it cannot be followed."""
        if "$ref" not in schema:
            return None
        found = None if place.foreign else self._resolve(schema["$ref"])
        if found is None:
            self._remove("$ref", place, schema["$ref"])
        return found

    def _resolve(self, reference: Any) -> tuple[str, Any] | None:
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if base and base != str(self.root.get("$id", "")).partition("#")[0]:
            return None
        value: Any = self.root
        if fragment and not fragment.startswith("/"):
            return self._find_anchor(fragment)
        for part in fragment.split("/")[1:]:
            self._count()
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 7:
                if int(name) >= len(value):
                    return None
                value = value[int(name)]
            else:
                return None
        return (f"#{fragment}", value) if isinstance(value, dict | bool) else None

    def _find_anchor(self, name: str) -> tuple[str, Any] | None:
        if self._anchors is None:
            self._anchors = {}
            pending: list[tuple[str, Any]] = [("#", self.root)]
            while pending:
                pointer, value = pending.pop()
                self._count()
                if isinstance(value, dict) and isinstance(value.get("$anchor"), str):
                    self._anchors[value["$anchor"]] = pointer, value
                items: Iterable[tuple[Any, Any]] = ()
                if isinstance(value, dict):
                    items = value.items()
                elif isinstance(value, list):
                    items = enumerate(value)
                pending += [(f"{pointer}/{key}", item) for key, item in items if isinstance(item, dict | list)]
        return self._anchors.get(name)

    def _add_reference(
        self, reference: tuple[str, Any], result: Schema, place: _Place, *, joined: bool, shared: bool
    ) -> None:
        pointer, target = reference
        key = pointer, joined, shared
        if key not in self._targets:
            name = self._targets[key] = f"r{len(self._targets)}"
            self._pending.append((name, target, _Place(pointer, 2, name, joined, shared)))
        name = self._targets[key]
        result["$ref"] = f"#/$defs/{name}"
        self._references.append(_Reference(result, place.pointer, "$ref", place.definition, name, joined, place.direct))

    def _remove_circular_references(self) -> None:
        """Remove references through which a value would have to be valid under its own schema.

        The library also follows references that it intersects with another schema, so they must end.
        """
        for kind in ("is_direct", "is_joined"):
            edges: defaultdict[str, list[str]] = defaultdict(list)
            chosen = [each for each in self._references if "$ref" in each.container and getattr(each, kind)]
            for each in chosen:
                edges[each.source].append(each.target)
            components = _components(edges)
            for each in chosen:
                if components[each.source] == components[each.target]:
                    del each.container["$ref"]
                    self.removed.append(Removed("$ref", each.pointer))

    # Comparison of schemas.

    def _names(self, schema: Any, hops: int = 0, *, own: bool = False) -> frozenset[str]:
        """Return the names of the properties that a schema constrains. `own`: without those of its groups."""
        self._count()
        if not isinstance(schema, dict):
            return frozenset()
        if hops > _MAX_HOPS or "patternProperties" in schema or schema.get("additionalProperties", True) is not True:
            return frozenset({_ALL})
        listed = schema.get("properties")
        names = set(listed) if isinstance(listed, dict) else set()
        self._count(len(names))
        if not _STRUCTURE.isdisjoint(schema):
            names.add(_ITEMS)
        if not own:
            for keyword in _GROUPS:
                for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
                    names |= self._names(part, hops + 1)
            if "$ref" in schema and (found := self._resolve(schema["$ref"])) is not None:
                names |= self._names(found[1], hops + 1)
        return frozenset(names)

    def _exclude_each_other(self, parts: list[Any]) -> bool:
        return all(self._are_disjoint(first, second) for first, second in combinations(parts, 2))

    def _are_disjoint(self, first: Any, second: Any, hops: int = 0) -> bool:
        """Return whether no value is valid under both schemas; False if that is not obvious."""
        self._count()
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or hops > _MAX_HOPS:
            return False
        for one, other in ((first, second), (second, first)):
            for keyword in ("anyOf", "oneOf"):
                parts = one.get(keyword)
                if isinstance(parts, list) and parts and self._all_disjoint(parts, other, hops):
                    return True
            parts = one.get("allOf")
            if isinstance(parts, list) and any(self._are_disjoint(part, other, hops + 1) for part in parts):
                return True
            if "$ref" in one and (found := self._resolve(one["$ref"])) is not None:
                if self._are_disjoint(found[1], other, hops + 1):
                    return True
                if not self._has_siblings:
                    return False
        return self._have_different_values(first, second) or self._have_different_properties(first, second, hops)

    def _all_disjoint(self, parts: list[Any], other: Schema, hops: int) -> bool:
        return all(self._are_disjoint(part, other, hops + 1) for part in parts)

    def _have_different_values(self, first: Schema, second: Schema) -> bool:
        values = [_values(schema) for schema in (first, second)]
        if values[0] is not None and values[1] is not None:
            self._count(len(values[0]) * len(values[1]))
            return not any(_are_equal(one, other) for one in values[0] for other in values[1])
        first_types, second_types = _types(first), _types(second)
        return first_types is not None and second_types is not None and first_types.isdisjoint(second_types)

    def _have_different_properties(self, first: Schema, second: Schema, hops: int) -> bool:
        """Return whether an object needs a property that cannot be valid under both schemas."""
        if not all(_types(schema) == frozenset({"object"}) for schema in (first, second)):
            return False
        names = {name for schema in (first, second) for name in _strings(schema.get("required"))}
        return any(
            self._are_disjoint(_property(first, name), _property(second, name), hops + 1) for name in sorted(names)
        )


def _components(edges: Mapping[str, list[str]]) -> dict[str, int]:
    """Return the number of the strongly connected component of each node of a graph."""
    order: list[str] = []
    seen: set[str] = set()
    for start in edges:
        pending = [(start, False)]
        while pending:
            node, is_done = pending.pop()
            if is_done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                pending.append((node, True))
                pending += [(target, False) for target in edges.get(node, ()) if target not in seen]
    backward: defaultdict[str, list[str]] = defaultdict(list)
    for source, targets in edges.items():
        for target in targets:
            backward[target].append(source)
    components: dict[str, int] = {}
    for number, root in enumerate(reversed(order)):
        nodes = [root]
        while nodes:
            node = nodes.pop()
            if node not in components:
                components[node] = number
                nodes += backward[node]
    return components


def _types(schema: Schema) -> frozenset[str] | None:
    """Return the types of a schema's values, where numbers include integers; None: any type."""
    types = schema.get("type")
    named = [types] if isinstance(types, str) else types if isinstance(types, list) else None
    values = _values(schema)
    if values is not None:
        found = frozenset("number" if isinstance(each, float) else type_name(each) for each in values)
    elif named and all(isinstance(each, str) and each in TYPES for each in named):
        found = frozenset(named)
    else:
        return None
    return found | {"integer"} if "number" in found else found


def _values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two values may be equal. Booleans are no numbers."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list | dict) and isinstance(second, list | dict):
        return True
    return bool(first == second)


def _property(schema: Schema, name: str) -> Any:
    listed = schema.get("properties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _strings(value: Any) -> Iterator[str]:
    return (each for each in value if isinstance(each, str)) if isinstance(value, list) else iter(())


# The table of keywords: each function returns the supported form of a value, `_UNSUPPORTED` or `_MALFORMED`, or
# `_UNCONSTRAINED` for a value that does not constrain anything.


def _read_type(value: Any, _: Schema) -> Any:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not types or not all(isinstance(each, str) and each in TYPES for each in types):
        return _MALFORMED
    return value if isinstance(value, str) else list(dict.fromkeys(types))


def _read_enum(value: Any, _: Schema) -> Any:
    if not isinstance(value, list) or not value:
        return _MALFORMED
    return value if _is_flat(value) else _UNSUPPORTED


def _read_const(value: Any, _: Schema) -> Any:
    return value if _is_flat(value) else _UNSUPPORTED


def _is_flat(value: Any, levels: int = 16) -> bool:
    """Return whether a value has few levels."""
    if isinstance(value, list | dict):
        parts = value if isinstance(value, list) else value.values()
        return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)
    return True


def _read_required(value: Any, _: Schema) -> Any:
    if value is False:  # the form of draft 3
        return _UNCONSTRAINED
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return _MALFORMED
    return list(dict.fromkeys(value)) or _UNCONSTRAINED


def _read_length(value: Any, _: Schema) -> Any:
    number = _read_whole(value)
    if number is None or number < 0:
        return _MALFORMED
    return number if number <= MAX_LENGTH else _UNSUPPORTED


def _read_bound(value: Any, _: Schema) -> Any:
    if value is False:  # the form of draft 4
        return _UNCONSTRAINED
    if value is True or not isinstance(value, int | float):
        return _MALFORMED
    if (number := _read_whole(value)) is not None:
        return number if abs(number) <= MAX_BOUND else _UNSUPPORTED
    exponent = Decimal(repr(value)).as_tuple().exponent
    is_supported = abs(value) <= MAX_BOUND and isinstance(exponent, int) and exponent >= -20
    return value if is_supported else _UNSUPPORTED


def _read_multiple(value: Any, _: Schema) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return _MALFORMED
    if value > MAX_BOUND:
        return _UNSUPPORTED
    digits = float(value)
    for _decimals in range(7):
        if digits.is_integer():
            is_supported = digits <= MAX_MULTIPLE or digits in (100_000, 1_000_000)
            return (_read_whole(value) or value) if is_supported else _UNSUPPORTED
        digits *= 10  # as the library does, with the same rounding
    return _UNSUPPORTED


def _read_pattern(value: Any, _: Schema) -> Any:
    if not isinstance(value, str):
        return _MALFORMED
    return value if is_supported_pattern(value) else _UNSUPPORTED


def _read_format(value: Any, schema: Schema) -> Any:
    if isinstance(value, str) and value in FORMATS:
        return value
    types = _types(schema)
    if types is not None and "string" not in types:
        return _UNCONSTRAINED  # formats of numbers, as in OpenAPI
    return _UNSUPPORTED if isinstance(value, str) else _MALFORMED


def _read_whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else None
    return value


_VALUES: Mapping[str, Callable[[Any, Schema], Any]] = {
    "type": _read_type,
    "enum": _read_enum,
    "const": _read_const,
    "required": _read_required,
    "minProperties": _read_length,
    "maxProperties": _read_length,
    "minItems": _read_length,
    "maxItems": _read_length,
    "minLength": _read_length,
    "maxLength": _read_length,
    "minimum": _read_bound,
    "maximum": _read_bound,
    "exclusiveMinimum": _read_bound,
    "exclusiveMaximum": _read_bound,
    "multipleOf": _read_multiple,
    "pattern": _read_pattern,
    "format": _read_format,
}
# Keywords of a loosened schema whose values are a schema, schemas by name, and a list of schemas.
SINGLE = frozenset({"additionalProperties", "items"})
NAMED = frozenset({"$defs", "patternProperties", "properties"})
LISTED = frozenset({"allOf", "anyOf", "prefixItems"})
_CONTAINERS = frozenset(
    {"additionalItems", "additionalProperties", "items", "patternProperties", "prefixItems", "properties"}
)
