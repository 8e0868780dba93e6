from __future__ import annotations

from django.apps import AppConfig


class RequestLogConfig(AppConfig):
    """The request log: one record of each request."""

    name = "millrace.apps.request_log"
    default_auto_field = "django.db.models.BigAutoField"
