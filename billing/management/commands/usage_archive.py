"""`millrace manage usage_archive`: move a month of usage events out of the database into files, and back."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.metering.archive_actions import do_archive, do_restore
from billing.metering.archives import ArchiveDamagedError, manifest_path
from tenants.actions import Conflict


class Command(BaseCommand):
    """Command that creates and restores archives of usage months. It needs the database owner's URL."""

    help = "Move a month of usage events out of the database into files, or restore it."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        create = actions.add_parser("create", help="write a month to files, check them, and detach it")
        create.add_argument("month", type=_month, help="for example 2026-08")
        create.add_argument("--to", type=Path, required=True, metavar="DIRECTORY", help="where the files go")
        create.add_argument("--drop", action="store_true", help="drop the detached table too, which frees its space")
        restore = actions.add_parser("restore", help="restore a month from its files")
        restore.add_argument("file", type=Path, help="the manifest: usage-2026-08.json, with its files beside it")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        try:
            if action == "create":
                done = do_archive(options["month"], options["to"], drop=options["drop"])
                path = manifest_path(options["to"], options["month"])
                self.stdout.write(f"{done.month}: {done.usage.rows} events are in {path} and its files on {done.host}.")
            else:
                done = do_restore(options["file"])
                self.stdout.write(f"{done.month}: {done.usage.rows} events are in the database again.")
        except (Conflict, ArchiveDamagedError) as exc:
            raise CommandError(str(exc)) from exc


def _month(text: str) -> date:
    try:
        return date.fromisoformat(f"{text}-01")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no month: give one like 2026-08") from None
