"""Time and written bytes of the jobs that keep large tables small: `python -m benchmarks.tables`.

It starts a separate PostgreSQL and Valkey in a temporary directory, and fills them with requests of 31 days, with their
usage events and budget leases, always the same. Then it runs each job, and the same work as earlier versions did it:

- the purge of the request log, which drops days, and deleted rows by a condition that read the whole table;
- the reconciler, which reads what has changed, and read everything of the last days;
- the rollups, which add changes to the totals of months, and summed all days of the month;
- the folding of closed budget leases, which were stored permanently.

Bytes are those of the write-ahead log. `--events 20000000` needs about 80 GB: without enough free space, it exits with
status 1 before it writes anything.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

from benchmarks.options import parse, write_figures
from benchmarks.services import start_services

SQL = Path(__file__).parent / "sql"
DAYS = 31
BYTES_PER_EVENT = 4_000  # tables with their indexes, the copy of the request log, and the write-ahead log
MIN_FREE_BYTES = 5 * 10**8
PURGE_BEFORE = """
DELETE FROM benchmark_records WHERE ctid = ANY(ARRAY(
    SELECT r.ctid FROM benchmark_records r
    WHERE r.started_at < %(before)s OR r.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
_SIZE = """
SELECT coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(to_regclass(%(table)s))),
    pg_total_relation_size(to_regclass(%(table)s)))::bigint
"""  # the function returns nothing for a table without partitions
Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000, help="requests of 31 days (default 2,000,000)")
    parser.add_argument("--tenants", type=int, default=1000, help="tenants (default 1,000)")
    parser.add_argument("--json", help="a file for the figures")
    options = parse(parser, {"events": 2000, "tenants": 6})
    check_free_space(options.events)
    figures: Figures = {}
    with ExitStack() as running:
        start_services(running)
        began = time.perf_counter()
        _fill(options.events, options.tenants)
        print(f"{options.events:,} requests of {options.tenants:,} tenants in {time.perf_counter() - began:.0f} s")
        print(f"{'job':44} {'seconds':>9} {'MB written':>11}", flush=True)
        for measure in (_measure_rollups, _measure_reconciler, _measure_leases, _measure_purge):
            measure(figures)
    write_figures(options, figures)


def check_free_space(events: int, free: int | None = None) -> None:
    """Exit if the directory for temporary files has too little free space for this many events."""
    needed = max(MIN_FREE_BYTES, events * BYTES_PER_EVENT)
    free = shutil.disk_usage(tempfile.gettempdir()).free if free is None else free
    if free < needed:
        directory = tempfile.gettempdir()
        raise SystemExit(
            f"{events:,} events need {needed / 1e9:.0f} GB, but {directory} has {free / 1e9:.0f} GB free."
            " Set TMPDIR to another directory, or choose fewer --events."
        )


def _fill(events: int, tenants: int) -> None:
    """Create the tenants, the partitions of the last days, the requests, their usage and its leases."""
    from django.db import connection, connections

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import Project, Tenant

    now = datetime.now(UTC)
    days = [(now - timedelta(days=ago)).date() for ago in range(DAYS + 1)]
    with connections["owner"].cursor() as cursor:
        cursor.execute("DROP TABLE request_log_requestrecord_before")  # it is empty, and has these days
        cursor.execute("SELECT request_log_create_days(%s)", [sorted(days)])
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [sorted({day.replace(day=1) for day in days})])
        rows = [Tenant(slug=f"tenant-{number}", name=f"Tenant {number}") for number in range(tenants)]
        made = Tenant.objects.all_tenants().bulk_create(rows, batch_size=1000)
        projects = Project.objects.all_tenants().bulk_create(
            [Project(tenant=tenant, slug="default", name="Default") for tenant in made], batch_size=1000
        )
        values = {
            "end": now,
            "span": timedelta(days=DAYS),
            "requests": events,
            "tenants": tenants,
            "tenant_ids": [tenant.pk for tenant in made],
            "project_ids": [project.pk for project in projects],
            "first_keys": [1 + 10 * number for number in range(tenants)],
            "models": ["llama-70b", "qwen-8b", "smollm2-135m"],
            "big": 10,
            "small": 10,
        }
        cursor.execute(_read("requests"), values)
        cursor.execute(_read("leased_events"))
        cursor.execute(_read("leases"))
    _vacuum()


def _read(name: str) -> str:
    return (SQL / f"{name}.sql").read_text(encoding="utf-8")


def _vacuum() -> None:
    from django.db import connections

    with connections["owner"].cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")


