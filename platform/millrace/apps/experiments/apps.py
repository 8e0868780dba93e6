from __future__ import annotations

from django.apps import AppConfig


class ExperimentsConfig(AppConfig):
    """Results of experiments."""

    name = "millrace.apps.experiments"
    default_auto_field = "django.db.models.BigAutoField"
