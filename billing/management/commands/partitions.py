"""`manage.py partitions`: which months of usage there are; taking one out of the database, and bringing it back."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection

from billing.actions.archives import do_archive, do_restore
from billing.metering.archives import ArchiveDamagedError, manifest_path
from billing.metering.partitions import TABLE, existing_partitions, partition_name
from billing.models import UsageArchive, UsageQuarantine
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


class Command(BaseCommand):
    """Lists, archives and restores months of usage, for operators at the machine who have the owner's database URL."""

    help = "List the months of usage events, take one out of the database into files, or bring one back."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("list", help="months, their rows, their size, and whether they are in the database")
        archive = verbs.add_parser("archive", help="write a month to files, check them, and detach it")
        archive.add_argument("month", type=_month, help="for example 2026-08")
        archive.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where the files go")
        archive.add_argument("--drop", action="store_true", help="drop the detached table too, which frees its space")
        restore = verbs.add_parser("restore", help="bring a month back from its files")
        restore.add_argument("file", type=Path, help="the manifest: usage-2026-08.json, with its files beside it")

    def handle(self, *args: Any, verb: str, **options: Any) -> None:
        try:
            if verb == "list":
                self._list()
            elif verb == "archive":
                done = do_archive(options["month"], options["to"], drop=options["drop"])
                path = manifest_path(options["to"], options["month"])
                self.stdout.write(f"{done.month}: {done.usage.rows} events are in {path} and its files.")
            else:
                done = do_restore(options["file"])
                self.stdout.write(f"{done.month}: {done.usage.rows} events are in the database again.")
        except (Conflict, ArchiveDamagedError) as exc:
            raise CommandError(str(exc)) from exc

    def _list(self) -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            lines = {
                name.removeprefix(f"{TABLE}_").replace("_", "-"): _counted(cursor, name)
                for name in existing_partitions()
            }
            for row in UsageArchive.objects.filter(restored_at__isnull=True):
                here = "detached" if row.dropped_at is None else "dropped"
                size = "" if row.dropped_at else _counted(cursor, partition_name(row.month))[1]
                lines[str(row)] = (row.rows, size, here)
            lost = UsageQuarantine.objects.filter(
                reason=UsageQuarantine.Reason.UNPLACEABLE, resolved_at__isnull=True
            ).count()
        self.stdout.write(f"{'month':8} {'events':>14} {'size':>10}  state")
        for month, (rows, size, state) in sorted(lines.items()):
            self.stdout.write(f"{month:8} {rows:>14,} {size:>10}  {state}")
        if lost:
            self.stdout.write(f"In quarantine for want of their month: {lost} messages.")


def _counted(cursor: Any, name: str) -> tuple[int, str, str]:
    cursor.execute(f"SELECT count(*), pg_size_pretty(pg_total_relation_size('{name}')) FROM {name}")  # noqa: S608
    rows, size = cursor.fetchone()
    return rows, size, "attached"


def _month(text: str) -> date:
    try:
        return date.fromisoformat(f"{text}-01")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no month: give one like 2026-08") from None
