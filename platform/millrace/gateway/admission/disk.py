"""Refusal of new requests while a disk of the platform is almost full. Requests that run are not affected."""

from __future__ import annotations

import asyncio

from inference_worker.contract.disk import FreeSpace
from millrace.conf.environment import PlatformSettings
from millrace.devserver.disk_reserve import watched_folders
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError

LOOK_SECONDS = 1.0
RETRY_SECONDS = 10.0


class DiskWatch:
    """Free space of the disks with the data directory and the embedded PostgreSQL, read once a second."""

    def __init__(self, settings: PlatformSettings) -> None:
        self._space = FreeSpace(watched_folders(settings.data_dir), settings.min_free_disk)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._space.look()
        self._tasks = [asyncio.create_task(self._run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    def require_space(self) -> None:
        """Refuse new work while the disk is almost full.

        Raises:
            ApiError: 503, with when to try again.
        """
        if self._space.is_low:
            message = "The service is out of disk space and takes no new requests; please try again later."
            raise ApiError(OVERLOADED, message, retry_after=RETRY_SECONDS)

    def check(self) -> str:
        """Return `ok`, or what is wrong."""
        return self._space.describe()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self._space.look)  # a network disk may not answer
