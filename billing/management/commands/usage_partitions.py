"""`millrace manage usage_partitions`: list the months of usage events."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import connection

from billing.metering.partitions import TABLE, existing_partitions, partition_name
from billing.models import UsageArchive, UsageQuarantine
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


class Command(BaseCommand):
    """Command that lists the months of usage events, with their rows, size and state."""

    help = "List the months of usage events: rows, size, and whether they are attached, detached or dropped."

    def handle(self, *args: Any, **options: Any) -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            lines = {
                name.removeprefix(f"{TABLE}_").replace("_", "-"): _count_rows(cursor, name)
                for name in existing_partitions()
            }
            for row in UsageArchive.objects.filter(restored_at__isnull=True):
                here = "detached" if row.dropped_at is None else "dropped"
                size = "" if row.dropped_at else _count_rows(cursor, partition_name(row.month))[1]
                lines[str(row)] = (row.rows, size, here)
            lost = UsageQuarantine.objects.filter(
                reason=UsageQuarantine.Reason.UNPLACEABLE, resolved_at__isnull=True
            ).count()
        self.stdout.write(f"{'month':8} {'events':>14} {'size':>10}  state")
        for month, (rows, size, state) in sorted(lines.items()):
            self.stdout.write(f"{month:8} {rows:>14,} {size:>10}  {state}")
        if lost:
            self.stdout.write(f"In quarantine for want of their month: {lost} messages.")


def _count_rows(cursor: Any, name: str) -> tuple[int, str, str]:
    cursor.execute(f"SELECT count(*), pg_size_pretty(pg_total_relation_size('{name}')) FROM {name}")  # noqa: S608
    rows, size = cursor.fetchone()
    return rows, size, "attached"
