from __future__ import annotations

from django.apps import AppConfig


class DeploymentsConfig(AppConfig):
    """Deployments and the replicas that serve them."""

    name = "millrace.apps.deployments"
    default_auto_field = "django.db.models.BigAutoField"
