"""The models that can serve a tenant's requests now: deployed, loaded and priced, as gateways decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

import redis

from billing.pricing.rate_cards import priced_models
from inference_worker.checkpoints.encoder_config import ModelTask, model_task
from inference_worker.contract.deployments import WantedState
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.deployments.served_deployments import served_specs, served_states
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.routing_policies.target_checks import ModelObstacle, find_obstacles


def read_obstacles(tenant_id: int, models: Collection[str], *, with_replicas: bool = False) -> dict[str, ModelObstacle]:
    """Return the obstacle of each model that cannot serve the tenant's requests now.

    A deployment that is unloaded while idle, or until its first request, needs no ready replica. If Valkey cannot be
    reached, replicas are not checked.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        served = {served.spec.name: served for served in served_states()}
        known = {name: task_of(served[name].spec) for name in models if name in served}
        priced = priced_models(tenant_id, known, datetime.now(UTC))
    found: dict[str, ModelObstacle] = {}
    for name in models:
        if name not in served:
            found[name] = ModelObstacle.UNKNOWN
        elif served[name].state == WantedState.UNLOADED:
            found[name] = ModelObstacle.UNLOADED
        elif name not in priced:
            found[name] = ModelObstacle.UNPRICED
        elif served[name].state == WantedState.DRAINED:
            found[name] = ModelObstacle.DRAINED
    if with_replicas:
        rest = {name for name in models if name not in found and not served[name].idle_seconds}
        found |= dict.fromkeys(_not_ready(rest), ModelObstacle.NOT_READY)
    return found


def task_of(spec: ModelSpec) -> ModelTask:
    """Return the task of a deployment's model."""
    return model_task(spec.source) if spec.upstream is None else spec.upstream.task


def example_model(tenant_id: int) -> str:
    """Return a model for examples: one that generates text and can serve the tenant's requests, if there is one."""
    served = served_specs()
    return choose_example(served, find_obstacles(tenant_id, [spec.name for spec in served]))


def choose_example(served: Iterable[ModelSpec], obstacles: Mapping[str, ModelObstacle]) -> str:
    """Return one of the models that generates text, and has no obstacle if there is such a model."""
    names = [spec.name for spec in served if task_of(spec) == "generate"]
    return next((name for name in names if name not in obstacles), names[0] if names else "model")


def _not_ready(models: Collection[str]) -> set[str]:
    if not models:
        return set()
    try:
        board = read_fleet_status()
    except redis.RedisError:
        return set()
    return {model for model in models if not board.count_ready(model) and not board.is_loadable(model)}