def _position() -> int:
    """Return the number of bytes that were written to the write-ahead log."""
    from django.db import connections

    with connections["owner"].cursor() as cursor:
        cursor.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
        return int(cursor.fetchone()[0])


def _size(table: str) -> int:
    """Return the bytes of a table with its partitions and indexes."""
    from django.db import connections

    with connections["owner"].cursor() as cursor:
        cursor.execute(_SIZE, {"table": table})
        return int(cursor.fetchone()[0])


def _measure(figures: Figures, name: str, job: Callable[[], object]) -> None:
    """Run a job, and print and store its time and written bytes."""
    before, began = _position(), time.perf_counter()
    job()
    seconds, written = time.perf_counter() - began, _position() - before
    figures[name] = {"seconds": seconds, "written_bytes": float(written)}
    print(f"{name:44} {seconds:>9.3f} {written / 1e6:>11.2f}", flush=True)


def _measure_rollups(figures: Figures) -> None:
    from billing.metering import rollups

    _measure(figures, "rollups, first run", rollups.build)
    _vacuum()
    with mock.patch.object(rollups, "_is_full_run", return_value=True):
        _measure(figures, "rollups, months summed (before)", rollups.build)
    _measure(figures, "rollups, changes of months", rollups.build)


def _measure_reconciler(figures: Figures) -> None:
    from billing.metering.reconciler import reconcile

    differences: list[object] = []

    def run() -> None:
        differences.extend(reconcile().differences)

    _measure(figures, "reconciler, all of the last days (before)", run)
    _measure(figures, "reconciler, changes", run)
    assert not differences, differences[:3]


def _measure_leases(figures: Figures) -> None:
    from billing.metering.reconciler import reconcile
    from billing.models import Reconciliation
    from billing.reservations.lease_sums import fold_leases
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    size = _size("billing_budgetlease")
    _measure(figures, "leases folded", fold_leases)
    _vacuum()
    with all_tenants_scope(BypassReason.COMMAND):
        Reconciliation.objects.update(created_at=datetime.now(UTC) - timedelta(days=2))
    _measure(figures, "reconciler, all, after leases were folded", reconcile)
    sums = _size("billing_budgetleasesum")
    print(f"leases: {size / 1e6:.1f} MB, which the table can use again; their sums: {sums / 1e6:.1f} MB", flush=True)


def _measure_purge(figures: Figures) -> None:
    """Purge the first days, and the same records of a copy in the way of earlier versions."""
    from django.conf import settings
    from django.db import connection, connections

    from millrace.apps.request_log import tasks
    from millrace.apps.request_log.day_partitions import start_of_day
    from millrace.apps.request_log.row_deletion import DELETE_BATCH_SIZE, delete_rows
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    now = datetime.now(UTC)
    before = start_of_day(now - timedelta(days=settings.MILLRACE.request_log_retention_days))
    values = {"before": before, "now": now, "most": DELETE_BATCH_SIZE}
    with connections["owner"].cursor() as cursor:
        cursor.execute("CREATE TABLE benchmark_records (LIKE request_log_requestrecord INCLUDING DEFAULTS)")
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("INSERT INTO benchmark_records SELECT * FROM request_log_requestrecord")
    with connections["owner"].cursor() as cursor:
        cursor.execute(_read("records_before"))
    _vacuum()
    sizes = {name: _size(name) for name in ("request_log_requestrecord", "benchmark_records")}
    removed: list[int] = []
    _explain(PURGE_BEFORE, values)
    _measure(figures, "purge, rows (before)", lambda: removed.append(delete_rows(PURGE_BEFORE, now, before)))
    _measure(figures, "purge, nothing expired (before)", lambda: delete_rows(PURGE_BEFORE, now, before))
    _measure(figures, "purge, days", lambda: tasks.purge_expired(now))
    _measure(figures, "purge, nothing expired", lambda: tasks.purge_expired(now))
    _explain(tasks._RECORDS, values)
    print(f"{removed[0]:,} records of the days before {before.date()} were removed")
    for name, size in sizes.items():
        print(f"{name}: {size / 1e6:.1f} MB before, {_size(name) / 1e6:.1f} MB after", flush=True)


def _explain(statement: str, values: dict[str, object]) -> None:
    """Print the plan of a statement, without running it."""
    from django.db import connection

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {statement}", values)
        print("\n".join(f"    {line}" for (line,) in cursor.fetchall()), flush=True)


if __name__ == "__main__":
    main()
