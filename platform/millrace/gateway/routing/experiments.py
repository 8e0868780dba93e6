"""Experiments in the router: the arm of a request replaces the first target of its route."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import NOT_SERVED
from millrace.gateway.core.types import InferenceRequest
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.experiments import assign

if TYPE_CHECKING:
    from millrace.gateway.routing.router import Route


def apply_experiment(
    models: Mapping[str, ServedModel], key: ApiKeySnapshot, request: InferenceRequest, route: Route
) -> Route:
    """Return the route of the request's arm, if an experiment runs on the requested model name.

    The arm's model is tried first. The targets of the route are fallbacks, as the policy says. If the arm's model is
    not served, they run the request, and the request still counts for its arm.
    """
    experiment = key.experiments.get(request.model)
    if experiment is None:
        return route
    assignment = assign(
        experiment,
        key_id=key.key_id,
        user=request.user,
        metadata=request.metadata,
        cache_key=request.cache_key,
    )
    if assignment is None:
        return route
    arm = experiment.arms[assignment.arm]
    described = {"id": experiment.id, "arm": assignment.arm, "name": arm.name}
    record = msgspec.structs.replace(route.decision_record, experiment=described)
    candidates = route.candidates
    if arm.model and arm.model not in models:
        record.skip_first(arm.model, NOT_SERVED)
    elif arm.model:
        fallbacks = [model for model in candidates if model.name != arm.model] if route.fallback_on else []
        candidates = [models[arm.model], *fallbacks]
        record.targets = [model.name for model in candidates]
    return dataclasses.replace(route, candidates=candidates, decision_record=record, assignment=assignment)
