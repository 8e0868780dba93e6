"""Registers usage; other screens' rows give it records of requests and misses."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("usage", "/t/{slug}/usage/", queries=42),
    Screen("usage-routes", "/t/{slug}/usage/?range=7d&group=route&model=smollm2-135m", 40, states=("populated",)),
)
