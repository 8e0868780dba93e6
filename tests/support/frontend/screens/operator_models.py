"""Screens of models and workers. operator_health creates the replicas."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

WORKER = "/operator/models/smollm2-135m-0"
register(
    Screen("operator-models", "/operator/models/", queries=30, who="operator", states=("populated", "error")),
    Screen("operator-models-cordon", f"{WORKER}/cordon", 10, who="operator", states=("populated",)),
    Screen("operator-models-drain", f"{WORKER}/drain", 10, who="operator", states=("populated",)),
    Screen(
        "operator-models-uncordon",
        "/operator/models/smollm2-135m-int8-0/uncordon",
        12,
        who="operator",
        states=("populated",),
    ),
)
