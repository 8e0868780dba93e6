"""Fields of a request body that the platform does not know: they are dropped and named, or refused as typos."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import UnknownParameters

MAX_UNKNOWN = 64  # unknown top-level fields of one body
MAX_NAMED = 24  # ignored fields that the response header and the request record name
MAX_NAME_CHARACTERS = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class StrictFields(msgspec.Struct, forbid_unknown_fields=True):
    """The base class of objects whose unknown fields are always refused, because they would change the format."""


@dataclass
class IgnoredFields:
    """The fields of one body that were accepted without effect, by path. Indices of lists are left out."""

    unknown: dict[str, None] = field(default_factory=dict)  # subject to `unknown_parameters`
    known: dict[str, None] = field(default_factory=dict)  # hints, and features that are off

    def add_unknown(self, path: str) -> None:
        if len(self.unknown) < MAX_NAMED:
            self.unknown[_clean(path)] = None

    def add_known(self, path: str) -> None:
        if len(self.known) < MAX_NAMED:
            self.known[_clean(path)] = None

    def request_fields(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of `InferenceRequest` that name the ignored fields."""
        return {"ignored": (*self.known, *self.unknown)[:MAX_NAMED], "unknown": tuple(self.unknown)}


def check_unknown(mode: UnknownParameters, unknown: Collection[str]) -> None:
    """Check that there are no unknown fields, or that they are accepted.

    Raises:
        ApiError: 400 that names the first one.
    """
    if mode == "reject" and unknown:
        name = next(iter(unknown))
        raise ApiError("unknown_parameter", f"Unknown parameter: {name!r}.", name)


def check_typos(unknown: Collection[str], known: Iterable[str]) -> None:
    """Check that no unknown top-level name is a probable typo of a known one.

    Raises:
        ApiError: 400 that names both, or there are too many unknown names.
    """
    if len(unknown) > MAX_UNKNOWN:
        raise ApiError("unknown_parameter", f"The request has more than {MAX_UNKNOWN} unknown parameters.")
    candidates = [(name, 1 if len(name) < 8 else 2) for name in known if len(name) >= 5]
    for name in unknown:
        for candidate, max_edits in candidates:
            if abs(len(name) - len(candidate)) <= max_edits and edit_distance(name, candidate) <= max_edits:
                message = f"Unknown parameter: {name!r}. Did you mean {candidate!r}?"
                raise ApiError("unknown_parameter", message, name)


def edit_distance(first: str, second: str) -> int:
    """Return the number of insertions, deletions, substitutions and swaps of neighbors between two names."""
    before: list[int] = []
    previous = list(range(len(second) + 1))
    for row, char in enumerate(first, 1):
        current = [row]
        for column, other in enumerate(second, 1):
            cost = min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (char != other))
            if row > 1 and column > 1 and char == second[column - 2] and first[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


def tolerate(value: Any, type_: Any, path: str, ignored: IgnoredFields) -> None:
    """Remove unknown fields from a decoded body, in place, and replace whole floats where integers are expected."""
    shape = _shape(type_)
    if shape is not None:
        shape.walk(value, path, ignored)


@dataclass
class _ObjectShape:
    """The fields of one struct."""

    is_strict: bool
    names: frozenset[str]
    shapes: dict[str, _Shape]
    integers: frozenset[str]

    def walk(self, value: dict[str, Any], path: str, ignored: IgnoredFields) -> None:
        for name in [name for name in value if name not in self.names]:
            if value[name] is None:
                del value[name]
            elif not self.is_strict:
                del value[name]
                ignored.add_unknown(f"{path}.{name}" if path else name)
        for name in self.integers & value.keys():
            if isinstance(number := value[name], float) and number.is_integer():
                value[name] = int(number)
        for name, shape in self.shapes.items():
            if name in value:
                shape.walk(value[name], f"{path}.{name}" if path else name, ignored)


@dataclass
class _Shape:
    """The structs that a value may contain: itself by its tag, or the items of a list."""

    tag_field: str | None = None
    objects: dict[Any, _ObjectShape] = field(default_factory=dict)
    item: _Shape | None = None

    def walk(self, value: Any, path: str, ignored: IgnoredFields) -> None:
        if isinstance(value, list):
            if self.item is not None:
                item_path = f"{path}[]"
                for item in value:
                    self.item.walk(item, item_path, ignored)
        elif isinstance(value, dict) and self.objects:
            tag = None if self.tag_field is None else value.get(self.tag_field)
            shape = self.objects.get(tag) if isinstance(tag, str | None) else None
            if shape is not None:
                shape.walk(value, path, ignored)


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
