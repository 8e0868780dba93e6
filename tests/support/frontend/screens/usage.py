"""Screen of usage. The rows of other screens supply request records and cache misses."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("usage", "/t/{slug}/usage/", queries=32),
    Screen("usage-routes", "/t/{slug}/usage/?range=7d&group=route&model=smollm2-135m", 25, states=("populated",)),
)
