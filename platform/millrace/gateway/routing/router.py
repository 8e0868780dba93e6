"""Which way: the ordered candidates for the model name a caller asks for, and why these.

A name is a deployment's own, or a logical one that the tenant's routing policy explains
(tenants.routing_policies.policy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.policy import RoutingFacts, decide

EVERY_FALLBACK = ("error", "overload", "context")


@dataclass(frozen=True)
class Candidate:
    """A deployment that may serve the request."""

    model: ServedModel


@dataclass(frozen=True)
class Route:
    """Where a request may go, best first."""

    candidates: list[Candidate]
    fallback_on: tuple[str, ...]
    why: dict[str, Any]  # the beginning of the request's record of decisions


class Router:
    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def served(self, name: str) -> ServedModel | None:
        """Return the deployment of this name."""
        return self._models.get(name)

    def visible(self, key: ApiKeySnapshot) -> dict[str, ServedModel]:
        """Return the names this key may ask for, each with the model to describe it by."""
        found = dict(self._models)
        for name, policy in key.policies.items():
            served = [self._models[model] for model in policy.models if model in self._models]
            if served:
                found[name] = min(served, key=lambda model: model.context_length)
        return {name: model for name, model in found.items() if key.models is None or name in key.models}

    def usable_names(self, key: ApiKeySnapshot) -> dict[str, list[ServedModel]]:
        """Return the deployments behind each name that this key may use, as its policies list them."""
        found = {name: [model] for name, model in self._models.items()}
        for name, policy in key.policies.items():
            found[name] = [self._models[model] for model in policy.models if model in self._models]
        return {name: models for name, models in found.items() if models and (key.models is None or name in key.models)}

    def measure(self, key: ApiKeySnapshot, name: str) -> ServedModel:
        """Return the model whose tokens a prompt is counted in before it is known where it goes.

        Raises:
            ApiError: 404 if there is no such name, 403 if this key may not use it.
        """
        policy = key.policies.get(name)
        served = [self._models[model] for model in (policy.models if policy else (name,)) if model in self._models]
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
        """Where a request for the model `name` may go; at least one way.

        Raises:
            ApiError: 404, none of the policy's rules holds for it.
        """
        policy = key.policies.get(name)
        why: dict[str, Any] = {"tenant": key.tenant_id, "asked": name}
        if policy is None:
            return Route([Candidate(self._models[name])], (), why)
        at = datetime.now(UTC)
        decision = decide(policy, RoutingFacts(request_id, key.key_id, prompt_tokens, tools, schema, at))
        if decision is None:
            raise ApiError("model_not_found", f"No rule of the policy {name!r} holds for this request.", "model")
        known = [model for model in decision.models if model in self._models]
        if not known:
            raise ApiError("model_not_found", f"None of the models behind {name!r} is served here.", "model")
        why |= {
            "policy": {"version": policy.version, "rule": decision.rule, "draw": decision.draw},
            "targets": list(decision.models),
            "prompt_tokens": prompt_tokens,
            "decided_at": at.isoformat(timespec="milliseconds"),
        }
        skipped = [{"model": model, "why": "not served here"} for model in decision.models if model not in known]
        if skipped:
            why["skipped"] = skipped
        return Route([Candidate(self._models[model]) for model in known], policy.fallback_on, why)
