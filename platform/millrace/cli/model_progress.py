"""The progress of a download or a verification, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Return a function that shows (file, bytes done, bytes in total). Without a terminal, it shows nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield show
