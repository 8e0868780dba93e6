"""Rejection of new requests while a disk of the platform is almost full. Active requests are not affected.

The state of the machine is read with the free space, for the gateway's heartbeat.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from inference_worker.contract.disk import FreeSpace
from millrace.environment.disk_reserve import watched_directories
from millrace.environment.host_reports import HostReport, report_host
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError

CHECK_SECONDS = 1.0
RETRY_SECONDS = 10.0


class DiskWatch:
    """The free space of the disks with the data directory and the embedded PostgreSQL, read once a second."""

    def __init__(self, data_dir: Path, min_free: int, activity: Activity | None = None) -> None:
        """
        Args:
            data_dir: the platform's data directory.
            min_free: bytes below which requests are rejected.
        """
        self._data_dir = data_dir
        self._space = FreeSpace(watched_directories(data_dir), min_free)
        self.report: HostReport | None = None  # state of this machine at the last look
        self._pauses = Poll(activity)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._look()
        self._tasks = [asyncio.create_task(self._run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    def require_space(self) -> None:
        """Check that there is enough disk space for new work.

        Raises:
            ApiError: 503 with a retry time.
        """
        if self._space.is_low:
            message = "The service is out of disk space and accepts no new requests. Retry later."
            raise ApiError(OVERLOADED, message, retry_after=RETRY_SECONDS)

    def check(self) -> str:
        """Return `ok`, or a description of the problem."""
        return self._space.describe()

    async def _run(self) -> None:
        while True:
            await self._pauses.pause(CHECK_SECONDS)
            await asyncio.to_thread(self._look)  # a network disk may block

    def _look(self) -> None:
        self._space.look()
        self.report = report_host(self._data_dir, self._space)
