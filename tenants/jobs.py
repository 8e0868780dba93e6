"""Jobs of tenants: slow work of the management API and the console, which web jobs do outside of the gateway.

A module defines a kind of job with `@job_kind(name, permission)`, and a web job's `tasks` module imports it.
`do_start_job` stores a job, the web job `tenants.run_jobs` runs it, and `GET /api/jobs/{id}` reports its state. A job
that was interrupted runs again. Therefore its function must be safe to run again, also concurrently with itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection

from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, locked_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, TenantJob
from tenants.permissions import Permission
from tenants.work import announce_work

log = structlog.get_logger(__name__)

MAX_OPEN = 3  # unfinished jobs of a tenant
MAX_STORED = 20  # jobs of a tenant
MAX_RESULT_BYTES = 8 * 2**20
MAX_RUNNING = 2  # in one process of the web jobs, whose other threads are for periodic jobs
MAX_ATTEMPTS = 2
LEASE = timedelta(minutes=15)  # after that, a running job counts as interrupted
RETENTION = timedelta(days=1)
STATEMENT_TIMEOUT_SECONDS = 120
INTERNAL_ERROR = Text("The job failed because of an internal error.")
INTERRUPTED = Text("The job was interrupted.")
_OPEN = (TenantJob.Status.QUEUED, TenantJob.Status.RUNNING)
_RUNNING = threading.BoundedSemaphore(MAX_RUNNING)
# One job of a tenant at a time.
_WAITING = """
tenants_tenantjob j WHERE (j.status = 'queued' OR j.status = 'running' AND j.started_at < %(lost)s) AND NOT EXISTS (
    SELECT FROM tenants_tenantjob r
    WHERE r.tenant_id = j.tenant_id AND r.status = 'running' AND r.started_at >= %(lost)s)
"""
_CLAIM = f"""
UPDATE tenants_tenantjob SET status = 'running', started_at = %(now)s, attempts = attempts + 1
WHERE id = (SELECT j.id FROM {_WAITING} ORDER BY j.id LIMIT 1) RETURNING id
"""  # noqa: S608


class TooManyJobs(ActionRefused):
    """An error of a job that cannot be stored, because too many jobs of the tenant are unfinished."""


@dataclass(frozen=True)
class JobResult:
    """What a job has computed: JSON, or the text of a file."""

    text: str
    content_type: str = "application/json"
    filename: str = ""


def json_result(value: Any) -> JobResult:
    """Return the result of a job that computes a JSON value."""
    return JobResult(json.dumps(value, cls=DjangoJSONEncoder))


JobFunction = Callable[[Tenant, Mapping[str, Any]], JobResult]


@dataclass(frozen=True)
class JobKind:
    """What a job does. `permission` is needed to see a job of this kind."""

    name: str
    permission: Permission
    run: JobFunction


_kinds: dict[str, JobKind] = {}


def job_kind(name: str, permission: Permission) -> Callable[[JobFunction], JobKind]:
    """Make a function of a tenant and of JSON parameters a kind of job. It runs outside of a scope."""

    def register(run: JobFunction) -> JobKind:
        kind = _kinds[name] = JobKind(name, permission, run)
        return kind

    return register


def do_start_job(tenant: Tenant, kind: JobKind, parameters: Mapping[str, Any] | None = None) -> TenantJob:
    """Store a job, which a web job then runs. An equal job that is queued is returned instead.

    Raises:
        TooManyJobs: the tenant has `MAX_OPEN` unfinished jobs. Conflict: the tenant no longer exists.
    """
    given = dict(parameters or {})
    with locked_tenant(tenant) as locked:
        rows = TenantJob.objects.for_tenant(locked)
        queued = rows.filter(status=TenantJob.Status.QUEUED, kind=kind.name, parameters=given).first()
        if queued is not None:
            return queued
        if rows.filter(status__in=_OPEN).count() >= MAX_OPEN:
            text = Text("%(number)s jobs are unfinished. Wait until one of them has ended.", number=MAX_OPEN)
            raise TooManyJobs(text)
        ended = rows.exclude(status__in=_OPEN).order_by("-pk").values_list("pk", flat=True)
        rows.filter(pk__in=list(ended[MAX_STORED - MAX_OPEN :])).delete()
        announce_work()
        return TenantJob.objects.create(
            tenant=locked,
            kind=kind.name,
            permission=kind.permission.value,
            parameters=given,
            actor=asdict(audit.current_actor()),
        )


def seconds_until_job() -> float | None:
    """Return 0 if a job can be claimed, otherwise None."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute(f"SELECT EXISTS (SELECT FROM {_WAITING})", {"lost": datetime.now(UTC) - LEASE})  # noqa: S608
        return 0.0 if cursor.fetchone()[0] else None


def run_jobs() -> int:
    """Run the jobs that wait, unless `MAX_RUNNING` threads of this process do so. Return their number."""
    if not _RUNNING.acquire(blocking=False):
        return 0
    count = 0
    try:
        while (job := _claim(datetime.now(UTC))) is not None:
            _run(job)
            count += 1
    finally:
        _RUNNING.release()
    return count


def _claim(now: datetime) -> TenantJob | None:
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended('tenant jobs', 0))")  # one claim at a time
        cursor.execute(_CLAIM, {"now": now, "lost": now - LEASE})
        found = cursor.fetchone()
        rows = TenantJob.objects.all_tenants().select_related("tenant").defer("result")
        return None if found is None else rows.get(pk=found[0])


def _run(job: TenantJob) -> None:
    """Run a claimed job, and store how it has ended. A job whose lease has ended changes nothing."""
    fields: dict[str, Any] = {"status": TenantJob.Status.FAILED}
    try:
        with audit.actor_context(audit.Actor(**job.actor)), _limited_statements():
            result = _result_of(job)
        fields = {"status": TenantJob.Status.COMPLETED, "result": result.text, "filename": result.filename}
        fields["content_type"] = result.content_type
    except ActionRefused as exc:
        fields["error"] = text_of(exc)
    except Exception:  # the other jobs must run
        log.exception("tenant_job_failed", job=job.pk, kind=job.kind, tenant_id=job.tenant_id)
        fields["error"] = INTERNAL_ERROR
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        rows = TenantJob.objects.all_tenants().filter(pk=job.pk, status="running", started_at=job.started_at)
        rows.update(**fields, ended_at=datetime.now(UTC))


def _result_of(job: TenantJob) -> JobResult:
    """Run a job and return its result.

    Raises:
        ActionRefused: it cannot be run, or its result is too large.
    """
    if job.attempts > MAX_ATTEMPTS:
        raise ActionRefused(INTERRUPTED)
    result = _kinds[job.kind].run(job.tenant, job.parameters)
    if len(result.text.encode()) > MAX_RESULT_BYTES:
        raise ActionRefused(
            Text(
                "The result is larger than %(max_result_bytes)s bytes. Choose a shorter period.",
                max_result_bytes=MAX_RESULT_BYTES,
            )
        )
    return result


@contextmanager
def _limited_statements() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('statement_timeout', %s, false)", [f"{STATEMENT_TIMEOUT_SECONDS}s"])
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET statement_timeout")


def remove_old_jobs(now: datetime) -> None:
    """Remove the jobs of all tenants that are older than `RETENTION`."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        TenantJob.objects.all_tenants().filter(created_at__lt=now - RETENTION).exclude(
            status=TenantJob.Status.RUNNING, started_at__gt=now - LEASE
        ).delete()
