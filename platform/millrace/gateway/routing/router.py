"""The router: returns the ordered candidates for a requested model name, and the reasons for them.

A name is a deployment's name, or a logical name that the tenant's routing policy defines
(tenants.routing_policies.policy).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import NOT_SERVED, DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.routing.experiments import apply_experiment
from millrace.gateway.routing.signals import RequestSize, TargetSignals
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.experiments import ArmAssignment
from tenants.routing_policies.policy import Escalation, Policy, RoutingFacts, Rule, find_rule
from tenants.routing_policies.strategies import TargetMeasures, TargetOrder, order_targets

LOADING_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class Route:
    """The deployments that may run a request, the preferred one first."""

    candidates: list[ServedModel]
    fallback_on: tuple[str, ...]
    decision_record: DecisionRecord  # record of the request, with the fields that the router knows
    policy: Policy | None = None
    escalation: Escalation | None = None  # escalation of the rule that applied
    assignment: ArmAssignment | None = None  # arm of a running experiment


@dataclass(frozen=True)
class PickedTargets:
    """The targets of a rule in the order of attempts, and what they were chosen by, for the decision record."""

    models: tuple[str, ...]
    reasons: dict[str, Any] = field(default_factory=dict)


class Router:
    def __init__(
        self,
        models: Mapping[str, ServedModel],
        loading: Collection[str] = (),
        signals: TargetSignals | None = None,
    ) -> None:
        """Create a router. Its arguments may change later.

        Args:
            models: the deployments by name.
            loading: names of further deployments, which no replica serves yet.
            signals: measures of the targets; without them, strategies use the order of the rule.
        """
        self._models = models
        self._loading = loading
        self._signals = signals

    def find_served(self, name: str) -> ServedModel | None:
        """Return the deployment with this name, or None."""
        return self._models.get(name)

    def shadow_model(self, key: ApiKeySnapshot, name: str) -> ServedModel | None:
        """Return the deployment that shadows requests for the model `name`, if there is one."""
        policy = key.policies.get(name)
        return None if policy is None or policy.shadow is None else self._models.get(policy.shadow.model)

    def visible(self, key: ApiKeySnapshot) -> dict[str, ServedModel]:
        """Return the model names that this key may request, each with the deployment that describes it."""
        visible = dict(self._models)
        for name, policy in key.policies.items():
            served = [self._models[model] for model in policy.models if model in self._models]
            if served:
                visible[name] = min(served, key=lambda model: model.context_length)
        return {name: model for name, model in visible.items() if key.models is None or name in key.models}

    def usable_names(self, key: ApiKeySnapshot) -> dict[str, list[ServedModel]]:
        """Return the deployments behind each model name that this key may request, in the order of its policy."""
        usable = {name: [model] for name, model in self._models.items()}
        for name, policy in key.policies.items():
            usable[name] = [self._models[model] for model in policy.models if model in self._models]
        return {
            name: models for name, models in usable.items() if models and (key.models is None or name in key.models)
        }

    def measure(self, key: ApiKeySnapshot, name: str, *, has_images: bool = False) -> ServedModel:
        """Return the deployment whose tokenizer counts a prompt before the prompt is routed.

        It is the first of the policy. For a request with images, it is the first that takes images, if there is one.

        Raises:
            ApiError: 404, the name does not exist; 403, this key may not use it.
        """
        policy = key.policies.get(name)
        served = [self._models[model] for model in (policy.models if policy else (name,)) if model in self._models]
        if not served and name in self._loading and (key.models is None or name in key.models):
            message = f"The model {name!r} is not ready yet. Retry later."
            raise ApiError("model_loading", message, retry_after=LOADING_RETRY_SECONDS)
        if not served:
            raise ApiError(
                "model_not_found", f"The model {name!r} does not exist or you do not have access to it.", "model"
            )
        if key.models is not None and name not in key.models:
            raise ApiError("model_not_allowed", f"This API key may not use the model {name!r}.", "model")
        return counting_model(served, has_images=has_images)

    def may_leave(self, key: ApiKeySnapshot, name: str) -> bool:
        """Return whether an upstream may run a request for the model `name`."""
        policy = key.policies.get(name)
        experiment = key.experiments.get(name)
        arms = (arm.model for arm in experiment.arms) if experiment else ()
        shadows = (policy.shadow.model,) if policy and policy.shadow else ()
        served = (self._models.get(model) for model in (*(policy.models if policy else (name,)), *arms, *shadows))
        return any(model is not None and model.upstream is not None for model in served)

    def assign_arm(self, key: ApiKeySnapshot, request: InferenceRequest, route: Route) -> Route:
        """Return the route with the arm of a running experiment, or the same route."""
        return apply_experiment(self._models, key, request, route)

    def route(self, key: ApiKeySnapshot, name: str, facts: RoutingFacts, size: RequestSize) -> Route:
        """Return the route of a request for the model `name`, with at least one candidate.

        Raises:
            ApiError: 404, no rule of the policy applies, or none of its deployments is served.
        """
        policy = key.policies.get(name)
        decision_record = DecisionRecord(
            tenant=key.tenant_id,
            project=key.project_id,
            requested_model=name,
            decided_at=facts.at.isoformat(timespec="milliseconds"),
            facts=described_facts(facts, policy),
        )
        if policy is None:
            if name not in self._models:  # removed since the prompt was tokenized
                raise ApiError("model_not_found", f"The model {name!r} is not served any more.", "model")
            return Route([self._models[name]], (), decision_record)
        number = find_rule(policy, facts)
        if number is None:
            raise ApiError(
                "model_not_found", f"No rule of the routing policy {name!r} applies to this request.", "model"
            )
        rule = policy.rules[number]
        picked = self.pick_targets(rule, facts, size)
        known = [model for model in picked.models if model in self._models]
        if not known:
            raise ApiError("model_not_found", f"None of the models of the routing policy {name!r} is served.", "model")
        described = {"rule_name": rule.name} if rule.name else {}
        decision_record.policy = {"version": policy.version, "rule": number, **described, **picked.reasons}
        decision_record.targets = list(picked.models)
        decision_record.prompt_tokens = facts.prompt_tokens
        if policy.complexity is not None:
            decision_record.classifier = policy.complexity.fingerprint
        for model in picked.models:
            if model not in known:
                decision_record.skip(model, NOT_SERVED)
        candidates = [self._models[model] for model in known]
        return Route(candidates, policy.fallback_on, decision_record, policy, rule.escalate)

    def pick_targets(self, rule: Rule, facts: RoutingFacts, size: RequestSize) -> PickedTargets:
        """Return the targets of a rule in the order of attempts, by the strategy of the rule."""
        measures: dict[str, TargetMeasures] = {}

        def measure(model: str) -> TargetMeasures:
            served = self._models.get(model)
            if served is None or self._signals is None:
                return TargetMeasures(fits=served is not None)
            measures[model] = self._signals.measure(served, size)
            return measures[model]

        order = order_targets(rule.strategy, rule.weights, facts.request_id, measure)
        return PickedTargets(order.models, _reasons(rule, order, measures))


def counting_model(served: list[ServedModel], *, has_images: bool) -> ServedModel:
    """Return the deployment whose tokenizer counts a prompt, among those of a name."""
    takes_images = (model for model in served if model.upstream is not None)
    return next(takes_images, served[0]) if has_images else served[0]


def described_facts(facts: RoutingFacts, policy: Policy | None) -> dict[str, Any]:
    """Return the properties of a request that rules depend on, without those that are recorded elsewhere.

    Properties that are false or empty are left out. Of the metadata, it contains the fields that the policy names.
    """
    given: dict[str, Any] = {name: getattr(facts, name) for name in ("tools", "schema", "images", "task")}
    found = {name: value for name, value in given.items() if value}
    if policy is not None and policy.metadata_fields:
        found["metadata"] = {name: facts.metadata.get(name) for name in policy.metadata_fields}
    if policy is not None and policy.uses_budget:
        found["budget_left"] = None if facts.budget_left is None else round(facts.budget_left, 1)
    if facts.complexity is not None:
        found["complexity"] = facts.complexity
    return found


def _reasons(rule: Rule, order: TargetOrder, measures: Mapping[str, TargetMeasures]) -> dict[str, Any]:
    """Return what the targets were ordered by."""
    if rule.strategy == "weighted":
        return {"draw": order.draw}
    reasons: dict[str, Any] = {"strategy": rule.strategy}
    if order.is_probe:
        reasons["probe"] = True
    name = {"cheapest": "cost_nano", "lowest_latency": "ttft_ms", "least_busy": "load"}.get(rule.strategy)
    if name is not None and measures:
        values = {model: getattr(found, name) for model, found in measures.items()}
        reasons[name] = {model: round(value, 3) for model, value in values.items() if value is not None}
        if misfits := [model for model, found in measures.items() if not found.fits]:
            reasons["does_not_fit"] = misfits
    return reasons
