"""Actions that archive a month of usage events and restore it. Each may be killed at any line and run again.

They need the tables' owner, because the platform's database role cannot detach a partition. A month is written to
files. The files are read back and compared with its rows. Only then is the partition detached, in one transaction that
counts the rows again: rows are append-only, so the same number of rows are the same rows. Adjustments stay in the
database.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import structlog
from django.db import connection, connections, transaction

from billing.metering import archives, rollups
from billing.metering.archives import Manifest, adjustments_of, events_of
from billing.metering.partitions import MONTHS_BEHIND, existing_partitions, month_of, partition_name, shift_month
from billing.models import Invoice, Period, RollupState, UsageArchive
from billing.reservations.reservations import open_before
from inference_worker.contract.texts import Text
from tenants.actions import Conflict
from tenants.isolation.db_roles import SYSTEM, BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)
OWNER = "owner"
_LOCK = 0x61726368  # an arbitrary advisory lock, used only here


def do_archive(month: date, directory: Path, *, drop: bool = False) -> Manifest:
    """Write the month's usage to `folder`, detach its partition and, with `drop`, drop the detached table.

    Raises: Conflict if the month may still change, is needed or was archived; ArchiveDamagedError if the files differ
    from what was written.
    """
    with _alone():
        row = UsageArchive.objects.filter(month=month, restored_at__isnull=True).first()
        if row is not None and (row.dropped_at is not None or not drop):
            if row.dropped_at is None:
                raise Conflict(Text("%(month)s is already archived.", month=f"{month:%Y-%m}"))
            raise Conflict(Text("%(month)s is already archived, and dropped.", month=f"{month:%Y-%m}"))
        if row is None:
            manifest = _write(month, directory, _find_settled_periods(month))
        else:
            manifest = archives.read(archives.manifest_path(directory, month))
        if drop:
            _drop(month, manifest)
    return manifest


def do_restore(path: Path) -> Manifest:
    """Restore an archived month from its manifest. The rows are compared byte for byte before they are attached.

    Raises:
        Conflict: the month is in the database.
        ArchiveDamagedError: the files are not what was written.
    """
    manifest = archives.read(path)
    month, name = manifest.first_day, partition_name(manifest.first_day)
    with _alone(), _as_owner() as cursor:
        if name in existing_partitions():
            raise Conflict(Text("%(month)s is in the database.", month=manifest.month))
        cursor.execute(f"DROP TABLE IF EXISTS {name}")  # detached, not dropped: the files are the same
        cursor.execute("SELECT billing_create_partitions(%s)", [[month]])
        # NOTE: PostgreSQL does not copy into a table with policies that apply to the current role.
        cursor.execute(f"ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY")
        with cursor.copy(f"COPY {name} ({', '.join(manifest.usage.columns)}) FROM STDIN (FORMAT csv, HEADER)") as copy:
            for piece in archives.contents(path.parent / manifest.usage.file):
                copy.write(piece)
        same = archives.digest(cursor, name, manifest.usage.columns) == manifest.usage.sha256
        cursor.execute(f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY")
        if not same:
            raise archives.ArchiveDamagedError(f"{manifest.month} came out otherwise than it was: nothing is changed.")
        _archive_rows().filter(month=month).update(restored_at=datetime.now(UTC))
    log.info("usage_restored", month=manifest.month, rows=manifest.usage.rows)
    return manifest


def _find_settled_periods(month: date) -> list[int]:
    """Return the billing periods of the month's events.

    Raises:
        Conflict: something of it may still change, or is not invoiced.
    """
    label, name = f"{month:%Y-%m}", partition_name(month)
    if month >= shift_month(month_of(datetime.now(UTC)), -MONTHS_BEHIND):
        raise Conflict(Text("%(label)s cannot be archived before the following month is over.", label=label))
    if name not in existing_partitions():
        raise Conflict(Text("There is no usage of %(label)s.", label=label))
    starts, ends = (datetime.combine(day, datetime.min.time(), UTC) for day in (month, shift_month(month, 1)))
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(f"SELECT DISTINCT invoice_period FROM {name} WHERE invoice_period IS NOT NULL")  # noqa: S608
        stamped = [period for (period,) in cursor.fetchall()]
        touched = Period.objects.filter(starts_at__lt=ends, ends_at__gt=starts) | Period.objects.filter(pk__in=stamped)
        periods = list(touched.order_by("pk"))
        if late := [row.label for row in periods if row.invoiced_at is None]:
            raise Conflict(Text("Not invoiced yet: %(late)s.", late=", ".join(late)))
        drafts = Invoice.objects.all_tenants().filter(period__in=periods, state=Invoice.State.DRAFT)
        if number := drafts.count():
            raise Conflict(Text("Finalize the invoice drafts of the month first: %(number)s are left.", number=number))
        if running := open_before(cursor, ends):
            raise Conflict(
                Text(
                    "Requests admitted in %(label)s may still run: %(running)s reservations are open.",
                    label=label,
                    running=running,
                )
            )
        corrected = f"(SELECT max(created_at) FROM {adjustments_of(month)})"  # noqa: S608
        cursor.execute(f"SELECT greatest(max(settled_at), {corrected}) FROM {name}")  # noqa: S608
        (latest,) = cursor.fetchone()
        state = RollupState.objects.first()
    if latest is not None and (state is None or state.settled_before - rollups.OVERLAP <= latest):
        raise Conflict(
            Text("The hourly sums do not include all usage of %(label)s yet. Try again in a few minutes.", label=label)
        )
    return [row.pk for row in periods]


def _write(month: date, directory: Path, periods: list[int]) -> Manifest:
    """Write the files, compare them with the rows and detach the partition."""
    directory.mkdir(parents=True, exist_ok=True)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        manifest = archives.write(cursor, month, directory)
        for part, relation in ((manifest.usage, events_of(month)), (manifest.adjustments, adjustments_of(month))):
            if archives.sum_relation(cursor, relation) != (part.rows, part.sums):
                raise Conflict(
                    Text("Usage of %(month)s was settled meanwhile. Run the command again.", month=manifest.month)
                )
    _detach(month, manifest, periods)
    return manifest


def _detach(month: date, manifest: Manifest, periods: list[int]) -> None:
    name = partition_name(month)
    with _as_owner() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '10s'")  # the settler waits for this lock
        cursor.execute("LOCK TABLE billing_usageevent IN ACCESS EXCLUSIVE MODE")
        cursor.execute(f"SET LOCAL ROLE {SYSTEM}")
        cursor.execute(f"SELECT count(*) FROM {name}")  # noqa: S608
        rows = cursor.fetchone()[0]
        cursor.execute("SET LOCAL ROLE NONE")
        if rows != manifest.usage.rows:
            raise Conflict(
                Text("Usage of %(month)s was settled meanwhile. Run the command again.", month=manifest.month)
            )
        cursor.execute(f"ALTER TABLE billing_usageevent DETACH PARTITION {name}")
        values = {"rows": rows, "sha256": manifest.usage.sha256, "periods": periods, "detached_at": datetime.now(UTC)}
        _archive_rows().update_or_create(month=month, defaults={**values, "dropped_at": None, "restored_at": None})
    log.info("usage_detached", month=manifest.month, rows=rows, host=manifest.host)


def _drop(month: date, manifest: Manifest) -> None:
    name = partition_name(month)
    with _as_owner() as cursor:
        cursor.execute(f"SET LOCAL ROLE {SYSTEM}")
        found = archives.digest(cursor, name, manifest.usage.columns)
        cursor.execute("SET LOCAL ROLE NONE")
        if found != manifest.usage.sha256:
            raise archives.ArchiveDamagedError(f"The files differ from the detached month {manifest.month}.")
        cursor.execute(f"DROP TABLE {name}")
        _archive_rows().filter(month=month).update(dropped_at=datetime.now(UTC))
    log.info("usage_dropped", month=manifest.month)


def _archive_rows() -> Any:
    return UsageArchive.objects.using(OWNER)


@contextmanager
def _as_owner() -> Iterator[Any]:
    """Open a transaction as the tables' owner."""
    with transaction.atomic(using=OWNER, durable=True), connections[OWNER].cursor() as cursor:
        yield cursor


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of archives.

    Raises:
        Conflict: another process has it.
    """
    with connections[OWNER].cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK])
        if not cursor.fetchone()[0]:
            raise Conflict(Text("Another archive or restore is running."))
        try:
            yield
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
