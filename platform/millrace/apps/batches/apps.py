from __future__ import annotations

from django.apps import AppConfig


class BatchesConfig(AppConfig):
    """Files, and the batches that are made of them."""

    name = "millrace.apps.batches"
    default_auto_field = "django.db.models.BigAutoField"
