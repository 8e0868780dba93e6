"""`millrace manage migrate` as the owner of the tables, because the platform's own role may not change them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.core.management.commands import migrate
from django.db import connections

from tenants.migration_reset import take_over


class Command(migrate.Command):
    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        # Django's checks of the code import every view, which takes longer than all migrations.
        parser.set_defaults(database="owner", skip_checks=True)

    def handle(self, *args: Any, **options: Any) -> None:
        take_over(connections[options["database"]])
        super().handle(*args, **options)
