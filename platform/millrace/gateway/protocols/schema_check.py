"""Validation of finished answers under JSON schemas whose keywords no grammar can enforce.

The cost is bounded. A schema with regular expressions is not used, since Python's may take exponential time. A schema
with unevaluatedItems or unevaluatedProperties is not used, since the library follows references for them without a
limit. The number of applied keywords, weighted by the sizes of their values, is limited. References to other documents
are never fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jsonschema import Draft202012Validator, ValidationError, validators
from referencing import Registry

MAX_STEPS = 10_000  # applied keywords of one request
MAX_SCHEMA_CHARACTERS = 2**17
MAX_ANSWER_CHARACTERS = 2**18
_UNBOUNDED_KEYWORDS = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
# Compared or printed values, and items or schemas that are looked through, that take as long as one keyword.
_SIZE_OF_STEP = 64
_SCHEMAS_OF_STEP = 16
_CHARACTERS_OF_VALUE = 16
_Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class _TooManySteps(Exception):
    """The check would take too long."""


def are_valid(schema: str, answers: Sequence[str]) -> bool | None:
    """Return whether all answers are JSON that is valid under the schema; None if that cannot be determined."""
    if len(schema) > MAX_SCHEMA_CHARACTERS or sum(map(len, answers)) > MAX_ANSWER_CHARACTERS:
        return None
    if any(f'"{keyword}"' in schema for keyword in _UNBOUNDED_KEYWORDS):
        return None
    try:
        decoded = msgspec.json.decode(schema)
        values = [msgspec.json.decode(answer) for answer in answers]
        validator = _Steps(decoded).validator_class()(decoded, registry=Registry())
        return all(validator.is_valid(value) for value in values)
    except msgspec.DecodeError:  # an answer that the length limit has ended
        return False
    except Exception:  # noqa: BLE001  (too many steps; and invalid schemas raise errors of many types)
        return None


class _Steps:
    """The number of steps of one check. The schema and the answers must not be freed before it."""

    def __init__(self, schema: Any) -> None:
        self._count = 0
        self._sizes: dict[int, int] = {}  # of lists and objects, by identity
        self._max_keys = 0  # of an object in the schema
        self._schema_size = self._size(schema)
        self._has_ids = "$id" in str(schema)

    def validator_class(self) -> Any:
        """Return a validator class that raises `_TooManySteps` after `MAX_STEPS` steps."""
        keywords: Mapping[str, _Keyword] = Draft202012Validator.VALIDATORS
        return validators.extend(
            Draft202012Validator, {name: self._bound_check(name, check) for name, check in keywords.items()}
        )

    def _bound_check(self, name: str, check: _Keyword) -> _Keyword:
        def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError] | None:
            self._count += 1 + self._cost(name, value, instance)
            if self._count > MAX_STEPS:
                raise _TooManySteps
            return check(validator, value, instance, schema)

        return apply

    def _cost(self, name: str, value: Any, instance: Any) -> int:
        """Return the further steps of a keyword: it compares or prints its value and the instance."""
        size = self._size(instance)
        steps = (size + self._size(value)) // _SIZE_OF_STEP
        if isinstance(instance, list | dict) and isinstance(value, dict):
            steps += len(instance) * len(value) // _SIZE_OF_STEP
        if name == "uniqueItems" and isinstance(instance, list):
            steps += len(instance) * size // _SCHEMAS_OF_STEP
        if name in ("$ref", "$dynamicRef"):
            # A reference that is no path from the root looks through the whole schema.
            is_path = str(value).startswith("#/") and not self._has_ids
            steps += (self._max_keys if is_path else self._schema_size) // _SCHEMAS_OF_STEP
        return steps

    def _size(self, value: Any) -> int:
        """Return the number of values in a value. A long string counts as several."""
        if isinstance(value, str):
            return 1 + len(value) // _CHARACTERS_OF_VALUE
        if not isinstance(value, list | dict):
            return 1
        if (size := self._sizes.get(id(value))) is None:
            if isinstance(value, dict):
                self._max_keys = max(self._max_keys, len(value))
                size = sum(self._size(key) + self._size(item) for key, item in value.items())
            else:
                size = sum(map(self._size, value))
            self._sizes[id(value)] = size = size + 1
        return size
