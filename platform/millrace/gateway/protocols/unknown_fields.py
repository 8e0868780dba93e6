"""Fields of a request body that the platform does not know: they are dropped and named, or refused as typos."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from inference_worker.contract.schema_loosening import loosen
from inference_worker.contract.spelling import edit_distance
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import CheckedSchemas, RequestAnalysis, Tool
from millrace.gateway.protocols.foreign_limits import ForeignLimits
from tenants.keys.snapshot import UnknownParameters

MAX_UNKNOWN = 32  # unknown top-level fields of one body
MAX_NAMED = 20  # ignored fields that the response header and the request record name; the others are counted
MAX_COUNTED = 200  # unknown fields, and fields of other kinds, that are counted
MAX_CHECKED_CHARACTERS = 2**17  # total length of the schemas under which an answer is validated
MAX_NAME_CHARACTERS = 80
# Names that other servers document and that one edit or two turn into names of this API: OpenRouter, KoboldCpp,
# llama.cpp, Ollama, text-generation-webui and text-embeddings-inference.
OTHER_SERVERS_NAMES = frozenset({"images", "inputs", "mode", "models", "speculative", "top_a"})
_CONTAINERS = (dict, list)  # containers in decoded JSON
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]$-]")


class StrictFields(msgspec.Struct, forbid_unknown_fields=True):
    """The base class of objects whose unknown fields are always refused, because they would change the format."""


@dataclass
class IgnoredFields:
    """The fields of one body that were accepted without effect, by path. Indices of lists are left out."""

    unknown: dict[str, None] = field(default_factory=dict)  # subject to `unknown_parameters`
    known: dict[str, None] = field(default_factory=dict)  # hints, and features that are off
    loosened: dict[str, None] = field(default_factory=dict)  # keywords of JSON schemas that cannot be enforced
    checked: CheckedSchemas | None = None  # the schemas that have them
    _checked_characters: int = 0
    limits: ForeignLimits = field(default_factory=ForeignLimits)  # those in the unknown fields
    supported: Collection[str] = ()  # the endpoint's parameters
    _seen: set[str] = field(default_factory=set)  # unknown paths that are named or omitted

    def add_unknown(self, path: str) -> None:
        if path in self._seen or len(self.unknown) >= MAX_COUNTED:  # a field is often in each message
            return
        self._seen.add(path)
        self.unknown[_clean(path)] = None

    def add_known(self, path: str) -> None:
        if len(self.known) < MAX_COUNTED:
            self.known[_clean(path)] = None

    def enforce(self, schema: dict[str, Any], path: str, *, strict: bool | None) -> dict[str, Any]:
        """Return the schema of the answer, at `path`, without what cannot be enforced unless it is strict."""
        enforced = None if strict else self._loosen(schema, path)
        if enforced is None:
            return schema
        tools = {} if self.checked is None else self.checked.tools
        self.checked = CheckedSchemas(self._encode_checked(schema), tools)
        return enforced

    def enforce_tools(self, tools: Iterable[Tool], path: str) -> tuple[Tool, ...]:
        """Return the tools with the part of their schemas, at `path`, that can be enforced."""
        result, checked = [], {}
        for tool in tools:
            enforced = None if tool.strict else self._loosen(tool.parameters, path)
            if enforced is not None:
                checked[tool.name] = self._encode_checked(tool.parameters)
                tool = replace(tool, enforced=enforced)
            result.append(tool)
        if checked:
            self.checked = CheckedSchemas(None if self.checked is None else self.checked.answer, checked)
        return tuple(result)

    def _loosen(self, schema: dict[str, Any], path: str) -> dict[str, Any] | None:
        """Return the part of a schema that can be enforced; None: all of it can."""
        if not schema:
            return None
        loosened = loosen(schema)
        for keyword in loosened.keywords:
            name = f"{path}.{keyword}"
            self.add_known(name)
            self.loosened[_clean(name)] = None
        return loosened.schema if loosened.removed else None

    def _encode_checked(self, schema: dict[str, Any]) -> str:
        text = msgspec.json.encode(schema).decode()
        self._checked_characters += len(text)
        return text if self._checked_characters <= MAX_CHECKED_CHARACTERS else ""

    def make_analysis(self, *, parts: int = 0, unset_sampling: tuple[str, ...] = ()) -> RequestAnalysis:
        """Return the analysis of the request, with the names of the ignored fields.

        Raises:
            ApiError: 400, an unknown field limits the answer.
        """
        names = (*self.known, *self.unknown)
        count = len(names) - MAX_NAMED
        return RequestAnalysis(
            ignored=(*names[:MAX_NAMED], *((f"+{count}",) if count > 0 else ())),
            unknown=tuple(self.unknown),
            loosened=tuple(self.loosened),
            checked=self.checked,
            foreign_limits=self.limits.unmet(self.supported) if self.unknown else (),
            unset_sampling=unset_sampling,
            parts=parts,
        )


def check_unknown(mode: UnknownParameters, unknown: Collection[str]) -> None:
    """Check that there are no unknown fields, or that they are accepted.

    Raises:
        ApiError: 400 that names the first one.
    """
    if mode == "reject" and unknown:
        name = next(iter(unknown))
        raise ApiError("unknown_parameter", f"Unknown parameter: {name!r}.", name)


def check_typos(unknown: Collection[str], known: frozenset[str]) -> None:
    """Check that no unknown top-level name is a probable typo of a known one.

    Raises:
        ApiError: 400 that names both, or there are too many unknown names.
    """
    if len(unknown) > MAX_UNKNOWN:
        raise ApiError("unknown_parameter", f"The request has more than {MAX_UNKNOWN} unknown parameters.")
    for name in unknown:
        if name in OTHER_SERVERS_NAMES:
            continue
        characters = frozenset(name[:MAX_NAME_CHARACTERS])
        for candidate, max_edits, own_characters in _typo_candidates(known):
            if abs(len(name) - len(candidate)) > max_edits or len(characters ^ own_characters) > 2 * max_edits:
                continue  # an edit changes at most two characters of the set
            if edit_distance(name, candidate) <= max_edits:
                message = f"Unknown parameter: {name!r}. Did you mean {candidate!r}?"
                raise ApiError("unknown_parameter", message, name)


@cache
def _typo_candidates(known: frozenset[str]) -> list[tuple[str, int, frozenset[str]]]:
    """Return the known names that a typo may stand for, with the maximum number of edits and their characters."""
    return [(name, 1 if len(name) < 8 else 2, frozenset(name)) for name in sorted(known) if len(name) >= 5]


def tolerate(value: Any, type_: Any, path: str, ignored: IgnoredFields) -> None:
    """Remove unknown fields from a decoded body, in place, and replace whole floats where integers are expected."""
    shape = _shape(type_)
    if shape is not None and type(value) in _CONTAINERS:
        shape.walk(value, path, ignored)


@dataclass
class _ObjectShape:
    """The fields of one struct."""

    is_strict: bool
    names: frozenset[str]
    shapes: dict[str, _Shape]
    integers: frozenset[str]

    def walk(self, value: dict[str, Any], path: str, ignored: IgnoredFields) -> None:
        names = self.names
        for name in [name for name in value if name not in names]:
            if value[name] is None:
                del value[name]
            elif not self.is_strict:
                field_path = f"{path}.{name}" if path else name
                if "[]" not in field_path:
                    ignored.limits.examine_nested(field_path, value[name])
                del value[name]
                ignored.add_unknown(field_path)
        for name in self.integers:
            if isinstance(number := value.get(name), float) and number.is_integer():
                value[name] = int(number)
        for name, shape in self.shapes.items():
            if type(part := value.get(name)) in _CONTAINERS:
                shape.walk(part, f"{path}.{name}" if path else name, ignored)  # type: ignore[arg-type]  # a container


@dataclass
class _Shape:
    """The structs that a value may contain: itself by its tag, or the items of a list."""

    tag_field: str | None = None
    objects: dict[Any, _ObjectShape] = field(default_factory=dict)
    item: _Shape | None = None

    def walk(self, value: list[Any] | dict[str, Any], path: str, ignored: IgnoredFields) -> None:
        if isinstance(value, dict):
            tag = None if self.tag_field is None else value.get(self.tag_field)
            shape = self.objects.get(tag if type(tag) is str else None)
            if shape is not None:
                shape.walk(value, path, ignored)
        elif self.item is not None:
            walk, item_path = self.item.walk, f"{path}[]"
            for item in value:
                if type(item) in _CONTAINERS:
                    walk(item, item_path, ignored)


@cache
def _shape(type_: Any) -> _Shape | None:
    return _shape_of(inspect.type_info(type_))


def _shape_of(info: inspect.Type) -> _Shape | None:
    """Return the shape of a type, or None if it contains no struct."""
    shape = _Shape()
    for member in _members(info):
        if isinstance(member, inspect.StructType):
            shape.tag_field = member.tag_field
            shape.objects[member.tag] = _object_shape(member)
        elif isinstance(member, inspect.ListType):
            shape.item = _shape_of(member.item_type)
    return shape if shape.objects or shape.item else None


def _object_shape(info: inspect.StructType) -> _ObjectShape:
    shapes = {each.encode_name: shape for each in info.fields if (shape := _shape_of(each.type)) is not None}
    names = frozenset(each.encode_name for each in info.fields) | frozenset(filter(None, [info.tag_field]))
    integers = frozenset(each.encode_name for each in info.fields if _is_integer(each.type))
    return _ObjectShape(issubclass(info.cls, StrictFields), names, shapes, integers)


def _is_integer(info: inspect.Type) -> bool:
    members = list(_members(info))
    return any(isinstance(member, inspect.IntType) for member in members) and not any(
        isinstance(member, inspect.FloatType) for member in members
    )


def _members(info: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types of a union, or the type itself, without their annotations."""
    if isinstance(info, inspect.Metadata):
        yield from _members(info.type)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _members(member)
    else:
        yield info


def _clean(path: str) -> str:
    """Return a path that fits a header."""
    return _UNSAFE.sub("?", path[:MAX_NAME_CHARACTERS])
