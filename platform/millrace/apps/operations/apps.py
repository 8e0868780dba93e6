from __future__ import annotations

from django.apps import AppConfig


class OperationsConfig(AppConfig):
    """Replicas, their history and costs, and health checks."""

    name = "millrace.apps.operations"
    default_auto_field = "django.db.models.BigAutoField"
