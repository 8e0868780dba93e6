"""Registers the operators' list of tenants."""

from __future__ import annotations

from tests.frontend.console import Screen, register

register(Screen("ops-tenants", "/ops/tenants/", queries=16, who="operator", states=("populated",)))
