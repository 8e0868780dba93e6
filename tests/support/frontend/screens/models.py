"""Screen of the model catalog. operator_health creates the replicas, and routing the tenant's model names."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("models", "/t/{slug}/models/", queries=20),
    Screen("models-detail", "/t/{slug}/models/smollm2-135m", queries=12, states=("populated",)),
    theirs={"model": lambda world: "unknown-model"},  # models belong to no tenant
)
