from __future__ import annotations

from django.apps import AppConfig


class FeedbackConfig(AppConfig):
    """Feedback on requests, as their callers report it."""

    name = "millrace.apps.feedback"
    default_auto_field = "django.db.models.BigAutoField"
