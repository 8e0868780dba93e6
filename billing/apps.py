from __future__ import annotations

from django.apps import AppConfig


class BillingConfig(AppConfig):
    """Django configuration of billing."""

    name = "billing"
    default_auto_field = "django.db.models.BigAutoField"
