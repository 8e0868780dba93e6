"""Concurrent calls, each with its own database connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connection

from tenants.actions import ActionRefused


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Start all functions at the same time, and return their results or exceptions."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        try:
            start.wait()
            return act()
        except ActionRefused as exc:
            return exc
        finally:
            connection.close()

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


def run_in_threads(jobs: list[Callable[[], object]], threads: int = 6) -> list[object]:
    """Run the functions in threads with separate connections; return their results or exceptions."""

    def run(job: Callable[[], object]) -> object:
        try:
            return job()
        except Exception as exc:  # noqa: BLE001
            return exc
        finally:
            connection.close()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, jobs))
