"""`millrace manage import_models`: import the models of MILLRACE_MODELS into the catalog of deployments."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from millrace.apps.deployments.deployments import do_import_settings


class Command(BaseCommand):
    help = (
        "Import the models of MILLRACE_MODELS into the catalog of deployments. `millrace up` runs it. Deployments that"
        " operators have changed stay as they are, unless their setting has changed since the last import."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        do_import_settings(settings.MILLRACE.models)
