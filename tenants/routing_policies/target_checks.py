"""Checks whether the models that a policy or an experiment names can serve a tenant's requests.

Deployments and prices belong to packages that import this one, so the function that reads them is a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from inference_worker.contract.texts import Text
from tenants.models import Experiment, RoutingPolicy
from tenants.routing_policies import policy


class ModelObstacle(StrEnum):
    """The reason why a model cannot serve a tenant's requests, by the gateway's rules."""

    UNKNOWN = "model_not_found"
    UNLOADED = "model_unloaded"  # by an operator
    UNPRICED = "model_not_priced"
    DRAINED = "model_drained"  # by an operator, who can resume it at any time
    NOT_READY = "model_loading"  # no replica accepts requests now

    @property
    def is_temporary(self) -> bool:
        """Return whether the model is expected to serve requests again without a change of the policy."""
        return self in (ModelObstacle.DRAINED, ModelObstacle.NOT_READY)


FindObstacles = Callable[..., Mapping[str, ModelObstacle]]


@dataclass(frozen=True)
class TargetProblem:
    """A model that is named in a policy or an experiment and cannot serve requests."""

    place: str  # such as `$.rules[0].targets[1].model`
    model: str
    obstacle: ModelObstacle
    is_blocking: bool  # what names the model cannot go live

    @property
    def text(self) -> str:
        """The message after the place."""
        return Text("%(place)s: %(message)s", place=self.place, message=self.message())

    def message(self) -> str:
        """Return a description for the user."""
        match self.obstacle:
            case ModelObstacle.UNKNOWN:
                return Text("No deployment has the name %(model)s.", model=repr(self.model))
            case ModelObstacle.UNLOADED:
                return Text("The model %(model)s is unloaded. Contact the operator.", model=repr(self.model))
            case ModelObstacle.UNPRICED:
                return Text("The model %(model)s has no price yet. Contact the operator.", model=repr(self.model))
            case ModelObstacle.DRAINED:
                return Text("The model %(model)s is drained and accepts no requests now.", model=repr(self.model))
            case ModelObstacle.NOT_READY:
                return Text("No replica of the model %(model)s is ready now.", model=repr(self.model))


def find_obstacles(
    tenant_id: int, models: Collection[str], *, with_replicas: bool = False
) -> Mapping[str, ModelObstacle]:
    """Return the obstacle of each model that cannot serve the tenant's requests now.

    Args:
        with_replicas: also check that a replica is ready. Valkey is read for it.
    """
    find: FindObstacles = import_string(settings.FIND_MODEL_OBSTACLES)
    return find(tenant_id, models, with_replicas=with_replicas) if models else {}


class TargetChecks:
    """The obstacles of a tenant's models, each read once."""

    def __init__(self, tenant_id: int, *, with_replicas: bool = False) -> None:
        self._tenant_id = tenant_id
        self._with_replicas = with_replicas
        self._known: dict[str, ModelObstacle | None] = {}

    def load(self, models: Iterable[str]) -> None:
        """Read the obstacles of several models at a time."""
        unknown = set(models) - self._known.keys()
        found = find_obstacles(self._tenant_id, unknown, with_replicas=self._with_replicas)
        self._known |= {model: found.get(model) for model in unknown}

    def obstacles_of(self, models: Iterable[str]) -> dict[str, ModelObstacle]:
        """Return the obstacle of each model that has one."""
        models = list(models)
        self.load(models)
        return {model: obstacle for model in models if (obstacle := self._known[model]) is not None}

    def of_models(self, models: Iterable[tuple[str, str]]) -> list[TargetProblem]:
        """Return the problems of models, which are given with their places."""
        models = list(models)
        self.load(model for _, model in models)
        return [
            TargetProblem(place, model, obstacle, is_blocking=not obstacle.is_temporary)
            for place, model in models
            if (obstacle := self._known[model]) is not None
        ]

    def of_policy(self, body: Mapping[str, Any]) -> list[TargetProblem]:
        """Return the problems of a policy's body; none if it is not a valid policy."""
        try:
            found = self.of_models(policy.named_models(body))
        except ValueError:
            return []
        model = settings.MILLRACE.semantic_cache_model
        if body.get("semantic_cache") and model:  # without it, requests are answered by their targets
            found += [replace(problem, is_blocking=False) for problem in self.of_models([("$.semantic_cache", model)])]
        return found

    def of_live(self, row: RoutingPolicy) -> list[TargetProblem]:
        """Return the problems of a version of a policy, if it is active."""
        return self.of_policy(row.body) if row.active else []

    def of_experiment(self, row: Experiment) -> list[TargetProblem]:
        """Return the problems of an experiment's arms, unless it has stopped."""
        if row.state == Experiment.State.STOPPED:
            return []
        arms = ((f"$.arms[{number}].model", arm.get("model", "")) for number, arm in enumerate(row.arms))
        return self.of_models((place, model) for place, model in arms if model)
