from __future__ import annotations

from django.apps import AppConfig


class RecordsConfig(AppConfig):
    """Records of requests."""

    name = "millrace.apps.records"
    default_auto_field = "django.db.models.BigAutoField"
