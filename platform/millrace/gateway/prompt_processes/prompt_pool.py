"""The pool of prompt processes, in which large bodies are decoded and tokenized, in turn for the tenants.

The processes also measure each model's chat template, once. Until then, and if it is expensive, the event loop does not
render it.

Each process handles one body at a time. A process that fails, hangs or sends an invalid result is replaced, and the
body's request is rejected with 503. A process that has grown is also replaced, so that its memory is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from inference_worker.contract.output_formats import NONE
from millrace.gateway.core.asyncio_utils import cancel_and_wait, run_to_end
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.prompt_processes.prompt_frames import LENGTH, MAX_FRAME_BYTES, ModelFiles, PromptTask, Result
from millrace.gateway.prompt_processes.tenant_queue import TenantQueue

log = structlog.get_logger(__name__)

MAX_WAITING = 256  # waiting bodies of one tenant
WAIT_SECONDS = 10.0  # for a free process
WORK_SECONDS = 10.0  # for one body
READY_SECONDS = 120.0
MAX_GROWTH_BYTES = 24 * 2**20  # growth of a process until it is replaced
MEASUREMENTS = 0  # the tenant of measurements in the queue; it is no tenant's ID
MAX_PAUSE_SECONDS = 30.0  # between starts of a process that does not become ready
OUTDATED_SECONDS = 0.1  # between checks whether an outdated process is left
_ENVIRON = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "HOME", "SYSTEMROOT", "LD_LIBRARY_PATH")  # no secrets
_decode = msgspec.msgpack.Decoder(Result).decode
_encode = msgspec.msgpack.Encoder().encode


class BrokenProcess(Exception):
    """Raised if a process has failed, hangs, or sent no valid result."""


@dataclass(eq=False)
class _Job:
    """A waiting body and its result."""

    work: bytes
    body: bytes
    result: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class PromptPool:
    """A fixed number of prompt processes with one fair queue."""

    def __init__(self, models: Mapping[str, ServedModel], processes: int) -> None:
        self._models = models
        self._files = _files_of(models.values())
        self._measurement: asyncio.Task[None] | None = None
        self._replaced = asyncio.Event()  # set when processes with these files must be replaced
        self._outdated = 0  # ready processes without the current files
        self._current = 0  # ready processes with the current files
        self._number = processes
        self._queue: TenantQueue[_Job] = TenantQueue(MAX_WAITING)
        self._tasks: list[asyncio.Task[None]] = []
        self.pids: set[int] = set()  # process IDs of the running processes

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run_processes()) for _ in range(self._number)]
        self._measure_templates(self._models.values())

    async def stop(self) -> None:
        await cancel_and_wait([*self._tasks, *([self._measurement] if self._measurement else [])])

    def replace_models(self, models: Sequence[ServedModel]) -> None:
        """Replace the processes by processes with these models. Running bodies are completed first."""
        self._files = _files_of(models)
        self._replaced.set()
        self._replaced = asyncio.Event()
        self._outdated += self._current
        self._current = 0
        if self._tasks:
            self._measure_templates(models)

    @property
    def is_current(self) -> bool:
        """Return whether all ready processes have the current models, and at least one is ready."""
        return self._current > 0 and not self._outdated

    async def run(self, tenant_id: int, work: PromptTask, body: bytes) -> Result:
        """Let a process read the body.

        Raises:
            ApiError: 429, too many bodies of the tenant wait; 503, the wait was too long or the process failed.
        """
        job = _Job(_encode(work), body)
        if not self._queue.put(tenant_id, job):
            message = f"You have {MAX_WAITING} large requests that wait to be tokenized. Retry later."
            raise ApiError("rate_limit_exceeded", message, retry_after=1)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await job.begun.wait()
            return await job.result
        except TimeoutError:
            raise _busy("No process was free to tokenize your request. Retry later.") from None
        finally:
            job.result.cancel()

    def _measure_templates(self, models: Iterable[ServedModel]) -> None:
        """Start to measure the chat templates that are not measured yet."""
        if self._measurement is not None:
            self._measurement.cancel()
        self._measurement = asyncio.create_task(self._measure_each(list(models)))

    async def _measure_each(self, models: list[ServedModel]) -> None:
        while self._outdated:  # such a process may have another template of the same deployment
            await asyncio.sleep(OUTDATED_SECONDS)
        for model in {each.key: each for each in models}.values():  # the last one of a key, as in the processes
            tokenizer = model.tokenizer
            if model.upstream is not None or not tokenizer.has_chat_template or tokenizer.is_template_cheap is not None:
                continue
            work = PromptTask("", {}, model.key, measures_template=True)
            job = _Job(_encode(work), b"")
            self._queue.put(MEASUREMENTS, job)
            try:
                result = await job.result
            except ApiError:  # the process hung or failed
                tokenizer.is_template_cheap = False
            else:
                if result.problem is None:
                    tokenizer.is_template_cheap = result.is_template_cheap
                    tokenizer.template_traits = result.template_traits
            if not tokenizer.is_template_cheap:
                log.warning("chat_template_expensive", model=model.key)

    async def _run_processes(self) -> None:
        """Serve the queue with a process, and replace the process when it ends."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, pause * 2 or 0.1)
            replaced = self._replaced
            try:
                async with _Process.start(self._files, self.pids) as process:
                    pause = 0.0
                    with self._count_process(replaced):
                        await self._serve(process, replaced)
            except (BrokenProcess, OSError) as exc:
                log.warning("prompt_process_failed", error=str(exc))
            except Exception:  # the pool must keep its number of processes
                log.exception("prompt_process_failed")

    @contextlib.contextmanager
    def _count_process(self, replaced: asyncio.Event) -> Iterator[None]:
        """Count a ready process, which is outdated once `replaced` is set."""
        if replaced.is_set():
            self._outdated += 1
        else:
            self._current += 1
        try:
            yield
        finally:
            if replaced.is_set():
                self._outdated -= 1
            else:
                self._current -= 1

    async def _serve(self, process: _Process, replaced: asyncio.Event) -> None:
        """Handle bodies until the process has grown or `replaced` is set.

        Raises:
            BrokenProcess: the process has failed.
        """
        while True:
            job = await self._next(process, replaced)
            if job is None:
                return
            if job.result.done():  # the request was cancelled
                continue
            job.begun.set()
            try:
                result = await process.exchange(job.work, job.body)
            except BrokenProcess:
                if not job.result.done():
                    job.result.set_exception(_busy("The process that tokenized your request failed. Retry later."))
                raise
            if not job.result.done():
                job.result.set_result(result)
            del job
            if result.resident_bytes > process.resident_bytes + MAX_GROWTH_BYTES:
                return

    async def _next(self, process: _Process, replaced: asyncio.Event) -> _Job | None:
        """Wait for a job while the process runs. Return None once `replaced` is set.

        Raises:
            BrokenProcess: the process has ended.
        """
        if replaced.is_set():
            return None
        next_job, exited = asyncio.create_task(self._queue.get()), asyncio.create_task(process.wait())
        is_replaced = asyncio.create_task(replaced.wait())
        tasks: list[asyncio.Task[Any]] = [next_job, exited, is_replaced]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if next_job.done():
                return next_job.result()
        finally:
            await cancel_and_wait([task for task in tasks if not task.done()])
        if is_replaced.done() and not exited.done():
            return None
        raise BrokenProcess("The process ended.")


