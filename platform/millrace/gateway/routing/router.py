"""The router: returns the ordered candidates for a requested model name, and the reasons for them.

A name is a deployment's name, or a logical name that the tenant's routing policy defines
(tenants.routing_policies.policy).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.policy import RoutingFacts, decide

LOADING_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class Route:
    """The deployments that may run a request, the preferred one first."""

    candidates: list[ServedModel]
    fallback_on: tuple[str, ...]
    decision_record: dict[str, Any]  # the first fields of the request's decision record


class Router:
    def __init__(self, models: Mapping[str, ServedModel], loading: Collection[str] = ()) -> None:
        """Create a router. Its arguments may change later.

        Args:
            models: the deployments by name.
            loading: names of further deployments, which no replica serves yet.
        """
        self._models = models
        self._loading = loading

    def served(self, name: str) -> ServedModel | None:
        """Return the deployment with this name, or None."""
        return self._models.get(name)

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

    def measure(self, key: ApiKeySnapshot, name: str) -> ServedModel:
        """Return the deployment whose tokenizer counts a prompt before the prompt is routed.

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
        return served[0]

    def route(
        self, key: ApiKeySnapshot, name: str, request_id: str, prompt_tokens: int, *, tools: bool, schema: bool
    ) -> Route:
        """Return the route of a request for the model `name`, with at least one candidate.

        Raises:
            ApiError: 404, no rule of the policy applies, or none of its deployments is served.
        """
        policy = key.policies.get(name)
        decision_record: dict[str, Any] = {"tenant": key.tenant_id, "requested_model": name}
        if policy is None:
            if name not in self._models:  # removed since the prompt was tokenized
                raise ApiError("model_not_found", f"The model {name!r} is not served any more.", "model")
            return Route([self._models[name]], (), decision_record)
        decided_at = datetime.now(UTC)
        decision = decide(policy, RoutingFacts(request_id, key.key_id, prompt_tokens, tools, schema, decided_at))
        if decision is None:
            raise ApiError(
                "model_not_found", f"No rule of the routing policy {name!r} applies to this request.", "model"
            )
        known = [model for model in decision.models if model in self._models]
        if not known:
            raise ApiError("model_not_found", f"None of the models of the routing policy {name!r} is served.", "model")
        decision_record |= {
            "policy": {"version": policy.version, "rule": decision.rule, "draw": decision.draw},
            "targets": list(decision.models),
            "prompt_tokens": prompt_tokens,
            "decided_at": decided_at.isoformat(timespec="milliseconds"),
        }
        skipped = [{"model": model, "reason": "not served here"} for model in decision.models if model not in known]
        if skipped:
            decision_record["skipped"] = skipped
        return Route([self._models[model] for model in known], policy.fallback_on, decision_record)
