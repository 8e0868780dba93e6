"""`millrace manage prepare`: everything that the database needs before the platform starts, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from tenants.management.commands.bootstrap import bootstrap


class Command(BaseCommand):
    help = (
        "Prepare the database for a start: `migrate`, `bootstrap`, `import_models` and `price_book backfill`, one after"
        " the other. `millrace up` runs it if one of them has something to do. Prints a line of JSON for each step, and"
        " one with the accounts that `bootstrap` prints."
    )
    requires_system_checks: ClassVar[list[str]] = []  # type: ignore[misc]

    def handle(self, *args: Any, **options: Any) -> None:
        with self._step("database schema"):
            call_command("migrate", interactive=False, stdout=self.stderr)
        with self._step("operator and demo tenant"):
            accounts = bootstrap(settings.MILLRACE.data_dir, with_demo=settings.MILLRACE.demo_tenant)
        with self._step("models and prices"):
            call_command("import_models", stdout=self.stderr)
            call_command("price_book", "backfill", stdout=self.stderr)
        self.stdout.write(json.dumps({"accounts": accounts}))

    @contextmanager
    def _step(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.stdout.write(json.dumps({"step": title, "seconds": time.monotonic() - began}))