class _Process:
    """One prompt process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.resident_bytes = 0  # when it became ready

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, files: list[ModelFiles], pids: set[int]) -> AsyncIterator[_Process]:
        """Start a process, and kill it at the end of the context.

        Raises:
            BrokenProcess: it does not become ready.
        """
        environ = {name: os.environ[name] for name in _ENVIRON if name in os.environ}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "millrace.gateway.prompt_processes.prompt_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,  # Ctrl-C in a terminal must reach only the gateway
        )
        pids.add(process.pid)
        try:
            prompt_process = cls(process)
            ready = await prompt_process._exchange(READY_SECONDS, _encode(files))
            prompt_process.resident_bytes = ready.resident_bytes
            yield prompt_process
        finally:
            pids.discard(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await run_to_end(_close(process))

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    async def exchange(self, work: bytes, body: bytes) -> Result:
        """Send a body and receive its result.

        Raises:
            BrokenProcess: the process has failed.
        """
        return await self._exchange(WORK_SECONDS, work, body)

    async def _exchange(self, seconds: float, *frames: bytes) -> Result:
        target, source = self._process.stdin, self._process.stdout
        if target is None or source is None:
            raise BrokenProcess("The process has no pipes.")
        try:
            async with asyncio.timeout(seconds):
                for frame in frames:
                    target.write(LENGTH.pack(len(frame)))
                    target.write(frame)
                await target.drain()
                size = LENGTH.unpack(await source.readexactly(LENGTH.size))[0]
                if size > MAX_FRAME_BYTES:
                    raise BrokenProcess("The process's result is too large.")
                return _decode(await source.readexactly(size))
        except TimeoutError:
            raise BrokenProcess(f"The process sent no result within {seconds:g} seconds.") from None
        except (OSError, EOFError, msgspec.MsgspecError) as exc:
            raise BrokenProcess(f"{type(exc).__name__}: {exc}") from None


async def _close(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a killed process, and wait for its end.

    Open pipes keep the process's transport open after its end.
    """
    if process.stdin is not None:
        process.stdin.close()
    await process.communicate()  # without input: uvloop raises RuntimeError for a write to a closed pipe
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # the process ended before it had received everything
            await process.stdin.wait_closed()


def _files_of(models: Iterable[ServedModel]) -> list[ModelFiles]:
    return [
        ModelFiles(
            model.name,
            str(model.directory),
            model.context_length,
            model.vocab_size,
            model.vector_sizes,
            model.is_cross_encoder,
            model.input_prompt,
            model.pair_template,
            model.tokenizer.tool_format.name if model.tokenizer.tool_format else NONE,
            model.tokenizer.reasoning_format.name if model.tokenizer.reasoning_format else NONE,
            model.version,
            model.upstream,
            model.separates_contents,
            model.truncates_inputs,
        )
        for model in models
    ]


def _busy(message: str) -> ApiError:
    return ApiError(OVERLOADED, message, retry_after=1)
