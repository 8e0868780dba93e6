"""Screen of the fleet. operator_health creates its history."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("operator-fleet", "/operator/fleet/?span=1h", queries=35, who="operator", states=("populated", "error")),
    Screen("operator-fleet-cost", "/operator/fleet/costs/smollm2-135m", 11, who="operator", states=("populated",)),
)
