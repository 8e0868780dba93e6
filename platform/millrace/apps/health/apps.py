from __future__ import annotations

from django.apps import AppConfig


class HealthConfig(AppConfig):
    """Health checks, cordons, and the history and costs of replicas."""

    name = "millrace.apps.health"
    label = "operations"  # label in the names of tables and migrations
    default_auto_field = "django.db.models.BigAutoField"
