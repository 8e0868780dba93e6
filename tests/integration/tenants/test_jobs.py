"""Jobs of tenants: stored by requests, run by web jobs, and seen only by those who may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tenants import actions, audit, jobs, tasks
from tenants.actions.common import ActionRefused
from tenants.jobs import JobKind, JobResult, do_start_job, job_kind, json_result
from tenants.models import Tenant, TenantJob
from tenants.permissions import Permission
from tests.support.rows import of, unscoped
from tests.support.tenants.management_api import by_key, by_role

pytestmark = pytest.mark.django_db
LARGE = "large"
REFUSED, BROKEN = "refused", "broken"


@pytest.fixture
def kind() -> Iterator[JobKind]:
    """Return a kind of job that returns its parameters, its tenant and its actor."""

    @job_kind("tests.echo", Permission.USAGE_READ)
    def echo(tenant: Tenant, parameters: Mapping[str, Any]) -> JobResult:
        match parameters.get("do"):
            case "refused":
                raise ActionRefused("The period is too long.")
            case "broken":
                raise RuntimeError("a bug")
            case "large":
                return JobResult("x" * (jobs.MAX_RESULT_BYTES + 1))
            case "file":
                return JobResult("a,b\r\n", "text/csv", "rows.csv")
        return json_result({**parameters, "tenant": tenant.slug, "actor": audit.current_actor().name})

    yield echo
    del jobs._kinds["tests.echo"]


def test_a_job_runs_once_as_the_actor_who_started_it(acme: Tenant, kind: JobKind) -> None:
    with audit.actor_context(audit.Actor("jo@acme.example", user_id=7)):
        job = do_start_job(acme, kind, {"n": 1})
    client = by_key(acme)
    queued = client.get(f"/api/jobs/{job.pk}").json()
    assert (queued["status"], queued["parameters"], queued["started_at"]) == ("queued", {"n": 1}, None)
    assert client.get(f"/api/jobs/{job.pk}/result").status_code == 409
    assert (tasks.run_jobs(), tasks.run_jobs()) == (1, 0)
    ended = client.get(f"/api/jobs/{job.pk}").json()
    assert (ended["status"], ended["error"]) == ("completed", "")
    assert ended["ended_at"] >= ended["started_at"]
    assert client.get(f"/api/jobs/{job.pk}/result").json() == {"n": 1, "tenant": "acme", "actor": "jo@acme.example"}


def test_the_result_may_be_a_file(acme: Tenant, kind: JobKind) -> None:
    job = do_start_job(acme, kind, {"do": "file"})
    jobs.run_jobs()
    response = by_key(acme).get(f"/api/jobs/{job.pk}/result")
    assert (response["content-type"], response.content) == ("text/csv", b"a,b\r\n")
    assert response["content-disposition"] == 'attachment; filename="rows.csv"'


@pytest.mark.parametrize(
    ("do", "error"),
    [("refused", "The period is too long."), ("broken", jobs.INTERNAL_ERROR), ("large", "The result is larger than")],
)
def test_a_failed_job_has_an_error_and_the_others_run(acme: Tenant, kind: JobKind, do: str, error: str) -> None:
    first, second = do_start_job(acme, kind, {"do": do}), do_start_job(acme, kind)
    assert jobs.run_jobs() == 2
    found = {row.pk: row for row in of(TenantJob, acme)}
    assert found[first.pk].status == "failed" and found[first.pk].error.startswith(error)
    assert found[second.pk].status == "completed"
    assert by_key(acme).get(f"/api/jobs/{first.pk}/result").status_code == 409


def test_an_equal_queued_job_is_reused_and_the_unfinished_ones_are_bounded(acme: Tenant, kind: JobKind) -> None:
    first = do_start_job(acme, kind, {"n": 0})
    assert do_start_job(acme, kind, {"n": 0}).pk == first.pk
    for n in range(1, jobs.MAX_OPEN):
        do_start_job(acme, kind, {"n": n})
    with pytest.raises(jobs.TooManyJobs):
        do_start_job(acme, kind, {"n": -1})
    do_start_job(actions.do_create_tenant("other", "Other"), kind)
    assert jobs.run_jobs() == jobs.MAX_OPEN + 1
    for n in range(2 * jobs.MAX_STORED):
        do_start_job(acme, kind, {"n": n})
        jobs.run_jobs()
    assert len(of(TenantJob, acme)) <= jobs.MAX_STORED


def test_one_job_of_a_tenant_runs_at_a_time(acme: Tenant, kind: JobKind) -> None:
    now = datetime.now(UTC)
    ours = [do_start_job(acme, kind, {"n": n}) for n in range(2)]
    theirs = do_start_job(actions.do_create_tenant("other", "Other"), kind)
    claimed = [jobs._claim(now) for _ in range(3)]
    assert [None if job is None else job.pk for job in claimed] == [ours[0].pk, theirs.pk, None]
    assert claimed[0] is not None
    jobs._run(claimed[0])
    next_job = jobs._claim(now)
    assert next_job is not None and next_job.pk == ours[1].pk


def test_an_interrupted_job_runs_again_and_then_fails(acme: Tenant, kind: JobKind) -> None:
    job = do_start_job(acme, kind)
    now = datetime.now(UTC) - 3 * jobs.LEASE
    interrupted = jobs._claim(now)
    assert interrupted is not None and jobs._claim(now + jobs.LEASE / 2) is None
    assert jobs._claim(now + 1.5 * jobs.LEASE) is not None
    assert jobs.run_jobs() == 1
    (row,) = of(TenantJob, acme)
    assert (row.pk, row.status, row.error) == (job.pk, "failed", jobs.INTERRUPTED)
    jobs._run(interrupted)  # it continues after all, and its lease has ended
    assert of(TenantJob, acme)[0].status == "failed"


def test_a_job_is_seen_only_with_its_permission_and_in_its_tenant(acme: Tenant, kind: JobKind) -> None:
    @job_kind("tests.secret", Permission.CREDENTIALS_READ)
    def secret(tenant: Tenant, parameters: Mapping[str, Any]) -> JobResult:
        return json_result("secret")

    seen, hidden = do_start_job(acme, kind), do_start_job(acme, secret)
    jobs.run_jobs()
    del jobs._kinds["tests.secret"]
    developer, other = by_role(acme, "developer"), by_key(actions.do_create_tenant("other", "Other"))
    assert [row["id"] for row in developer.get("/api/jobs").json()["results"]] == [seen.pk]
    assert [row["id"] for row in by_key(acme).get("/api/jobs?kind=tests.secret").json()["results"]] == [hidden.pk]
    assert other.get("/api/jobs").json()["results"] == []
    for client, pk in ((developer, hidden.pk), (other, seen.pk), (other, hidden.pk), (developer, hidden.pk + 1)):
        for url in (f"/api/jobs/{pk}", f"/api/jobs/{pk}/result"):
            response = client.get(url)
            assert (response.status_code, response.json()["detail"]) == (404, "Not found."), url


def test_jobs_are_removed_after_a_day(acme: Tenant, kind: JobKind) -> None:
    do_start_job(acme, kind)
    jobs.run_jobs()
    jobs.remove_old_jobs(datetime.now(UTC) + timedelta(hours=23))
    assert unscoped(TenantJob).count() == 1
    jobs.remove_old_jobs(datetime.now(UTC) + timedelta(hours=25))
    assert unscoped(TenantJob).count() == 0
