"""The job that writes the CSV of the cost explorer, if it is too large for the response to a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from billing.metering.usage import TooManyRows
from inference_worker.contract.texts import Text
from millrace.apps.request_log.segment_files import SegmentFile, segments_csv
from tenants.actions import ActionRefused
from tenants.isolation.scopes import tenant_scope
from tenants.jobs import JobResult, do_start_job, job_kind
from tenants.models import Tenant, TenantJob
from tenants.permissions import Permission

MAX_DIRECT_CELLS = 50_000  # cells of a file that one request writes


@job_kind("usage.segments", Permission.USAGE_READ)
def write_segments(tenant: Tenant, parameters: Mapping[str, Any]) -> JobResult:
    """Write the file of a question. Returns its CSV.

    Raises:
        ActionRefused: the period has too many sums.
    """
    file = msgspec.convert(parameters["file"], SegmentFile)
    try:
        with tenant_scope(tenant):
            text = segments_csv(file)
    except TooManyRows as exc:
        raise ActionRefused(Text("The export would have too many rows. Choose a shorter period.")) from exc
    return JobResult(text, "text/csv; charset=utf-8", parameters["filename"])


def start_export(tenant: Tenant, file: SegmentFile, filename: str) -> TenantJob:
    """Start to write the file.

    Raises:
        TooManyJobs: too many jobs of the tenant are unfinished. Conflict: the tenant no longer exists.
    """
    return do_start_job(tenant, write_segments, {"file": msgspec.to_builtins(file), "filename": filename})


def exports_of(tenant: Tenant) -> list[TenantJob]:
    """Return the exports of the last day, newest first, without their contents. The scope must be open."""
    return list(TenantJob.objects.for_tenant(tenant).filter(kind=write_segments.name).order_by("-pk").defer("result"))


def find_export(tenant: Tenant, pk: int) -> TenantJob | None:
    """Return a completed export; None if there is none. The scope must be open."""
    rows = TenantJob.objects.for_tenant(tenant).filter(kind=write_segments.name, status=TenantJob.Status.COMPLETED)
    return rows.filter(pk=pk).first()
