"""Validation of finished answers under JSON schemas that no grammar can enforce completely.

The cost is bounded: the number of applied keywords, weighted by the sizes of their values, is limited. Regular
expressions are matched in linear time, never by Python's engine. References to other documents are never fetched.

What cannot be decided is left out: a regular expression with another syntax, a reference that cannot be followed, and
unevaluatedItems and unevaluatedProperties, for which the library follows references without a limit. An answer is then
never reported as valid. It is still reported as invalid if another keyword shows that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jsonschema import Draft202012Validator, ValidationError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from tenants.routing_policies.answer_pattern import MAX_PATTERN_LENGTH, AnswerPattern, PatternError, compile_pattern

MAX_STEPS = 10_000  # applied keywords of one request
MAX_ANSWER_CHARACTERS = 2**18
MAX_SCHEMA_CHARACTERS = 2**18
# Compared or printed values, items or schemas that are looked through, and states of a regular expression times
# characters that take as long as one keyword.
_SIZE_OF_STEP = 64
_SCHEMAS_OF_STEP = 16
_CHARACTERS_OF_VALUE = 16
_STATES_OF_STEP = 128
_COMPILATION_STEPS = 50  # steps for each regular expression
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNDECIDED = ("unevaluatedItems", "unevaluatedProperties")
# Keywords whose result may be the opposite of that of a schema in them.
_OPPOSITE = frozenset({"contains", "disallow", "if", "not", "oneOf"})
_ONE_GROUP = re.compile(r"\((?:\?:)?[^()\[\]\\]*\)")
_CLASS_ESCAPES = frozenset("dDwWsS")
_LINE_ENDS = frozenset("\n\r\u2028\u2029")
_Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


class _TooManySteps(Exception):
    """The check would take too long."""


def all_valid(pairs: Sequence[tuple[str, str]]) -> bool | None:
    """Return whether all answers are JSON that is valid under their schemas; None if that cannot be determined.

    Args:
        pairs: texts of a schema and an answer.
    """
    answers: defaultdict[str, list[str]] = defaultdict(list)
    for schema, answer in pairs:
        answers[schema].append(answer)
    if sum(len(answer) for _, answer in pairs) > MAX_ANSWER_CHARACTERS:
        return None
    if sum(map(len, answers)) > MAX_SCHEMA_CHARACTERS or "" in answers:  # the gateway keeps no larger ones
        return None
    results, steps = [], MAX_STEPS
    for schema, texts in answers.items():
        result, steps = _validate(schema, texts, steps)
        results.append(result)
    return False if False in results else None if None in results else True


def _validate(schema: str, answers: Sequence[str], max_steps: int) -> tuple[bool | None, int]:
    """Return the result for the answers under one schema, and the remaining steps."""
    check: _Check | None = None
    try:
        values = [msgspec.json.decode(answer) for answer in answers]
    except (msgspec.DecodeError, RecursionError):  # an answer that the length limit has ended
        return False, max_steps
    try:
        decoded = msgspec.json.decode(schema)
        check = _Check(decoded, max_steps)
        validator = check.validator_class()(decoded, registry=Registry())
        if not all(validator.is_valid(value) for value in values):
            return False, check.remaining
        return None if check.is_undecided else True, check.remaining
    except Exception:  # noqa: BLE001  (too many steps; and invalid schemas raise errors of many types)
        return None, 0 if check is None else check.remaining


class _Check:
    """The state of one check. The schema and the answers must not be freed before it."""

    def __init__(self, schema: Any, max_steps: int) -> None:
        self.remaining = max_steps
        self.is_undecided = False  # a keyword was left out
        self._schema = schema
        self._sizes: dict[int, int] = {}  # identity -> size of a list or object
        self._max_keys = 0  # keys of the largest object in the schema
        self._schema_size = self._size(schema)
        self._has_ids = "$id" in str(schema)
        self._patterns: dict[str, AnswerPattern | None] = {}

    def validator_class(self) -> Any:
        """Return a validator class of the schema's dialect that raises `_TooManySteps` after the steps."""
        base = validators.validator_for(self._schema, default=Draft202012Validator)
        keywords: Mapping[str, _Keyword] = base.VALIDATORS
        own: dict[str, _Keyword] = {
            "pattern": self._check_pattern,
            "patternProperties": self._check_pattern_properties,
            "additionalProperties": self._check_additional_properties,
            **dict.fromkeys(_UNDECIDED, self._leave_out),
        }
        return validators.extend(
            base, {name: self._bound_check(name, own.get(name, check)) for name, check in keywords.items()}
        )

    def _bound_check(self, name: str, check: _Keyword) -> _Keyword:
        def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
            self._take(1 + self._cost(name, value, instance))
            errors = check(validator, value, instance, schema) or ()
            if name in _REFERENCES:
                errors = self._follow(errors)
            return self._decide(errors) if name in _OPPOSITE else iter(errors)

        return apply

    def _take(self, steps: int) -> None:
        self.remaining -= steps
        if self.remaining < 0:
            raise _TooManySteps

    def _follow(self, errors: Iterable[ValidationError]) -> Iterator[ValidationError]:
        try:
            yield from errors
        except Unresolvable:
            self.is_undecided = True

    def _decide(self, errors: Iterable[ValidationError]) -> Iterator[ValidationError]:
        """Yield the errors unless a keyword was left out while they were determined."""
        before, self.is_undecided = self.is_undecided, False
        found = list(errors)
        if self.is_undecided:
            return
        self.is_undecided = before
        yield from found

    def _leave_out(self, *_: Any) -> None:
        self.is_undecided = True

    # Regular expressions.

    def _check_pattern(self, _: Any, pattern: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and self._finds(pattern, instance) is False:
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _check_pattern_properties(
        self, validator: Any, patterns: Any, instance: Any, _: Any
    ) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for pattern, schema in patterns.items():
                for name, value in instance.items():
                    if self._finds(pattern, name):
                        yield from validator.descend(value, schema, path=name, schema_path=pattern)

    def _check_additional_properties(
        self, validator: Any, more: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, dict):
            return
        listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items():
            if name not in listed and all(self._finds(pattern, name) is False for pattern in patterns):
                if more is False:
                    yield ValidationError(f"{name!r} is not allowed")
                elif isinstance(more, dict):
                    yield from validator.descend(value, more, path=name)

    def _finds(self, pattern: str, text: str) -> bool | None:
        """Return whether a regular expression matches within the text; None if that is undecided."""
        if pattern not in self._patterns:
            self._take(_COMPILATION_STEPS)
            self._patterns[pattern] = _compile(pattern)
        compiled = self._patterns[pattern]
        found = None
        if compiled is not None and _has_one_meaning(pattern, text):
            self._take(len(text) * compiled.num_states // _STATES_OF_STEP)
            found = compiled.matches(text)
        self.is_undecided |= found is None
        return found

    # Costs.

    def _cost(self, name: str, value: Any, instance: Any) -> int:
        """Return the further steps of a keyword: it compares or prints its value and the instance."""
        size = self._size(instance)
        steps = (size + self._size(value)) // _SIZE_OF_STEP
        if isinstance(instance, list | dict) and isinstance(value, dict):
            steps += len(instance) * len(value) // _SIZE_OF_STEP
        if name == "uniqueItems" and isinstance(instance, list):
            steps += len(instance) * size // _SCHEMAS_OF_STEP
        if name in _REFERENCES:
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


def _compile(pattern: str) -> AnswerPattern | None:
    """Return a pattern of complete texts that matches the texts in which the regular expression matches.

    None: it cannot be matched in linear time.
    """
    is_anchored = pattern.startswith("^")
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if ends else body
    if "^" in body.replace("[^", "[") or "$" in body:
        return None
    if "|" in body and (is_anchored or ends) and not _ONE_GROUP.fullmatch(body):
        return None  # an anchor may be of one alternative only
    searched = f"{'' if is_anchored else '.*'}(?:{body}){'' if ends else '.*'}"
    try:
        return compile_pattern(searched) if len(pattern) <= MAX_PATTERN_LENGTH else None
    except PatternError:
        return None


def _has_one_meaning(pattern: str, text: str) -> bool:
    """Return whether ECMAScript, Python and the platform agree on the text: classes differ beyond ASCII."""
    if not text.isascii() or not text.isprintable():
        has_classes = any(character in _CLASS_ESCAPES for character in pattern)
        return not (has_classes and "\\" in pattern) and not ("." in pattern and not _LINE_ENDS.isdisjoint(text))
    return True
