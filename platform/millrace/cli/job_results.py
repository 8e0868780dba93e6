"""Results of the management API's jobs, for commands that start one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.client.models import TenantJob

POLL_SECONDS = 0.5
MAX_WAIT_SECONDS = 1800


def wait_for_result(client: Client, job: TenantJob) -> Any:
    """Wait until a job has ended, and return its result.

    Raises:
        ClickException: it failed, or takes too long.
    """
    until = time.monotonic() + MAX_WAIT_SECONDS
    while job["status"] not in ("completed", "failed"):
        if time.monotonic() > until:
            raise click.ClickException(f"The job has not ended. Get its state later: GET /api/jobs/{job['id']}.")
        time.sleep(POLL_SECONDS)
        job = client.jobs.get(job["id"])
    if job["status"] == "failed":
        raise click.ClickException(job["error"])
    return client.jobs.result(job["id"])
