from __future__ import annotations

from django.apps import AppConfig


class DemoConfig(AppConfig):
    """The app of the command `seed_demo`. It has no tables."""

    name = "millrace.demo"
