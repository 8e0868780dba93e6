"""`millrace up`: check, start everything in order, say how to use it, and stop it all on Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from inference_worker.contract.env import SettingsError
from millrace.cli.commands import CommandFailed, run
from millrace.cli.progress import Progress, Step
from millrace.cli.startup_message import CREDENTIALS, greeting
from millrace.devserver import checks
from millrace.devserver.disk_reserve import DiskReserve
from millrace.devserver.processes import ProcessFile
from millrace.devserver.program import ServiceError
from millrace.devserver.stack import Stack
from millrace.devserver.supervisor import ChildFailed, Supervisor

RESERVE_SECONDS = 0.1  # between two looks at the disk: what fills it quickly must not reach its end
RESERVE_RETRY_SECONDS = 5.0


def up(*, check_only: bool = False) -> int:
    """Run the command; returns the process' exit status."""
    try:
        stack = Stack(os.environ)
        _check(stack)
        os.umask(0o077)  # from here on, what we and our children write is ours alone
        with checks.only_one(stack.data_dir):
            if check_only:
                print("All checks pass.")
                return 0
            stack.keep_secrets()
            return asyncio.run(_run(stack))
    except (SettingsError, checks.CheckFailed, ServiceError) as exc:
        print(f"millrace up: {exc}", file=sys.stderr)
        return 1


def _check(stack: Stack) -> None:
    checks.packages()
    checks.data_directory(stack.data_dir, stack.settings.min_free_disk)
    checks.port_free(stack.settings.host, stack.settings.port)
    checks.models_there(stack.settings.models)
    if stack.postgres is None:
        checks.database_answers(stack.settings.database_url)
    if stack.valkey is None:
        checks.broker_answers(stack.settings.valkey_url)


async def _run(stack: Stack) -> int:
    return await _Run(stack).until_told()


class _Run:
    """One run of the stack, from the first process to the last."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._logs = stack.data_dir / "logs"
        self._progress = Progress()
        self._states = ProcessFile(stack.data_dir)
        self._supervisor = Supervisor(self._logs, lambda line: self._progress.say(f"  ! {line}"), self._states.publish)

    async def until_told(self) -> int:
        """Start, watch, and stop on a signal or when the start fails; returns the exit status."""
        told, hurry = asyncio.Event(), asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, _on_signal, told, hurry)
        reserving = asyncio.create_task(self._keep_reserve())
        starting = asyncio.create_task(self._start())
        ends = {asyncio.create_task(told.wait()), asyncio.create_task(self._supervisor.watch())}
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        tasks = [starting, reserving, *ends]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._progress.say("Stopping … (Ctrl-C again: at once)")
        await self._supervisor.stop(hurry)
        self._states.close()
        fault = next((_first(result) for result in results if isinstance(result, Exception)), None)
        if fault is None:
            self._progress.say("Stopped.")
            return 0
        if not isinstance(fault, ChildFailed | CommandFailed | ServiceError):
            raise fault
        print(f"\nmillrace up: {fault}", file=sys.stderr)
        return 1

    async def _start(self) -> None:
        self._progress.say(f"Millrace starts; all it keeps is in {self._stack.data_dir}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._models())
            group.create_task(self._services())
        self._supervisor.add(self._stack.programs())
        for name in self._stack.worker_names:  # a worker needs no database: its model loads while the schema is made
            await self._supervisor.start(name)
        found, is_new = await self._database()
        for name in ("settler", "web", "beat"):
            await self._supervisor.start(name)
        async with self._progress.step("gateway and workers"):
            await self._supervisor.start("gateway")
            await self._supervisor.finish_start()
        show_secrets = is_new and sys.stdout.isatty()
        self._progress.say(greeting(self._stack.settings, found, self._logs, show_secrets=show_secrets))

    async def _keep_reserve(self) -> None:
        """Release the disk's reserve while the disk is almost full."""
        reserve = DiskReserve(self._stack.data_dir, self._stack.settings.min_free_disk)
        while True:
            try:
                if done := await asyncio.to_thread(reserve.adjust):
                    self._progress.say(f"  ! {done}")
            except OSError as exc:
                self._progress.say(f"  ! the disk's reserve: {exc}")
                await asyncio.sleep(RESERVE_RETRY_SECONDS)
            await asyncio.sleep(RESERVE_SECONDS)

    async def _models(self) -> None:
        names = ", ".join(spec.name for spec in self._stack.settings.models)
        async with self._progress.step(f"model {names}") as step:
            await run(self._stack.command("millrace.cli.convert"), self._logs, lambda line: _show(step, line))

    async def _services(self) -> None:
        embedded = [name for name, server in self._stack.embedded.items() if server]
        if not embedded:
            return
        async with self._progress.step(" and ".join(embedded)):
            programs = await asyncio.to_thread(self._stack.prepare_services)
            self._supervisor.add(programs)
            await asyncio.gather(*(self._supervisor.start(program.name) for program in programs))

    async def _database(self) -> tuple[dict[str, Any], bool]:
        """Migrate the database. Return the accounts and the key that `bootstrap` reports, and whether one is new."""
        path = self._stack.data_dir / CREDENTIALS
        before = path.read_bytes() if path.exists() else b""
        async with self._progress.step("database schema"):
            await asyncio.to_thread(self._stack.make_roles)
            await run(self._stack.command("django", "migrate", "--no-input"), self._logs)
        async with self._progress.step("operator and demo tenant"):
            said = await run(self._stack.command("django", "bootstrap"), self._logs)
            await run(self._stack.command("django", "price_book", "backfill"), self._logs)
        try:
            found = json.loads(said[-1])
        except (IndexError, ValueError):
            raise CommandFailed(f"bootstrap said no JSON line: {said}") from None
        return dict(found), path.read_bytes() != before


def _first(fault: Exception) -> Exception:
    """Return the fault itself, or the first of a group."""
    while isinstance(fault, ExceptionGroup):
        fault = fault.exceptions[0]
    return fault


def _on_signal(told: asyncio.Event, hurry: asyncio.Event) -> None:
    if told.is_set():
        hurry.set()
    told.set()


def _show(step: Step, line: str) -> None:
    """Progress of a conversion: `<model> <bytes done> <bytes in all>`."""
    name, done, total = line.split()
    step.title = f"model {name}: converting"
    step.done = int(done) / max(1, int(total))
