"""Screens of projects. Those of keys create the rows."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(
    Screen("projects", "/t/{slug}/projects/", queries=22),
    Screen("projects-detail", "/t/{slug}/projects/{project}/", queries=36, states=("populated", "over", "error")),
)
