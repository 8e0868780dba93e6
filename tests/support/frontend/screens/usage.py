"""Screen of usage. The rows of other screens supply request records and cache misses."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("usage", "/t/{slug}/usage/", queries=32),
    Screen("usage-explorer", "/t/{slug}/usage/explorer/?group=key", queries=30),
    Screen("usage-explorer-users", "/t/{slug}/usage/explorer/?group=end_user", 30, states=("populated",)),
    Screen("usage-explorer-success", "/t/{slug}/usage/explorer/?measure=success&range=12w", 30, states=("populated",)),
    Screen("usage-routes", "/t/{slug}/usage/?range=7d&group=route&model=smollm2-135m", 25, states=("populated",)),
)
