from __future__ import annotations

from django.apps import AppConfig


class BatchesConfig(AppConfig):
    """Files and batches."""

    name = "millrace.apps.batches"
    default_auto_field = "django.db.models.BigAutoField"
