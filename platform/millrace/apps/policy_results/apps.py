from __future__ import annotations

from django.apps import AppConfig


class PolicyResultsConfig(AppConfig):
    """Dry runs of policies, limits and budgets, and comparisons with shadows."""

    name = "millrace.apps.policy_results"
    default_auto_field = "django.db.models.BigAutoField"
