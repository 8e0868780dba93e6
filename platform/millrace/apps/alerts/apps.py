from __future__ import annotations

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """Alert rules and their alerts."""

    name = "millrace.apps.alerts"
    default_auto_field = "django.db.models.BigAutoField"
