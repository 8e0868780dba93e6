"""Routing policies: the deployments of a tenant's model name. Does not import Django.

A policy is a list of rules. The first rule whose conditions are all met applies. The strategy of the rule orders its
targets: the first is used, the others are fallbacks. A target with weight 0 is only a fallback.

    {"rules": [{"name": "long", "when": {"prompt_tokens": {"at_least": 2000}}, "targets": [{"model": "big"}]},
               {"targets": [{"model": "small", "weight": 9}, {"model": "small-next"}, {"model": "big", "weight": 0}]}],
     "fallback_on": ["error", "overload", "context"]}

`{"models": ["a", "b"]}` is short for one rule: a, with b as its fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from inference_worker.contract.texts import Text, text_of
from tenants.routing_policies.answer_pattern import AnswerPattern, PatternError
from tenants.routing_policies.complexity import ComplexityModel, check_model
from tenants.routing_policies.conditions import Between, Hours, RoutingFacts, When, check_conditions, is_met, within
from tenants.routing_policies.errors import error_at, error_of_conversion
from tenants.routing_policies.strategies import Measure, Strategy, order_targets, unknown_measures

__all__ = [
    "Between",
    "Decision",
    "Escalation",
    "Hours",
    "Policy",
    "PolicyTarget",
    "RetryBudget",
    "RoutingFacts",
    "Rule",
    "Shadow",
    "When",
    "decide",
    "find_rule",
    "is_met",
    "named_models",
    "parse",
]

Fallback = Literal["error", "overload", "rate_limit", "context", "timeout"]
AnswerCheck = Literal["schema", "tool_arguments", "pattern", "empty"]
Overflow = Literal["refuse", "drop_middle", "summarize"]
MAX_RULES = 32
MAX_TARGETS = 16
MAX_WEIGHT = 1_000_000
MAX_NAME_LENGTH = 64
MAX_ESCALATIONS = 3
MAX_FIRST_TOKEN_MS = 600_000


class PolicyTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A deployment."""

    model: str
    weight: int = 1  # among the rule's targets; 0: only as a fallback


class Escalation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The checks of an answer. If one fails, the next target answers."""

    on: tuple[AnswerCheck, ...]
    pattern: str = ""  # a regular expression that the complete answer must match
    max: int = 1  # further executions


class RetryBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bounds of fallbacks."""

    max_per_request: int = MAX_TARGETS - 1
    max_percent: int | None = None  # fallbacks per 100 requests of the policy; None: no limit


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A deployment that also answers a share of the requests. Its answers are compared and never returned."""

    model: str
    percent: int  # percentage of requests


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rule: conditions, targets and the choice among them."""

    targets: tuple[PolicyTarget, ...]
    when: When = When()
    name: str = ""
    strategy: Strategy = "weighted"
    escalate: Escalation | None = None

    @property
    def weights(self) -> list[tuple[str, int]]:
        """Return the model and the weight of each target."""
        return [(target.model, target.weight) for target in self.targets]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A routing policy."""

    rules: tuple[Rule, ...]
    fallback_on: tuple[Fallback, ...] = ("error", "overload", "context")
    first_token_ms: int | None = None  # a target without a token by then is replaced, if `timeout` is in `fallback_on`
    retries: RetryBudget = RetryBudget()
    context_overflow: Overflow = "refuse"  # what happens to a conversation that no target's context can take
    summarizer: str = ""  # the deployment that summarizes dropped messages, if `context_overflow` is `summarize`
    complexity: ComplexityModel | None = None  # the classifier of the condition `complexity`
    semantic_cache: bool = False  # whether answers to similar questions are served, if the tenant has turned that on
    shadow: Shadow | None = None
    version: int = 0  # assigned on publication

    @property
    def models(self) -> tuple[str, ...]:
        """Return the deployments of all rules, without duplicates."""
        return tuple(dict.fromkeys(target.model for rule in self.rules for target in rule.targets))

    @property
    def metadata_fields(self) -> tuple[str, ...]:
        """Return the metadata fields that rules depend on, without duplicates."""
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.when.metadata or ()))

    @property
    def uses_complexity(self) -> bool:
        """Return whether a rule depends on the complexity score."""
        return any(rule.when.complexity is not None for rule in self.rules)

    @property
    def uses_budget(self) -> bool:
        """Return whether a rule depends on the share of a budget that is left."""
        return any(rule.when.budget_left is not None for rule in self.rules)


@dataclass(frozen=True)
class Decision:
    """The result of a policy for a request."""

    rule: int  # index of the rule that applied
    draw: int  # the drawn number, less than the sum of the weights
    models: tuple[str, ...]  # in the order of attempts
    is_probe: bool = False


class _Short(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[str, ...]


def parse(body: Mapping[str, Any], *, version: int = 0) -> Policy:
    """Return the policy of a JSON body.

    Raises:
        ValueError: the body is not a valid policy. The message contains the path of the error.
    """
    policy = _read(body)
    within("$.rules", len(policy.rules), 1, MAX_RULES, Text("rules"))
    for number, rule in enumerate(policy.rules):
        place = f"$.rules[{number}]"
        within(f"{place}.targets", len(rule.targets), 1, MAX_TARGETS, Text("targets"))
        within(f"{place}.name", len(rule.name), 0, MAX_NAME_LENGTH, Text("characters"))
        _check_targets(place, rule)
        check_conditions(f"{place}.when", rule.when)
        _check_escalation(f"{place}.escalate", rule)
        if rule.when == When() and number < len(policy.rules) - 1:
            raise error_at(place, Text("always matches, so later rules never apply"))
    _check_fallbacks(policy)
    _check_complexity(policy)
    if policy.shadow is not None:
        within("$.shadow.percent", policy.shadow.percent, 1, 100)
        if not policy.shadow.model:
            raise error_at("$.shadow.model", Text("expected a model name"))
    return msgspec.structs.replace(policy, version=version)


def named_models(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the deployments that a body names, each with the path of its name.

    Raises:
        ValueError: the body is not a valid policy.
    """
    policy = parse(body)
    if "models" in body:
        return [(f"$.models[{index}]", model) for index, model in enumerate(policy.models)]
    found = [
        (f"$.rules[{number}].targets[{index}].model", target.model)
        for number, rule in enumerate(policy.rules)
        for index, target in enumerate(rule.targets)
    ]
    if policy.summarizer:
        found.append(("$.summarizer", policy.summarizer))
    if policy.shadow is not None:
        found.append(("$.shadow.model", policy.shadow.model))
    return found


