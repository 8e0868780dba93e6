from __future__ import annotations

from django.apps import AppConfig


class DemoConfig(AppConfig):
    """The command `seed_demo`; it has no tables of its own."""

    name = "millrace.devserver.demo"
