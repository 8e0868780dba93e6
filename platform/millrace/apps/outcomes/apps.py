from __future__ import annotations

from django.apps import AppConfig


class OutcomesConfig(AppConfig):
    """Outcomes of requests."""

    name = "millrace.apps.outcomes"
    default_auto_field = "django.db.models.BigAutoField"
