"""Routing policies: the deployments of a tenant's model name. Does not import Django.

A policy is a list of rules. The first rule whose conditions are all met applies. One of its targets is drawn by weight.
The other targets, in their order, are fallbacks. A target with weight 0 is only a fallback.

    {"rules": [{"when": {"prompt_tokens": {"at_least": 2000}}, "targets": [{"model": "big"}]},
               {"targets": [{"model": "small", "weight": 9}, {"model": "small-next"}, {"model": "big", "weight": 0}]}],
     "fallback_on": ["error", "overload", "context"]}

`{"models": ["a", "b"]}` is short for one rule: a, with b as its fallback.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time
from functools import lru_cache
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

Fallback = Literal["error", "overload", "context"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MAX_RULES = 32
MAX_TARGETS = 16
MAX_WEIGHT = 1_000_000


class PolicyTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A deployment."""

    model: str
    weight: int = 1  # among the rule's targets; 0: only as a fallback


class Between(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A range of integers, inclusive."""

    at_least: int = 0
    at_most: int | None = None


class Hours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A time of day from `start` until `end`, exclusive. If `end` is before `start`, it ends on the next day."""

    start: str  # "HH:MM"
    end: str
    zone: str = "UTC"  # IANA time zone
    days: tuple[Day, ...] = _DAYS  # on which it starts


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions of a rule. All given conditions must be met."""

    prompt_tokens: Between | None = None
    tools: bool | None = None  # whether the request has tools
    schema: bool | None = None  # whether the request has a response schema
    keys: tuple[int, ...] | None = None  # IDs of API keys
    hours: Hours | None = None


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    targets: tuple[PolicyTarget, ...]
    when: When = When()


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    rules: tuple[Rule, ...]
    fallback_on: tuple[Fallback, ...] = ("error", "overload", "context")
    version: int = 0  # assigned on publication

    @property
    def models(self) -> tuple[str, ...]:
        """Return the deployments of all rules, without duplicates."""
        return tuple(dict.fromkeys(target.model for rule in self.rules for target in rule.targets))


@dataclass(frozen=True)
class RoutingFacts:
    """The properties of a request that rules depend on."""

    request_id: str  # seed of the draw, so a repeated request gets the same target
    key_id: int
    prompt_tokens: int
    tools: bool
    schema: bool
    at: datetime


@dataclass(frozen=True)
class Decision:
    """The result of a policy for a request."""

    rule: int  # index of the rule that applied
    draw: int  # the drawn number, less than the sum of the weights
    models: tuple[str, ...]  # in the order of attempts


class _Short(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[str, ...]


def parse(body: Mapping[str, Any], *, version: int = 0) -> Policy:
    """Return the policy of a JSON body.

    Raises:
        ValueError: the body is not a valid policy. The message contains the path of the error.
    """
    policy = _read(body)
    _within("$.rules", len(policy.rules), 1, MAX_RULES, "rules")
    for r, rule in enumerate(policy.rules):
        place = f"$.rules[{r}]"
        _within(f"{place}.targets", len(rule.targets), 1, MAX_TARGETS, "targets")
        _check_targets(place, rule)
        _check_conditions(f"{place}.when", rule.when)
        if rule.when == When() and r < len(policy.rules) - 1:
            raise ValueError(f"always matches, so later rules never apply - at `{place}`")
    return msgspec.structs.replace(policy, version=version)


def decide(policy: Policy, facts: RoutingFacts) -> Decision | None:
    """Return the decision of the policy for a request; None if no rule applies."""
    for number, rule in enumerate(policy.rules):
        if is_met(rule.when, facts):
            first, draw = _draw(rule, facts.request_id)
            others = (target.model for target in rule.targets if target.model != first)
            return Decision(number, draw, (first, *others))
    return None


def is_met(when: When, facts: RoutingFacts) -> bool:
    """Return whether all conditions are met."""
    tokens = when.prompt_tokens
    return (
        (tokens is None or tokens.at_least <= facts.prompt_tokens <= (tokens.at_most or facts.prompt_tokens))
        and when.tools in (None, facts.tools)
        and when.schema in (None, facts.schema)
        and (when.keys is None or facts.key_id in when.keys)
        and (when.hours is None or _in_hours(when.hours, facts.at))
    )


def _read(body: Mapping[str, Any]) -> Policy:
    try:
        if "models" in body:
            models = msgspec.convert(body, _Short).models
            return Policy((Rule(tuple(PolicyTarget(model, int(place == 0)) for place, model in enumerate(models))),))
        policy = msgspec.convert(body, Policy)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from exc
    if policy.version:
        raise ValueError("the version is assigned on publication - at `$.version`")
    return policy


def _draw(rule: Rule, request_id: str) -> tuple[str, int]:
    total = sum(target.weight for target in rule.targets)
    drawn = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big") % total
    upto = 0
    for target in rule.targets:
        upto += target.weight
        if drawn < upto:
            return target.model, drawn
    raise AssertionError("weights add up")


def _in_hours(hours: Hours, at: datetime) -> bool:
    local = at.astimezone(_zone(hours.zone))
    start, end, now = _time(hours.start), _time(hours.end), local.time()
    today, yesterday = _DAYS[local.weekday()], _DAYS[local.weekday() - 1]
    if start < end:
        return start <= now < end and today in hours.days
    return (now >= start and today in hours.days) or (now < end and yesterday in hours.days)


def _check_targets(place: str, rule: Rule) -> None:
    for t, target in enumerate(rule.targets):
        _within(f"{place}.targets[{t}].weight", target.weight, 0, MAX_WEIGHT)
        if not target.model:
            raise ValueError(f"expected a model name - at `{place}.targets[{t}].model`")
        if any(target.model == other.model for other in rule.targets[:t]):
            raise ValueError(f"{target.model!r} is listed twice - at `{place}.targets[{t}].model`")
    if not any(target.weight for target in rule.targets):
        raise ValueError(f"at least one weight must be greater than 0 - at `{place}.targets`")


def _check_conditions(place: str, when: When) -> None:
    if (tokens := when.prompt_tokens) is not None:
        _within(f"{place}.prompt_tokens.at_least", tokens.at_least, 0, 2**31)
        if tokens.at_most is not None:
            _within(f"{place}.prompt_tokens.at_most", tokens.at_most, max(1, tokens.at_least), 2**31)
    if (hours := when.hours) is not None:
        for name in ("start", "end"):
            try:
                _time(getattr(hours, name))
            except ValueError:
                raise ValueError(f"expected a time as HH:MM - at `{place}.hours.{name}`") from None
        if hours.start == hours.end:
            raise ValueError(f"the end must differ from the start - at `{place}.hours.end`")
        if not hours.days:
            raise ValueError(f"expected at least one day - at `{place}.hours.days`")
        try:
            _zone(hours.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{hours.zone!r} is not a time zone - at `{place}.hours.zone`") from None


def _within(place: str, value: int, low: int, high: int, what: str = "") -> None:
    if not low <= value <= high:
        raise ValueError(f"expected {what and what + ': '}{low} to {high}, not {value} - at `{place}`")


def _time(text: str) -> time:
    if len(text) != 5:
        raise ValueError(text)
    return time.fromisoformat(text)


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
