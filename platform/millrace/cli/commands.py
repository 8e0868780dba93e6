"""Short-lived child processes of `millrace up`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from millrace.local.program import Program
from millrace.local.supervisor import describe_exit, tail


class CommandFailed(Exception):
    """Raised if a command fails. The message contains the end of its log."""


async def run(program: Program, logs: Path, on_line: Callable[[str], None] | None = None) -> list[str]:
    """Run a program to its end and return the lines of its standard output. Its standard error goes to its log.

    Raises:
        CommandFailed: its exit status is not 0.
    """
    name = program.argv[3] if program.name == "django" else program.name.rpartition(".")[2]
    path = logs / f"{name}.log"
    lines: list[str] = []
    with path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *program.argv, stdout=asyncio.subprocess.PIPE, stderr=log, **program.popen_options()
        )
        assert process.stdout is not None  # noqa: S101  (requested above)
        try:
            async for raw in process.stdout:
                lines.append(raw.decode(errors="replace").rstrip("\n"))
                if on_line:
                    on_line(lines[-1])
            status = await process.wait()
        finally:
            if process.returncode is None:  # this task was cancelled
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    if status:
        raise CommandFailed(f"{name} {describe_exit(status)}\n{tail(path)}")
    return lines
