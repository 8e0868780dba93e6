from __future__ import annotations

from django.apps import AppConfig


class BillingConfig(AppConfig):
    """Usage events and what is made of them."""

    name = "billing"
    default_auto_field = "django.db.models.BigAutoField"
