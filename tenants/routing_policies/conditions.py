"""Conditions of a rule of a routing policy. Does not import Django."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from inference_worker.contract.texts import Text
from tenants.routing_policies.complexity import MAX_SCORE
from tenants.routing_policies.errors import error_at

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MAX_IDS = 100  # API keys or projects of a condition
MAX_METADATA = 16  # metadata fields of a condition, as in a request
MAX_VALUES = 32  # values of a condition
MAX_LABEL_LENGTH = 512  # characters of a value; of a metadata field's name 64
FULL_BUDGET = 100.0  # percent left, if no budget applies


class Between(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A range of integers, inclusive."""

    at_least: int = 0
    at_most: int | None = None

    def contains(self, value: float) -> bool:
        return self.at_least <= value and (self.at_most is None or value <= self.at_most)


class Hours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A time of day from `start` until `end`, exclusive. If `end` is before `start`, it ends on the next day."""

    start: str  # "HH:MM"
    end: str
    zone: str = "UTC"  # IANA time zone
    days: tuple[Day, ...] = DAYS  # on which it starts


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions of a rule. All given conditions must be met."""

    prompt_tokens: Between | None = None
    tools: bool | None = None  # whether the request has tools
    schema: bool | None = None  # whether the request has a response schema
    images: bool | None = None  # whether the request has images
    task: tuple[str, ...] | None = None  # one of these task labels
    metadata: dict[str, tuple[str, ...]] | None = None  # for each field, one of these values
    keys: tuple[int, ...] | None = None  # IDs of API keys
    projects: tuple[int, ...] | None = None  # IDs of projects
    hours: Hours | None = None
    budget_left: Between | None = None  # percent of the budget that has the smallest share left
    complexity: Between | None = None  # the score of the policy's classifier


@dataclass(frozen=True)
class RoutingFacts:
    """The properties of a request that rules depend on."""

    request_id: str  # seed of the draw, so a repeated request gets the same target
    key_id: int
    prompt_tokens: int
    tools: bool
    schema: bool
    at: datetime
    images: bool = False
    task: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    project_id: int = 0
    budget_left: float | None = None  # percent; None: no budget applies
    complexity: int | None = None  # by the policy's classifier; None: there is no text to score


def is_met(when: When, facts: RoutingFacts) -> bool:
    """Return whether all conditions are met."""
    budget_left = FULL_BUDGET if facts.budget_left is None else facts.budget_left
    return (
        (when.prompt_tokens is None or when.prompt_tokens.contains(facts.prompt_tokens))
        and when.tools in (None, facts.tools)
        and when.schema in (None, facts.schema)
        and when.images in (None, facts.images)
        and (when.task is None or facts.task in when.task)
        and (when.keys is None or facts.key_id in when.keys)
        and (when.projects is None or facts.project_id in when.projects)
        and all(facts.metadata.get(name) in values for name, values in (when.metadata or {}).items())
        and (when.hours is None or _in_hours(when.hours, facts.at))
        and (when.budget_left is None or when.budget_left.contains(budget_left))
        and (
            when.complexity is None
            or when.complexity.contains(MAX_SCORE if facts.complexity is None else facts.complexity)
        )
    )


def check_conditions(place: str, when: When) -> None:
    """Check the values of conditions.

    Raises:
        ValueError: a value is invalid. The message contains its path.
    """
    if when.prompt_tokens is not None:
        _check_range(f"{place}.prompt_tokens", when.prompt_tokens, 2**31)
    if when.budget_left is not None:
        _check_range(f"{place}.budget_left", when.budget_left, 100)
    if when.complexity is not None:
        _check_range(f"{place}.complexity", when.complexity, MAX_SCORE)
    for name in ("keys", "projects"):
        if (ids := getattr(when, name)) is not None:
            within(f"{place}.{name}", len(ids), 1, MAX_IDS, Text("IDs"))
    if when.task is not None:
        _check_labels(f"{place}.task", when.task)
    if when.metadata is not None:
        within(f"{place}.metadata", len(when.metadata), 1, MAX_METADATA, Text("fields"))
        for name, values in when.metadata.items():
            within(f"{place}.metadata", len(name), 1, 64, Text("characters of a name"))
            _check_labels(f"{place}.metadata.{name}", values)
    if when.hours is not None:
        _check_hours(f"{place}.hours", when.hours)


def within(place: str, value: int, low: int, high: int, what: str = "") -> None:
    """Check that a number is in a range.

    Raises:
        ValueError: it is not. The message contains the path `place`.
    """
    if not low <= value <= high:
        values = {"what": what, "low": low, "high": high, "value": value}
        if what:
            raise error_at(place, Text("expected %(what)s: %(low)s to %(high)s, not %(value)s", **values))
        raise error_at(place, Text("expected %(low)s to %(high)s, not %(value)s", **values))


def _check_range(place: str, between: Between, high: int) -> None:
    within(f"{place}.at_least", between.at_least, 0, high)
    if between.at_most is not None:
        low = 1 if high > FULL_BUDGET else 0  # a prompt has a token
        within(f"{place}.at_most", between.at_most, max(low, between.at_least), high)


def _check_labels(place: str, values: Sequence[str]) -> None:
    within(place, len(values), 1, MAX_VALUES, Text("values"))
    for index, value in enumerate(values):
        within(f"{place}[{index}]", len(value), 1, MAX_LABEL_LENGTH, Text("characters"))


def _check_hours(place: str, hours: Hours) -> None:
    for name in ("start", "end"):
        try:
            _time(getattr(hours, name))
        except ValueError:
            raise error_at(f"{place}.{name}", Text("expected a time as HH:MM")) from None
    if hours.start == hours.end:
        raise error_at(f"{place}.end", Text("the end must differ from the start"))
    if not hours.days:
        raise error_at(f"{place}.days", Text("expected at least one day"))
    try:
        _zone(hours.zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise error_at(f"{place}.zone", Text("%(zone)s is not a time zone", zone=repr(hours.zone))) from None


def _in_hours(hours: Hours, at: datetime) -> bool:
    local = at.astimezone(_zone(hours.zone))
    start, end, now = _time(hours.start), _time(hours.end), local.time()
    today, yesterday = DAYS[local.weekday()], DAYS[local.weekday() - 1]
    if start < end:
        return start <= now < end and today in hours.days
    return (now >= start and today in hours.days) or (now < end and yesterday in hours.days)


def _time(text: str) -> time:
    if len(text) != 5:
        raise ValueError(text)
    return time.fromisoformat(text)


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
