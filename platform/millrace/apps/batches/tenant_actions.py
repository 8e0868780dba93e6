"""Actions of a tenant's users on files and batches. Gateways have the same actions for API keys.

A file's contents are stored before its row is written, so a row always has contents. Contents without a row, which a
crash leaves, are removed by a periodic job.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Sum

from inference_worker.contract.texts import Text
from millrace.apps.batches.actions import LIVE, RETENTION, storage
from millrace.apps.batches.models import Batch, File
from millrace.apps.batches.reading import MAX_FILE_BYTES, MAX_LINES
from millrace.apps.batches.storage import new_name
from tenants import audit
from tenants.actions import Conflict
from tenants.actions.common import ActionRefused, FieldRefused
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey, Project, Tenant
from tenants.work import announce_work

WINDOW = timedelta(days=1)
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
_CANCELLABLE = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS)


def do_upload_file(project: Project, filename: str, chunks: Iterable[bytes], *, is_internal: bool = False) -> File:
    """Store an input file of batches.

    Args:
        is_internal: the platform made it; neither the API nor the console shows it.

    Raises:
        FieldRefused: the file is empty or too large. Conflict: the tenant's file quota would be exceeded.
    """
    name, size, lines, last = new_name("file-"), 0, 0, b"\n"
    directory, quota = storage(), settings.MILLRACE.tenant_file_quota_bytes
    with tenant_scope(project.tenant_id):
        _require_quota(project.tenant_id, 1, quota)
    with directory.writing(name) as target:
        for chunk in chunks:
            size += len(chunk)
            lines += chunk.count(b"\n")
            last = chunk[-1:] or last
            if size > MAX_FILE_BYTES:
                raise FieldRefused(
                    "file",
                    "too_large",
                    Text("A file may have at most %(max_file_bytes)s bytes.", max_file_bytes=MAX_FILE_BYTES),
                )
            if lines > MAX_LINES:
                raise FieldRefused(
                    "file",
                    "too_many_lines",
                    Text("A batch file may have at most %(max_lines)s lines.", max_lines=MAX_LINES),
                )
            target.write(chunk)
        if not size:
            raise FieldRefused("file", "empty", Text("The file is empty."))
    try:
        with tenant_scope(project.tenant_id):
            # Serialized per tenant, so that concurrent uploads cannot exceed the quota together.
            _lock_files(project.tenant_id)
            _require_quota(project.tenant_id, size, quota)
            row = File.objects.create(
                name=name,
                tenant_id=project.tenant_id,
                project_id=project.pk,
                filename=filename[:255],
                purpose=File.Purpose.BATCH,
                size=size,
                is_internal=is_internal,
                expires_at=datetime.now(UTC) + RETENTION,
            )
            row.refresh_from_db()
            after = {"filename": row.filename, "size": size, "project_id": project.pk}
            audit.record("file.created", row, tenant_id=project.tenant_id, after=after)
    except ActionRefused:
        directory.remove(name)
        raise
    return row


def _lock_files(tenant_id: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended('files ' || %s, 0))", [str(tenant_id)])


def _require_quota(tenant_id: int, size: int, quota: int) -> None:
    used = File.objects.for_tenant(tenant_id).aggregate(sum=Sum("size"))["sum"] or 0
    if used + size > quota:
        raise Conflict(Text("Your files may total %(quota)s bytes. Delete some files first.", quota=quota))


def do_delete_file(file: File) -> None:
    """Delete a file that no running batch reads.

    Raises:
        Conflict: an unfinished batch reads the file.
    """
    with tenant_scope(file.tenant_id):
        # The lock that a new batch takes on its input file.
        if File.objects.for_tenant(file.tenant_id).select_for_update().filter(pk=file.pk).first() is None:
            return
        batch = Batch.objects.for_tenant(file.tenant_id).filter(input_file=file.name, status__in=LIVE).first()
        if batch is not None:
            raise Conflict(Text("The batch %(name)s is reading this file.", name=batch.name))
        before = {"filename": file.filename, "size": file.size, "project_id": file.project_id}
        audit.record("file.deleted", file, tenant_id=file.tenant_id, before=before)
        File.objects.for_tenant(file.tenant_id).filter(pk=file.pk).delete()
    storage().remove(file.name)


def do_create_batch(tenant: Tenant, file_name: str, key: ApiKey, endpoint: str) -> Batch:
    """Create a batch of a file's requests, which run with `key`.

    Raises:
        FieldRefused: the file does not exist in the key's project, or the endpoint is unknown.
    """
    if endpoint not in ENDPOINTS:
        raise FieldRefused(
            "endpoint", "unknown", Text("The endpoint must be one of %(endpoints)s.", endpoints=", ".join(ENDPOINTS))
        )
    if not key.is_live or "inference" not in key.scopes:
        raise FieldRefused("key", "not_usable", Text("This key was revoked or has no inference permission."))
    now = datetime.now(UTC)
    with tenant_scope(tenant):
        # Held until the batch exists, so that a concurrent deletion of the file sees the batch.
        files = File.objects.for_tenant(tenant).filter(
            purpose=File.Purpose.BATCH, is_internal=False, expires_at__gt=now
        )
        row = files.select_for_update().filter(name=file_name, project_id=key.project_id).first()
        if row is None:
            raise FieldRefused("file", "not_found", Text("This file does not exist in the key’s project."))
        batch = Batch.objects.create(
            name=new_name("batch_"),
            tenant_id=tenant.pk,
            project_id=key.project_id,
            key_id=key.pk,
            dialect="openai",
            endpoint=endpoint,
            input_file=row.name,
            expires_at=now + WINDOW,
        )
        announce_work()
        batch.refresh_from_db()
        after = {"input_file": row.name, "endpoint": endpoint, "key_id": key.pk}
        audit.record("batch.created", batch, tenant_id=tenant.pk, after=after)
    return batch


def do_cancel_batch(batch: Batch) -> None:
    """Cancel the requests of a batch that have not started. Cancelling a cancelled batch changes nothing.

    Raises:
        Conflict: the batch has ended.
    """
    with tenant_scope(batch.tenant_id):
        rows = Batch.objects.for_tenant(batch.tenant_id).filter(pk=batch.pk)
        cancelling = {"status": Batch.Status.CANCELLING, "cancelling_at": datetime.now(UTC)}
        current = rows.select_for_update().get()
        if current.status in (Batch.Status.CANCELLING, Batch.Status.CANCELLED):
            return
        if current.status not in _CANCELLABLE:
            raise Conflict(
                Text(
                    "A batch with the status %(status_display)s cannot be cancelled.",
                    status_display=current.get_status_display(),
                )
            )
        rows.update(**cancelling)
        before, after = {"status": current.status}, {"status": str(Batch.Status.CANCELLING)}
        audit.record("batch.cancelled", batch, tenant_id=batch.tenant_id, before=before, after=after)
