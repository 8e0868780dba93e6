"""Runs the lines of batches through the same service as every other request, in the batch class.

Each gateway claims as many lines as its replicas could run at once, in turn for the tenants that have some, and claims
more as these end. In the engine they only fill what others leave idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import psycopg
import redis
import structlog

from inference_worker.contract.messages import AnswerEvent
from inference_worker.contract.request import ServiceClass
from millrace.apps.batches.reading import decode_request
from millrace.apps.batches.storage import Storage
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore, dead, incorrect
from millrace.gateway.core import tracing
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.body_memory import BodyMemory
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.request_body import too_large
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.stream_follower import StreamFollower, StreamNotFound
from millrace.gateway.lifecycle.batch_lines import LEASE_SECONDS, BatchLine, BatchLineStore
from millrace.gateway.lifecycle.request_log import RequestLogWriter, RequestTrace
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.dialects import ANTHROPIC, OPENAI
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.responses import body as responses
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

ENDPOINT = "batch"  # of their records
POLL_SECONDS = 1.0
TOGETHER_SECONDS = 0.05  # lines that end within this make room together
STORE_AGAIN_SECONDS = 1.0
FOLLOW_AGAIN_SECONDS = 1.0
MAX_LOST_WORKERS = 5  # workers that may be lost with one line: then it is the line that kills them
# Endpoint -> the dialect of a line's body.
DIALECTS: Mapping[str, str] = {
    "/v1/chat/completions": chat.DIALECT,
    "/v1/completions": completions.DIALECT,
    "/v1/embeddings": embeddings.DIALECT,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": messages.DIALECT,
}


class NotNow(Exception):
    """The line must be run again, after `seconds`."""

    def __init__(self, seconds: float, *, lost: bool = False) -> None:
        super().__init__(seconds)
        self.seconds = seconds
        self.lost = lost  # its worker was


class BatchRunner:
    def __init__(
        self,
        lines: BatchLineStore,
        storage: Storage,
        keys: KeyStore,
        live: ActiveRequests,
        dispatcher: Dispatcher,
        service: InferenceService,
        recorder: RequestLogWriter,
        prompts: PromptReader,
        memory: BodyMemory,
    ) -> None:
        self._lines = lines
        self._storage = storage
        self._keys = keys
        self._live = live
        self._dispatcher = dispatcher
        self._service = service
        self._recorder = recorder
        self._prompts = prompts
        self._memory = memory
        self._running: dict[asyncio.Task[None], BatchLine] = {}
        self._ended = asyncio.Event()  # of a line: there is room for another
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._look_again()), asyncio.create_task(self._keep_leases())]

    async def stop(self) -> None:
        """Leave everything to other gateways: what the engine works on continues."""
        self._stopping = True
        await cancel_and_wait(self._tasks)
        await cancel_and_wait(list(self._running))

    async def _look_again(self) -> None:
        while True:
            try:
                await self._look()
            except (ApiError, psycopg.Error) as exc:
                log.warning("batch_read_failed", error=str(exc))
            except Exception:
                log.exception("batch_read_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._ended.wait()
                    await asyncio.sleep(TOGETHER_SECONDS)
            self._ended.clear()

    async def _look(self) -> None:
        """Begin what there is room for, tenant by tenant."""
        free = self._room() - len(self._running)
        if free <= 0:
            return
        batches = await self._lines.batches()
        if not batches:
            return
        keys = await self._keys.by_id({batch.key_id for batch in batches})
        running = {(line.batch.id, line.number) for line in self._running.values()}
        ours = Counter(line.batch.tenant_id for line in self._running.values())
        share = max(1, self._room() // len({*ours, *(batch.tenant_id for batch in batches)}))
        for batch in batches:
            most = min(free, share - ours[batch.tenant_id])
            if most <= 0:
                continue
            for line in await self._lines.claim(batch, most):
                if (batch.id, line.number) in running:
                    continue  # its lease had run out here, and is renewed by that
                self._begin(line, keys.get(batch.key_id))
                ours[batch.tenant_id] += 1
                free -= 1

    def _room(self) -> int:
        """Lines that may run at once."""
        return sum(beat.max_num_seqs for beat in self._dispatcher.replicas.live().values())

    def _begin(self, line: BatchLine, key: ApiKeySnapshot | None) -> None:
        task = asyncio.create_task(self._run(line, key))
        self._running[task] = line
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._ended.set()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            if self._running:
                try:
                    await self._lines.keep()
                except (ApiError, psycopg.Error) as exc:
                    log.warning("line_renewal_failed", lines=len(self._running), error=str(exc))

    # One line.

    async def _run(self, line: BatchLine, key: ApiKeySnapshot | None) -> None:
        tracing.begin(line.request_id)
        trace = None
        if key is not None:
            tracing.name_tenant(key)
            trace = RequestTrace(key, line.request_id, ENDPOINT)
            trace.batch = line.batch.id, line.number
        try:
            status, answer = await self._answer(line, key, trace)
        except NotNow as exc:
            put_back = partial(self._lines.put_back, line, exc.seconds, lost_count=line.lost_count + exc.lost)
            await self._store(put_back)
        except asyncio.CancelledError:
            if self._stopping:
                with contextlib.suppress(ApiError, psycopg.Error):  # its lease ends by itself
                    await self._lines.leave(line)
            raise
        else:
            if trace is not None:
                self._recorder.end(trace, str(status))
            await self._store(partial(self._lines.answer, line, status, answer))

    async def _store(self, write: Callable[[], Awaitable[object]]) -> None:
        """Until the database has it. A gateway that takes the line over meanwhile finds the same answer."""
        while True:
            try:
                await write()
                return
            except (ApiError, psycopg.Error) as exc:
                log.warning("line_store_failed", error=str(exc))
                await asyncio.sleep(STORE_AGAIN_SECONDS)

    async def _answer(
        self, line: BatchLine, key: ApiKeySnapshot | None, trace: RequestTrace | None = None
    ) -> tuple[int, bytes]:
        """Answer the line and return its status and body.

        Raises:
            NotNow: it has none yet.
        """
        try:
            if line.taken_over:
                return 200, await self._go_on(line)
            return 200, await self._ask(line, key, trace)
        except NotNow:
            raise
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise NotNow(1) from None
        except ApiError as exc:
            lost = exc.code == "worker_lost"
            retryable = exc.retry_after is not None and exc.type != "insufficient_quota"
            if retryable and not (lost and line.lost_count + 1 >= MAX_LOST_WORKERS):
                raise NotNow(exc.retry_after or 1, lost=lost) from None
            return _told(line, exc, trace)
        except Exception:
            log.exception("line_failed", request_id=line.request_id)
            return _told(line, ApiError("internal_error", "The server had an error with this request."), trace)

    async def _go_on(self, line: BatchLine) -> bytes:
        """With the request that another gateway began. It may have ended and be paid for: as long as the broker cannot
        say, it is not run as another one."""
        while True:
            following = StreamFollower(self._dispatcher, line.request_id, line.batch.tenant_id)
            try:
                events = [event async for event in following.events()]
                form = await following.form()
            except redis.RedisError as exc:
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(FOLLOW_AGAIN_SECONDS)
            except StreamNotFound:
                raise NotNow(0) from None
            except ApiError as exc:
                if exc.code == "cancelled":
                    raise NotNow(0) from None
                raise
            else:
                return msgspec.json.encode(self._service.writer(form).whole(events))

    async def _ask(self, line: BatchLine, key: ApiKeySnapshot | None, trace: RequestTrace | None) -> bytes:
        if key is None:
            raise incorrect()
        if (fault := dead(key)) is not None:
            raise fault
        died: list[ApiError] = []
        generating = asyncio.create_task(self._generate(line, key, died, trace))

        def end(fault: ApiError) -> None:
            died.append(fault)
            generating.cancel()

        with self._live.listed(key, end):
            try:
                return await generating
            except asyncio.CancelledError:
                if not died:
                    raise
        raise died[0]

    async def _read(
        self, line: BatchLine, key: ApiKeySnapshot, dialect: str, trace: RequestTrace | None
    ) -> InferenceRequest:
        """Read the line, within the same bounds as any other body of the key."""
        with self._memory.lease(key.tenant_id) as lease:
            lease.grow(line.size)
            text = await asyncio.to_thread(self._storage.read, line.batch.input_file, line.byte_offset, line.size)
            body = bytes(decode_request(text).body)
            if len(body) > (most := self._prompts.max_body_bytes(key, dialect)):
                raise too_large(most)
            await self._prompts.charge(key, len(body))
            request = await self._prompts.read(key, dialect, body)
        if trace is not None:
            trace.asked(request, body)
        return request

    async def _generate(
        self, line: BatchLine, key: ApiKeySnapshot, died: Sequence[ApiError], trace: RequestTrace | None
    ) -> bytes:
        dialect = DIALECTS[line.batch.endpoint]
        request = await self._read(line, key, dialect, trace)
        if request.stream:
            raise invalid("stream", "Requests of a batch are not streamed.")
        request = dataclasses.replace(request, service_class=ServiceClass.BATCH)
        call = await self._service.begin(key, request, dialect, line.request_id, trace)
        try:
            events: AsyncIterator[AnswerEvent] = self._service.events(call)
            return msgspec.json.encode(call.writer().whole([event async for event in events]))
        except (ApiError, redis.RedisError):  # it has its verdict, or continues and is asked for again
            raise
        except Exception:
            await self._service.fault(call)
            raise
        finally:
            self._service.let_go(call, means_to_return=not died)


def _told(line: BatchLine, fault: ApiError, trace: RequestTrace | None) -> tuple[int, bytes]:
    """Return a fault in the words of the line's dialect."""
    if trace is not None:
        trace.fault = fault
    words = ANTHROPIC if line.batch.dialect == "anthropic" else OPENAI
    return words.status(fault), msgspec.json.encode(words.body(fault, line.request_id))
