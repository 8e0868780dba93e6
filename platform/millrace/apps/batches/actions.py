"""Actions of the web jobs on batches: load their lines and write their results.

Each step is one transaction under the batch's lock and idempotent. A job can be killed at any time, and can run in two
workers concurrently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import IO

import structlog
from django.conf import settings
from django.db import connection
from django.db.models import Q

from millrace.apps.batches.models import Batch, File, Line
from millrace.apps.batches.reading import BadFile, ParsedLine, read_lines
from millrace.apps.batches.results import WRITERS, BatchUsage, line_outcome
from millrace.apps.batches.storage import Storage, new_name
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

ABANDONED = timedelta(minutes=10)  # after the lease's end, the line's gateway is considered lost
RETENTION = timedelta(days=30)
LIVE = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS, Batch.Status.FINALIZING, Batch.Status.CANCELLING)


def storage() -> Storage:
    return Storage(settings.MILLRACE.data_dir)


def live_batches() -> list[int]:
    """Return the IDs of unfinished batches, oldest first."""
    with all_tenants_scope(BypassReason.BATCHES):
        return list(Batch.objects.all_tenants().filter(status__in=LIVE).order_by("id").values_list("id", flat=True))


def seconds_until_step() -> float | None:
    """Return 0 if a batch is unfinished, otherwise None."""
    return 0.0 if live_batches() else None


def do_advance(batch_id: int) -> None:
    """Run all steps that are possible now."""
    for step in (_read_in, _close, _write_out):
        with _lock_batch(batch_id) as batch:
            if batch is not None:
                step(batch)


@contextmanager
def _lock_batch(batch_id: int) -> Iterator[Batch | None]:
    """Lock the batch until the transaction's end, or yield None if another job has locked it."""
    with all_tenants_scope(BypassReason.BATCHES, durable=True):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended('batch ' || %s, 0))", [str(batch_id)])
            (is_locked,) = cursor.fetchone()
        yield Batch.objects.all_tenants().filter(pk=batch_id).first() if is_locked else None


def _read_in(batch: Batch) -> None:
    if batch.status != Batch.Status.VALIDATING:
        return
    now = datetime.now(UTC)
    try:
        with storage().path(batch.input_file).open("rb") as file:
            found = read_lines(file, batch.endpoint, settings.MILLRACE.max_request_body_bytes)
    except (BadFile, FileNotFoundError) as exc:
        missing = {"code": "file_not_found", "line": None, "message": "The file no longer exists.", "param": None}
        errors = exc.errors if isinstance(exc, BadFile) else [missing]
        _move(batch, Batch.Status.VALIDATING, status=Batch.Status.FAILED, failed_at=now, errors=errors)
        return
    if _move(batch, Batch.Status.VALIDATING, status=Batch.Status.IN_PROGRESS, in_progress_at=now, total=len(found)):
        _insert_lines(batch, found)
        log.info("batch_loaded", batch=batch.name, tenant_id=batch.tenant_id, lines=len(found))


def _insert_lines(batch: Batch, lines: list[ParsedLine]) -> None:
    columns = "batch_id, tenant_id, number, custom_id, byte_offset, size"
    with connection.cursor() as cursor, cursor.copy(f"COPY batches_line ({columns}) FROM STDIN") as copy:
        for line in lines:
            copy.write_row((batch.pk, batch.tenant_id, line.number, line.custom_id, line.byte_offset, line.size))


def _close(batch: Batch) -> None:
    """Start finalizing the batch if no line is open."""
    now = datetime.now(UTC)
    if batch.status != Batch.Status.IN_PROGRESS:
        return
    # NOTE: gateways lock the row while they claim its lines, so no claim is missed after this.
    Batch.objects.all_tenants().select_for_update().get(pk=batch.pk)
    open_lines = _match_running(now)
    if batch.expires_at > now:
        open_lines |= Q(state=Line.State.PENDING)
    if not Line.objects.all_tenants().filter(open_lines, batch=batch).exists():
        _move(batch, Batch.Status.IN_PROGRESS, status=Batch.Status.FINALIZING, finalizing_at=now)


def _match_running(now: datetime) -> Q:
    return Q(state=Line.State.RUNNING, lease_expires_at__gt=now - ABANDONED)


def _write_out(batch: Batch) -> None:
    now = datetime.now(UTC)
    lines = Line.objects.all_tenants().filter(batch=batch)
    cancelled = batch.status == Batch.Status.CANCELLING
    if not cancelled and batch.status != Batch.Status.FINALIZING:
        return
    if cancelled and lines.filter(_match_running(now)).exists():
        return
    counts, files, usage = _write_results(batch, "cancelled" if cancelled else "expired")
    if cancelled:
        done = {"status": Batch.Status.CANCELLED, "cancelled_at": now}
    elif counts["expired"]:
        done = {"status": Batch.Status.EXPIRED, "expired_at": now}
    else:
        done = {"status": Batch.Status.COMPLETED, "completed_at": now}
    _move(batch, Batch.Status(batch.status), **done, **counts, **files, usage=usage.as_json())
    lines.delete()
    log.info("batch_finished", batch=batch.name, tenant_id=batch.tenant_id, status=str(done["status"]), **counts)


def _write_results(batch: Batch, unanswered: str) -> tuple[dict[str, int], dict[str, str], BatchUsage]:
    """Write the result files. Returns the number of lines by how they ended, the files' names and the token usage."""
    usage = BatchUsage()
    counts = Counter({outcome: 0 for outcome in ("succeeded", "errored", "cancelled", "expired")})
    directory, names = storage(), {"output_file": new_name("file-"), "error_file": new_name("file-")}
    write = WRITERS[batch.dialect]
    lines = Line.objects.all_tenants().filter(batch=batch).order_by("number")
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for line in lines.iterator(chunk_size=200):
            outcome = line_outcome(line, unanswered)
            counts[outcome] += 1
            which = "output_file" if outcome == "succeeded" or batch.dialect == "anthropic" else "error_file"
            if which not in files:
                files[which] = stack.enter_context(directory.writing(names[which]))
            files[which].write(write(batch, line, outcome))
            if outcome == "succeeded" and line.answer is not None:
                usage.add(bytes(line.answer))
    purpose = File.Purpose.BATCH_OUTPUT if batch.dialect == "openai" else File.Purpose.MESSAGES_OUTPUT
    retention = RETENTION if batch.output_seconds is None else timedelta(seconds=batch.output_seconds)
    for which in files:
        File.objects.create(
            name=names[which],
            tenant_id=batch.tenant_id,
            project_id=batch.project_id,
            filename=f"{batch.name}_{which.removesuffix('_file')}.jsonl",
            purpose=purpose,
            size=directory.path(names[which]).stat().st_size,
            is_internal=batch.is_internal,
            expires_at=datetime.now(UTC) + retention,
        )
    return dict(counts), {which: names[which] for which in files}, usage


def _move(batch: Batch, before: Batch.Status, **fields: object) -> bool:
    """Update the batch if its status is still `before`. Returns False if a gateway has cancelled the batch."""
    return bool(Batch.objects.all_tenants().filter(pk=batch.pk, status=before).update(**fields))
