from __future__ import annotations

from django.apps import AppConfig


class AnswerCachesConfig(AppConfig):
    """Reports on the caches, the semantic cache's evidence, and cache warming."""

    name = "millrace.apps.answer_caches"
    default_auto_field = "django.db.models.BigAutoField"
