"""Registers the catalog of models; who serves them is made by operator_health, names of one's own by routing."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("models", "/t/{slug}/models/", queries=12),
    Screen("models-detail", "/t/{slug}/models/smollm2-135m", queries=8, states=("populated",)),
    theirs={"model": lambda world: "nobodys-model"},  # models are everybody's
)
