"""Validation of finished answers under JSON schemas whose keywords no grammar can enforce.

The cost is bounded: a schema with regular expressions is not used, since Python's may take exponential time, and the
number of applied keywords is limited. References to other documents are never fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jsonschema import Draft202012Validator, ValidationError, validators
from referencing import Registry

MAX_STEPS = 10_000  # applied keywords of one request
MAX_ANSWER_CHARACTERS = 2**18
_REGEX_KEYWORDS = ("pattern", "patternProperties")
_Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class _TooManySteps(Exception):
    """The check would take too long."""


def are_valid(schema: str, answers: Sequence[str]) -> bool | None:
    """Return whether all answers are JSON that is valid under the schema; None if that cannot be determined."""
    if any(f'"{keyword}"' in schema for keyword in _REGEX_KEYWORDS) or sum(map(len, answers)) > MAX_ANSWER_CHARACTERS:
        return None
    try:
        validator = _bounded_validator()(msgspec.json.decode(schema), registry=Registry())
        return all(validator.is_valid(msgspec.json.decode(answer)) for answer in answers)
    except msgspec.DecodeError:  # an answer that the length limit has ended
        return False
    except Exception:  # noqa: BLE001  (too many steps; and invalid schemas raise errors of many types)
        return None


def _bounded_validator() -> Any:
    """Return a validator class that raises `_TooManySteps` after `MAX_STEPS` applied keywords."""
    steps = 0

    def bounded(check: _Keyword, cost: Callable[[Any], int]) -> _Keyword:
        def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError] | None:
            nonlocal steps
            steps += cost(instance)
            if steps > MAX_STEPS:
                raise _TooManySteps
            return check(validator, value, instance, schema)

        return apply

    keywords: Mapping[str, _Keyword] = Draft202012Validator.VALIDATORS
    return validators.extend(
        Draft202012Validator,
        {name: bounded(check, _pairs if name == "uniqueItems" else _one) for name, check in keywords.items()},
    )


def _one(_: Any) -> int:
    return 1


def _pairs(instance: Any) -> int:
    """Return the number of comparisons between all items."""
    return len(instance) ** 2 if isinstance(instance, list) else 1
