"""The batch runner: runs the lines of batches through the inference service, in the batch class.

Each gateway claims as many lines as its replicas could run concurrently, in turn for the tenants with due lines, and
claims more as these end. In the engine they use only capacity that other requests leave idle.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from millrace.gateway.auth.authentication import KeyStore, incorrect_key_error, key_error
from millrace.gateway.core import tracing
from millrace.gateway.core.activity import Activity, Poll
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
from millrace.gateway.protocols import rerank
from millrace.gateway.protocols.answer_validity import checked_events
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.dialects import ANTHROPIC, OPENAI
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.responses import body as responses
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

ENDPOINT = "batch"  # in the request log
POLL_SECONDS = 1.0
COALESCE_SECONDS = 0.05  # lines that end within this time are replaced together
STORE_RETRY_SECONDS = 1.0
FOLLOW_RETRY_SECONDS = 1.0
MAX_LOST_WORKERS = 5  # with this many lost workers, the line probably causes the losses
# Endpoint -> the dialect of a line's body.
DIALECTS: Mapping[str, str] = {
    "/v1/chat/completions": chat.DIALECT,
    "/v1/completions": completions.DIALECT,
    "/v1/embeddings": embeddings.DIALECT,
    "/v1/rerank": rerank.RERANK,
    "/v1/score": rerank.SCORE,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": messages.DIALECT,
}


class RetryLater(Exception):
    """Raised if the line must be run again after `seconds`."""

    def __init__(self, seconds: float, *, lost: bool = False) -> None:
        super().__init__(seconds)
        self.seconds = seconds
        self.lost = lost  # whether its worker was lost


class BatchRunner:
    def __init__(
        self,
        lines: BatchLineStore,
        storage: Storage,
        keys: KeyStore,
        active_requests: ActiveRequests,
        dispatcher: Dispatcher,
        service: InferenceService,
        request_log: RequestLogWriter,
        prompts: PromptReader,
        body_memory: BodyMemory,
        activity: Activity | None = None,
    ) -> None:
        self._lines = lines
        self._storage = storage
        self._keys = keys
        self._active_requests = active_requests
        self._dispatcher = dispatcher
        self._service = service
        self._request_log = request_log
        self._prompts = prompts
        self._body_memory = body_memory
        self._running: dict[asyncio.Task[None], BatchLine] = {}
        self._activity = activity
        self._pauses = Poll(activity, is_read_by_requests=False)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._renew_leases())]

    async def stop(self) -> None:
        """Stop, and leave the lines to other gateways. The engine continues with running requests."""
        self._stopping = True
        await cancel_and_wait(self._tasks)
        await cancel_and_wait(list(self._running))

    async def _poll(self) -> None:
        while True:
            try:
                await self._start_due_lines()
            except (ApiError, psycopg.Error) as exc:
                log.warning("batch_read_failed", error=str(exc))
            except Exception:
                log.exception("batch_read_failed")
            await self._pauses.pause(POLL_SECONDS, coalesce_seconds=COALESCE_SECONDS)

    async def _start_due_lines(self) -> None:
        """Start due lines within the capacity, shared between tenants."""
        free = self._capacity() - len(self._running)
        if free <= 0:
            return
        batches = await self._lines.due_batches()
        if not batches:
            return
        keys = await self._keys.by_id({batch.key_id for batch in batches})
        running = {(line.batch.id, line.number) for line in self._running.values()}
        running_by_tenant = Counter(line.batch.tenant_id for line in self._running.values())
        share = max(1, self._capacity() // len({*running_by_tenant, *(batch.tenant_id for batch in batches)}))
        for batch in batches:
            max_lines = min(free, share - running_by_tenant[batch.tenant_id])
            if max_lines <= 0:
                continue
            for line in await self._lines.claim(batch, max_lines):
                if (batch.id, line.number) in running:
                    continue  # this gateway's lease had expired; the claim has renewed it
                self._begin(line, keys.get(batch.key_id))
                running_by_tenant[batch.tenant_id] += 1
                free -= 1

    def _capacity(self) -> int:
        """Return the number of lines that may run concurrently."""
        return sum(heartbeat.max_num_seqs for heartbeat in self._dispatcher.replicas.live().values())

    def _begin(self, line: BatchLine, key: ApiKeySnapshot | None) -> None:
        task = asyncio.create_task(self._run(line, key))
        self._running[task] = line
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._pauses.run_now()  # another line can start

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            if self._running:
                try:
                    await self._lines.renew_leases()
                except (ApiError, psycopg.Error) as exc:
                    log.warning("line_renewal_failed", lines=len(self._running), error=str(exc))

    # Running one line.

    async def _run(self, line: BatchLine, key: ApiKeySnapshot | None) -> None:
        tracing.begin(line.request_id)
        trace = None
        if key is not None:
            tracing.name_tenant(key)
            trace = RequestTrace(key, line.request_id, ENDPOINT)
            trace.batch = line.batch.id, line.number
        try:
            status, response = await self._respond(line, key, trace)
        except RetryLater as exc:
            requeue = partial(self._lines.requeue, line, exc.seconds, lost_count=line.lost_count + exc.lost)
            await self._store(requeue)
        except asyncio.CancelledError:
            if self._stopping:
                with contextlib.suppress(ApiError, psycopg.Error):  # the lease expires
                    await self._lines.release(line)
            raise
        else:
            if trace is not None:
                self._request_log.end(trace, str(status))
            await self._store(partial(self._lines.store_response, line, status, response))

    async def _store(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write to the database, and retry until it succeeds."""
        while True:
            try:
                await write()
                return
            except (ApiError, psycopg.Error) as exc:
                log.warning("line_store_failed", error=str(exc))
                await asyncio.sleep(STORE_RETRY_SECONDS)

    async def _respond(
        self, line: BatchLine, key: ApiKeySnapshot | None, trace: RequestTrace | None = None
    ) -> tuple[int, bytes]:
        """Run the line and return its status and response body.

        Raises:
            RetryLater: the line must be run again.
        """
        try:
            if line.taken_over:
                return 200, await self._follow(line)
            return 200, await self._send(line, key, trace)
        except RetryLater:
            raise
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise RetryLater(1) from None
        except ApiError as exc:
            lost = exc.code == "worker_lost"
            retryable = exc.retry_after is not None and exc.type != "insufficient_quota"
            if retryable and not (lost and line.lost_count + 1 >= MAX_LOST_WORKERS):
                raise RetryLater(exc.retry_after or 1, lost=lost) from None
            return _error_response(line, exc, trace)
        except Exception:
            log.exception("line_failed", request_id=line.request_id)
            return _error_response(
                line, ApiError("internal_error", "The server had an internal error. Send the request again."), trace
            )

    async def _follow(self, line: BatchLine) -> bytes:
        """Return the response of a request that another gateway has started.

        The request may have ended and been billed. While Valkey is unavailable, it is not replaced by a new one.
        """
        while True:
            follower = StreamFollower(self._dispatcher, line.request_id, line.batch.tenant_id, None)
            try:
                events = [event async for event in checked_events(follower.events(), follower.response_spec)]
                response_spec = await follower.response_spec()
            except redis.RedisError as exc:
                log.warning("broker_unreachable", error=str(exc))
                await asyncio.sleep(FOLLOW_RETRY_SECONDS)
            except StreamNotFound:
                raise RetryLater(0) from None
            except ApiError as exc:
                if exc.code == "cancelled":
                    raise RetryLater(0) from None
                raise
            else:
                return msgspec.json.encode(self._service.writer(response_spec).build_response(events))

    async def _send(self, line: BatchLine, key: ApiKeySnapshot | None, trace: RequestTrace | None) -> bytes:
        if key is None:
            raise incorrect_key_error()
        if (error := key_error(key)) is not None:
            raise error
        if self._activity is not None:
            await self._activity.begin_request()
        key_errors: list[ApiError] = []
        generating = asyncio.create_task(self._generate(line, key, key_errors, trace))

        def end(error: ApiError) -> None:
            key_errors.append(error)
            generating.cancel()

        with self._active_requests.register(key, end):
            try:
                return await generating
            except asyncio.CancelledError:
                if not key_errors:
                    raise
        raise key_errors[0]

    async def _read(
        self, line: BatchLine, key: ApiKeySnapshot, dialect: str, trace: RequestTrace | None
    ) -> InferenceRequest:
        """Read the line, within the same limits as any other body of the key."""
        with self._body_memory.lease(key.tenant_id) as lease:
            lease.grow(line.size)
            text = await asyncio.to_thread(self._storage.read, line.batch.input_file, line.byte_offset, line.size)
            body = bytes(decode_request(text).body)
            if len(body) > (max_bytes := self._prompts.max_body_bytes(key, dialect)):
                raise too_large(max_bytes)
            await self._prompts.charge(key, len(body))
            request = await self._prompts.read(key, dialect, body)
        if trace is not None:
            trace.set_request(request, body)
        return request

    async def _generate(
        self, line: BatchLine, key: ApiKeySnapshot, key_errors: Sequence[ApiError], trace: RequestTrace | None
    ) -> bytes:
        dialect = DIALECTS[line.batch.endpoint]
        request = await self._read(line, key, dialect, trace)
        if request.stream:
            raise invalid("stream", "Batch requests cannot be streamed. Remove stream.")
        request = msgspec.structs.replace(request, service_class=ServiceClass.BATCH)
        active = await self._service.begin(key, request, dialect, line.request_id, trace)
        try:
            events: AsyncIterator[AnswerEvent] = self._service.events(active)
            return msgspec.json.encode(active.writer().build_response([event async for event in events]))
        except (ApiError, redis.RedisError):  # it has ended, or continues and is read again
            raise
        except Exception:
            await self._service.mark_failed(active)
            raise
        finally:
            self._service.release(active, is_returning=not key_errors)


def _error_response(line: BatchLine, error: ApiError, trace: RequestTrace | None) -> tuple[int, bytes]:
    """Return the status and the body of an error in the line's dialect."""
    if trace is not None:
        trace.error = error
    api_dialect = ANTHROPIC if line.batch.dialect == "anthropic" else OPENAI
    return api_dialect.status(error), msgspec.json.encode(api_dialect.body(error, line.request_id))
