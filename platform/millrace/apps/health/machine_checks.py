"""Health checks of the machines: their disks, and the processes of `millrace up`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from django.conf import settings

from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.texts import Text
from millrace.apps.deployments.fleet_status import FleetStatus
from millrace.apps.health.issues import HealthIssue, IssueType
from millrace.environment.disk_reserve import watched_directories
from millrace.environment.host_reports import HostReport, report_host

MANY_RESTARTS = 3  # recent restarts of a running process
MAX_PROCESS_NAME = 60  # characters of the name in a subject, which also has a host and at most 128 characters


def find_hosts(board: FleetStatus | None) -> list[HostReport]:
    """Return the state of this machine and of those with a gateway. `board`: None without Valkey."""
    found: dict[str, HostReport] = {}
    for gateway in board.gateways if board is not None else ():
        if gateway.presence.host is not None:  # None: a gateway of an earlier release
            found[gateway.presence.host.name] = gateway.presence.host
    platform = settings.MILLRACE
    space = FreeSpace(watched_directories(platform.data_dir), platform.min_free_disk)
    space.look()
    own = report_host(platform.data_dir, space)
    return list((found | {own.name: own}).values())


def _check_disk(host: HostReport) -> Iterator[HealthIssue]:
    if host.free < host.resume_at:
        yield HealthIssue(
            IssueType.DISK,
            host.name,
            urgent=host.is_disk_low,
            title=Text(
                "Disk of %(host)s almost full: %(free)s MiB free",
                host=host.name,
                free=host.free // 2**20,
            ),
            todo=Text(
                "Below %(min_free)s MiB new requests are rejected with 503 until %(resume_at)s MiB are free. Free"
                " space on the disk of the data directory.",
                min_free=host.min_free // 2**20,
                resume_at=host.resume_at // 2**20,
            ),
        )


def _check_processes(host: HostReport) -> Iterator[HealthIssue]:
    """Yield processes of `millrace up` that are down, or were restarted several times recently."""
    for process in host.read_processes():
        if process.running and process.deaths < MANY_RESTARTS:
            continue
        yield HealthIssue(
            IssueType.PROCESS,
            f"{process.name[:MAX_PROCESS_NAME]} on {host.name}",
            urgent=not process.running,
            title=Text("%(name)s on %(host)s: %(state)s", name=process.name, host=host.name, state=process.describe()),
            todo=Text(
                "The process restarts automatically. Check the end of its log (%(name)s.log).", name=process.name
            ),
        )


CHECKS: tuple[Callable[[HostReport], Iterable[HealthIssue]], ...] = (_check_disk, _check_processes)
