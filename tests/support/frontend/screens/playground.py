"""Screen of the playground."""

from __future__ import annotations

from tests.support.frontend.console import Screen, register

register(Screen("playground", "/t/{slug}/playground/", queries=26))
