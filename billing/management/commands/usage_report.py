"""`millrace manage usage_report`: a tenant's usage as a table."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.metering.usage import (
    BUCKETS,
    GROUP_COLUMNS,
    GROUPS,
    MAX_ROWS,
    TooManyRows,
    UsageReport,
    instant,
    span,
    sums,
    total,
)
from billing.models import ExecutionOutcome
from inference_worker.contract.request import TOKEN_CLASSES
from tenants.isolation.scopes import tenant_scope
from tenants.management.arguments import tenant_of_slug

_BY = (*GROUPS, *BUCKETS)
_COUNTED = (*ExecutionOutcome.values, *TOKEN_CLASSES)


class Command(BaseCommand):
    """Command that prints sums of a tenant's usage."""

    help = (
        "Show a tenant's usage: requests by outcome and tokens by billing class. Default: this month, by model."
        " Times are UTC. Tokens of failed requests are never billed and in no sum."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug, for example: demo")
        parser.add_argument(
            "--by",
            type=_by,
            default=["model"],
            metavar="WHAT",
            help="a row for each: one or more of " + ", ".join(_BY) + ", with commas (default: model)",
        )
        parser.add_argument("--from", dest="start", type=_instant, metavar="TIME", help=_TIME_HELP)
        parser.add_argument("--to", dest="end", type=_instant, metavar="TIME", help="the same, not included; now")
        parser.add_argument("--model", help="only this model")
        parser.add_argument("--key", type=int, metavar="ID", help="only the key with this id")
        parser.add_argument("--project", type=int, metavar="ID", help="only the project with this id")
        parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON instead of a table")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = tenant_of_slug(options["tenant"])
        groups = tuple(group for group in GROUPS if group in options["by"])
        bucket = next((bucket for bucket in BUCKETS if bucket in options["by"]), None)
        try:
            start, end = span(options["start"], options["end"])
            filters = {"model": options["model"], "key_id": options["key"], "project_id": options["project"]}
            with tenant_scope(tenant):
                rows = sums(UsageReport(tenant.pk, start, end, **filters), groups, bucket)
        except ValueError:
            raise CommandError("--from must be before --to.") from None
        except TooManyRows:
            raise CommandError(f"More than {MAX_ROWS} rows: ask for less time or fewer groups.") from None
        columns = [*(["start"] if bucket else []), *(GROUP_COLUMNS[group] for group in groups)]
        if options["as_json"]:
            answer = {"tenant": tenant.slug, "from": start, "to": end, "rows": rows, "total": total(rows)}
            self.stdout.write(json.dumps(answer, indent=2, default=datetime.isoformat))
        else:
            self.stdout.write(f"{tenant.slug}: {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC\n")
            self.stdout.write(_table(columns, rows, bucket))


def _table(columns: list[str], rows: list[dict[str, Any]], bucket: str | None) -> str:
    """Format rows below their headings, with a line of totals: texts left, numbers right."""
    if not any(row[outcome] for row in rows for outcome in ExecutionOutcome.values):
        return "No usage."
    pattern = "%Y-%m-%d %H:%M" if bucket == "hour" else "%Y-%m-%d"
    lines = [[*columns, *_COUNTED]]
    for row in rows:
        words = [row[name].strftime(pattern) if name == "start" else str(row[name]) for name in columns]
        lines.append([*words, *(f"{row[name]:,}" for name in _COUNTED)])
    if columns:
        sums_ = total(rows)
        lines.append(["total", *[""] * (len(columns) - 1), *(f"{sums_[name]:,}" for name in _COUNTED)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = (
        [
            cell.ljust(width) if index < len(columns) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


_TIME_HELP = "2026-11-01 or 2026-11-01T09:00:00Z; default: the start of the month that --to lies in"


def _instant(text: str) -> datetime:
    try:
        return instant(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date and no time: give {_TIME_HELP.split(';')[0]}") from None


def _by(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [name for name in names if name not in _BY]:
        raise argparse.ArgumentTypeError(f"cannot group by {', '.join(unknown)}; known: {', '.join(_BY)}")
    if len(set(BUCKETS) & set(names)) > 1:
        raise argparse.ArgumentTypeError("hour, day and month do not go together")
    return names
