"""Health checks of this machine: its disk, and the processes of `millrace up`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from django.conf import settings

from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.texts import Text
from millrace.apps.health.issues import HealthIssue, IssueType
from millrace.environment.disk_reserve import watched_directories
from millrace.environment.processes import read_processes

MANY_RESTARTS = 3  # recent restarts of a running process


def _check_disk() -> Iterator[HealthIssue]:
    platform = settings.MILLRACE
    space = FreeSpace(watched_directories(platform.data_dir), platform.min_free_disk)
    is_low = space.look()
    if space.free < space.resume_at:
        yield HealthIssue(
            IssueType.DISK,
            "",
            urgent=is_low,
            title=Text("Disk almost full: %(free)s MiB free", free=space.free // 2**20),
            todo=Text(
                "Below %(min_free)s MiB new requests are rejected with 503 until %(resume_at)s MiB are free. Free"
                " space on the disk of the data directory.",
                min_free=space.min_free // 2**20,
                resume_at=space.resume_at // 2**20,
            ),
        )


def _check_processes() -> Iterator[HealthIssue]:
    """Yield processes of `millrace up` that are down, or were restarted several times recently."""
    for process in read_processes(settings.MILLRACE.data_dir):
        if process.running and process.deaths < MANY_RESTARTS:
            continue
        yield HealthIssue(
            IssueType.PROCESS,
            process.name,
            urgent=not process.running,
            title=Text("%(name)s: %(state)s", name=process.name, state=process.describe()),
            todo=Text(
                "The process restarts automatically. Check the end of its log (%(name)s.log).", name=process.name
            ),
        )


CHECKS: tuple[Callable[[], Iterable[HealthIssue]], ...] = (_check_disk, _check_processes)
