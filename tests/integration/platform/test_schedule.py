"""The periodic tasks that beat sends only if they have work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from django.db import OperationalError
from django.test import TestCase

from inference_worker.contract.credentials import WORKER_KEYS_KEY
from millrace.apps.batches.models import Batch
from millrace.conf import scheduler
from millrace.conf.active_beat import ActiveBeat
from millrace.conf.celery import app
from millrace.conf.scheduler import WORK_CHECKS, WorkScheduler, seconds_until_work
from millrace.conf.web_jobs import BeatThread, make_service
from tenants import jobs
from tenants.isolation.scopes import tenant_scope
from tenants.jobs import JobKind, JobResult, do_start_job, job_kind, run_jobs
from tenants.models import OutboxEmail, Tenant
from tenants.outbox.email_outbox import enqueue_email
from tenants.permissions import Permission
from tenants.work import WorkListener, publish_announcement

pytestmark = pytest.mark.django_db
ALWAYS = "billing-update-rollups"  # an entry without a check


@pytest.fixture(scope="module", autouse=True)
def tasks() -> None:
    """Import the modules of tasks, as beat and the web jobs do when they start."""
    app.loader.import_default_modules()


@pytest.fixture
def kind() -> Iterator[JobKind]:
    yield job_kind("tests.nothing", Permission.USAGE_READ)(lambda tenant, parameters: JobResult(""))
    del jobs._kinds["tests.nothing"]


@pytest.fixture
def schedule(db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkScheduler, list[str]]]:
    """Return an active scheduler of the platform's schedule, and the names of the entries that it has sent."""
    sent: list[str] = []
    monkeypatch.setattr(WorkScheduler, "apply_async", lambda self, entry, **_: sent.append(entry.name))
    found = WorkScheduler(app)
    found._active_beat = ActiveBeat(tmp_path)
    found._active_beat.keep(dict)
    yield found, sent
    found.close()


def entries_with_work() -> set[str]:
    arguments = {name: entry.get("args", ()) for name, entry in app.conf.beat_schedule.items()}
    return {name for name in WORK_CHECKS if seconds_until_work(name, tuple(arguments[name])) == 0}


def test_without_work_no_check_finds_any(broker: redis.Redis) -> None:
    assert len(WORK_CHECKS) == 6
    assert entries_with_work() == set()


def test_each_check_finds_its_work(acme: Tenant, kind: JobKind, broker: redis.Redis) -> None:
    do_start_job(acme, kind)
    assert entries_with_work() == {"tenants-run-jobs"}
    run_jobs()
    assert entries_with_work() == set()

    with tenant_scope(acme):
        enqueue_email(acme.pk, ["owner"], "Hello", "Text")
    assert entries_with_work() == {"tenants-deliver-email"}
    with tenant_scope(acme):
        OutboxEmail.objects.for_tenant(acme).update(next_attempt_at=datetime.now(UTC) + timedelta(minutes=1))
    assert entries_with_work() == set()

    with tenant_scope(acme):
        batch = Batch.objects.create(
            name="batch_1",
            tenant_id=acme.pk,
            project_id=1,
            key_id=1,
            endpoint="/v1/embeddings",
            input_file="file-1",
            expires_at=datetime.now(UTC) + timedelta(days=1),
        )
    assert entries_with_work() == {"batches-process"}
    with tenant_scope(acme):
        Batch.objects.for_tenant(acme).filter(pk=batch.pk).update(status=Batch.Status.COMPLETED)
    assert entries_with_work() == set()

    broker.sadd(WORKER_KEYS_KEY, "worker-0.1")
    assert entries_with_work() == {"tenants-deliver-credentials"}


def test_a_message_that_waits_is_checked_when_it_is_due(acme: Tenant) -> None:
    with tenant_scope(acme):
        enqueue_email(acme.pk, ["owner"], "Hello", "Text")
        OutboxEmail.objects.for_tenant(acme).update(next_attempt_at=datetime.now(UTC) + timedelta(minutes=1))
    assert seconds_until_work("tenants-deliver-email", ("email",)) == pytest.approx(60, abs=5)
    assert seconds_until_work("tenants-deliver-webhook", ("webhook",)) is None


def test_beat_sends_what_has_work(
    acme: Tenant, kind: JobKind, schedule: tuple[WorkScheduler, list[str]], broker: redis.Redis
) -> None:
    found, sent = schedule
    do_start_job(acme, kind)
    seconds = found.check_work()
    assert sent == ["tenants-run-jobs"]
    assert 0 < seconds <= 1  # its interval, while it has work
    found.apply_entry(found.schedule[ALWAYS])
    assert sent == ["tenants-run-jobs", ALWAYS]


def test_the_heap_has_no_entry_with_a_check(schedule: tuple[WorkScheduler, list[str]]) -> None:
    found, _ = schedule
    found.populate_heap()
    assert {event.entry.name for event in found._heap} == set(found.schedule) - set(WORK_CHECKS)


def test_an_announcement_ends_the_rest(
    acme: Tenant,
    kind: JobKind,
    schedule: tuple[WorkScheduler, list[str]],
    broker: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "REST_SECONDS", 3600.0)
    found, sent = schedule
    found._wait(0)  # it subscribes
    found.check_work()
    do_start_job(acme, kind)
    publish_announcement()
    while not sent:
        found._wait(found.check_work())
    assert set(sent) == {"tenants-run-jobs"}


def test_a_stored_job_is_announced(acme: Tenant, kind: JobKind, broker: redis.Redis) -> None:
    listener = WorkListener()
    assert listener.wait(0)  # perhaps before the subscription
    with TestCase.captureOnCommitCallbacks(execute=True):
        do_start_job(acme, kind)
    assert any(listener.wait(1) for _ in range(3))


def test_a_task_whose_check_fails_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise OperationalError("the server is starting")

    monkeypatch.setattr(scheduler, "import_string", fail)
    assert entries_with_work() == set(WORK_CHECKS)


def test_the_thread_uses_the_scheduler() -> None:
    assert isinstance(make_service().get_scheduler(lazy=True), WorkScheduler)


class FakeService:
    """Beat's service. It ends after `stop`, or immediately with an error."""

    def __init__(self, *, is_broken: bool) -> None:
        self._is_broken = is_broken
        self._stopping = threading.Event()

    def start(self) -> None:
        if self._is_broken:
            raise RuntimeError("a bug")
        self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


@pytest.mark.parametrize(("is_broken", "statuses"), [(True, [os.EX_SOFTWARE]), (False, [])])
def test_the_process_ends_if_beat_fails(is_broken: bool, statuses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("millrace.conf.web_jobs.os._exit", ended.append)
    thread = BeatThread(FakeService(is_broken=is_broken))
    thread.start()
    if is_broken:
        thread.join()
    else:
        thread.stop()
    assert not thread.is_alive()
    assert ended == statuses