def find_rule(policy: Policy, facts: RoutingFacts) -> int | None:
    """Return the index of the first rule that applies to a request, or None."""
    return next((number for number, rule in enumerate(policy.rules) if is_met(rule.when, facts)), None)


def decide(policy: Policy, facts: RoutingFacts, measure: Measure = unknown_measures) -> Decision | None:
    """Return the decision of the policy for a request; None if no rule applies."""
    number = find_rule(policy, facts)
    if number is None:
        return None
    rule = policy.rules[number]
    order = order_targets(rule.strategy, rule.weights, facts.request_id, measure)
    return Decision(number, order.draw, order.models, order.is_probe)


def _read(body: Mapping[str, Any]) -> Policy:
    try:
        if "models" in body:
            models = msgspec.convert(body, _Short).models
            return Policy((Rule(tuple(PolicyTarget(model, int(place == 0)) for place, model in enumerate(models))),))
        policy = msgspec.convert(body, Policy)
    except msgspec.ValidationError as exc:
        raise error_of_conversion(exc) from exc
    if policy.version:
        raise error_at("$.version", Text("the version is assigned on publication"))
    return policy


def _check_targets(place: str, rule: Rule) -> None:
    for index, target in enumerate(rule.targets):
        within(f"{place}.targets[{index}].weight", target.weight, 0, MAX_WEIGHT)
        if not target.model:
            raise error_at(f"{place}.targets[{index}].model", Text("expected a model name"))
        if any(target.model == other.model for other in rule.targets[:index]):
            text = Text("%(model)s is listed twice", model=repr(target.model))
            raise error_at(f"{place}.targets[{index}].model", text)
    if not any(target.weight for target in rule.targets):
        raise error_at(f"{place}.targets", Text("at least one weight must be greater than 0"))


def _check_escalation(place: str, rule: Rule) -> None:
    escalate = rule.escalate
    if escalate is None:
        return
    if not escalate.on:
        raise error_at(f"{place}.on", Text("expected at least one check"))
    within(f"{place}.max", escalate.max, 1, MAX_ESCALATIONS)
    if len(rule.targets) < 2:
        raise error_at(place, Text("the rule has no second target"))
    if ("pattern" in escalate.on) != bool(escalate.pattern):
        raise error_at(f"{place}.pattern", Text("give a pattern together with the check 'pattern'"))
    if escalate.pattern:
        try:
            AnswerPattern(escalate.pattern)
        except PatternError as exc:
            raise error_at(f"{place}.pattern", text_of(exc)) from exc


def _check_complexity(policy: Policy) -> None:
    if policy.complexity is not None:
        check_model("$.complexity", policy.complexity)
        return
    for number, rule in enumerate(policy.rules):
        if rule.when.complexity is not None:
            raise error_at(f"$.rules[{number}].when.complexity", Text("the policy has no classifier `complexity`"))


def _check_fallbacks(policy: Policy) -> None:
    if ("timeout" in policy.fallback_on) != (policy.first_token_ms is not None):
        raise error_at("$.first_token_ms", Text("give first_token_ms together with the fallback 'timeout'"))
    if (policy.context_overflow == "summarize") != bool(policy.summarizer):
        raise error_at("$.summarizer", Text("give a summarizer together with the overflow 'summarize'"))
    if policy.first_token_ms is not None:
        within("$.first_token_ms", policy.first_token_ms, 1, MAX_FIRST_TOKEN_MS)
    within("$.retries.max_per_request", policy.retries.max_per_request, 0, MAX_TARGETS - 1)
    if policy.retries.max_percent is not None:
        within("$.retries.max_percent", policy.retries.max_percent, 0, 100)
