"""Helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

RETRY_SECONDS = 0.1


class BackgroundTasks:
    """Tasks that no request waits for. They are awaited before the gateway stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until no task runs."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and return when all have ended.

    The cancellation is repeated, because redis-py swallows one that arrives while it connects.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=RETRY_SECONDS)


async def run_for(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Run the coroutine for at most this time. Return whether it has ended.

    Otherwise it is cancelled, and its end is not waited for.
    """
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait([task], timeout=seconds)
    if task.done():
        task.result()
    else:
        task.cancel()
    return task.done()


async def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run the coroutine to its end, also if this task is cancelled meanwhile. Only for short cleanups.

    Raises:
        asyncio.CancelledError: after the end, if this task was cancelled.
    """
    task, cancelled = asyncio.ensure_future(coroutine), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    task.result()
    if cancelled is not None:
        raise cancelled
