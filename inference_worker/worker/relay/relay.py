"""The relay: an `EngineClient` whose model runs at an OpenAI- or Anthropic-compatible server.

One thread runs an event loop with a task for each execution. A task waits for a slot, sends the execution's request,
and decodes the response's events to outputs. The Celery worker does everything else, as for a resident engine.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import redis.asyncio
import structlog
import uvloop

from inference_worker.contract.messages import InferenceJob, Machine
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.request import RequestError, RequestOutput, TokenCounts
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamRequest, UpstreamSpec
from inference_worker.contract.version import VERSION
from inference_worker.engine.engine import EngineStats
from inference_worker.worker.engine_client import ActiveJob, Deliver, Delivery, Outcome, Requeued, is_last
from inference_worker.worker.relay.anthropic_stream import AnthropicDecoder
from inference_worker.worker.relay.circuit_breaker import CircuitBreaker, Requester, UpstreamAttempt
from inference_worker.worker.relay.connections import (
    ConnectionLost,
    ConnectionPool,
    Origin,
    UpstreamConnection,
    UpstreamUnreachable,
)
from inference_worker.worker.relay.decoders import StreamDecoder
from inference_worker.worker.relay.failures import (
    UpstreamFailed,
    make_overload_failure,
    make_upstream_failure,
    response_failure,
)
from inference_worker.worker.relay.metrics import RelayMetrics
from inference_worker.worker.relay.openai_stream import OpenAIDecoder, decode_vectors
from inference_worker.worker.relay.rate_limit_headers import reported_limits
from inference_worker.worker.relay.request_encoder import RequestEncoder, UpstreamSecrets
from inference_worker.worker.relay.shared_limits import Entry, SharedLimits, Wait
from inference_worker.worker.relay.sse import EventParser
from inference_worker.worker.relay.usage_bounds import UsageBounds

log = structlog.get_logger(__name__)

MAX_ERROR_BYTES = 64 * 2**10
MAX_RESPONSE_BYTES = 256 * 2**20
NUMBER_BYTES = 48  # bytes of a vector's number in JSON, with white space
MAX_DIMENSIONS = 2**16
MIN_WAIT_SECONDS = 0.05  # for capacity, also if the upstream names less; doubles with each attempt, up to a second
FIRST_WAIT_SECONDS = 0.5  # for capacity, if the upstream names no time; doubles with each attempt
MAX_WAIT_SECONDS = 20.0
SILENT_SECONDS = 30.0  # without a token up to its deadline, after which an attempt has failed
DEADLINE_SECONDS = 1.0  # before a deadline, in which the end of an attempt is attributed to it
END_SECONDS = 1.0  # from the last event to the end of the response
CLOSING_SECONDS = 5.0


@dataclass(eq=False)
class _Run:
    """The state of one execution in the relay."""

    live: ActiveJob
    request: UpstreamRequest
    bounds: UsageBounds
    decoder: StreamDecoder | None = None
    is_sent: bool = False  # the upstream may have begun to compute
    is_held_back: bool = False  # it waits for the upstream's capacity, without a slot
    ending: Outcome | None = None  # set before the task is cancelled; None: cancelled with its usage
    task: asyncio.Task[None] | None = None


class Relay:
    """An `EngineClient` for one deployment.

    Args:
        deliver: is called with outputs, at most once in an iteration of the loop.
        on_broken: is called if the loop has failed.
        broker: a client for this relay only, by which it shares the limits of credentials; None: it does not.
        api_key: of a managed server, which has no credential.
    """

    def __init__(
        self,
        spec: ModelSpec,
        secrets: UpstreamSecrets,
        deliver: Deliver,
        on_broken: Callable[[], None],
        broker: redis.asyncio.Redis | None = None,
        api_key: str = "",
    ) -> None:
        if spec.upstream is None:
            raise AssertionError("the deployment has an upstream")
        upstream = self._upstream = spec.upstream
        origin = Origin(upstream.base_url, allow_internal=upstream.allow_internal)
        self._pool = ConnectionPool(origin)
        self._encoder = RequestEncoder(upstream, origin, secrets, api_key)
        self._secrets = secrets
        self._limits = None if broker is None else SharedLimits(broker, upstream.base_url, upstream.model)
        self._deliver = deliver
        self._on_broken = on_broken
        self._live: dict[str, _Run] = {}
        self._outbox: list[Delivery] = []
        self._flush_scheduled = False
        self._metrics = RelayMetrics()
        self._closing = False
        self.breaker = CircuitBreaker()
        self._loop = uvloop.new_event_loop()
        self._slots = asyncio.Semaphore(upstream.concurrency)
        self._thread = threading.Thread(target=self._run_loop, name="relay", daemon=True)
        self._thread.start()

    # Methods of `EngineClient`, called by other threads.

    def submit(self, live: ActiveJob) -> None:
        request = live.job.upstream
        if request is None:
            message = "The deployment has changed. Send the request again."
            self._deliver([(live, RequestError("server_is_overloaded", message))])
            return
        run = self._live[live.engine_id] = _Run(live, request, UsageBounds(live.job, self._upstream))
        self._loop.call_soon_threadsafe(self._start, run)

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        self._loop.call_soon_threadsafe(self._end_early, live, failure)

    def requeue(self, live: ActiveJob) -> None:
        self._loop.call_soon_threadsafe(self._end_early, live, Requeued())

    def live(self) -> list[ActiveJob]:
        return [run.live for run in list(self._live.values())]

    def prefix_digest(self) -> None:
        """Return None: the prefix cache of the upstream is not known."""

    def stats(self) -> EngineStats:
        runs = list(self._live.values())
        running = sum(run.is_sent for run in runs)
        held_back = sum(run.is_held_back for run in runs)
        return self._metrics.stats(running, len(runs) - running, held_back, self.breaker)

    def metrics(self) -> MetricsSnapshot:
        credential = self._upstream.credential
        if self._limits is None or credential is None:
            return self._metrics.snapshot(self.breaker)
        return self._metrics.snapshot(self.breaker, self._limits.waits, self._limits.states.get(credential))

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_SECONDS)

    # The thread of the loop.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            if self._limits is not None:
                self._loop.call_soon(self._limits.start)
            self._loop.run_forever()
            self._pool.close()
            if self._limits is not None:
                self._loop.run_until_complete(self._limits.close())
        except Exception:
            log.exception("relay_broken")
            self._on_broken()
        finally:
            self._loop.close()

    def _start(self, run: _Run) -> None:
        if run.live.engine_id in self._live:  # otherwise it was cancelled before
            run.task = self._loop.create_task(self._serve(run))
            run.task.add_done_callback(lambda _: self._send(run, self._early_outcome(run)))  # if it never began

    def _end_early(self, live: ActiveJob, outcome: RequestError | Requeued | None) -> None:
        run = self._live.get(live.engine_id)
        if run is None or (isinstance(outcome, Requeued) and run.is_sent):
            return
        run.ending = outcome
        if run.task is not None:
            run.task.cancel()
        else:
            self._send(run, self._early_outcome(run))

    def _early_outcome(self, run: _Run) -> Outcome:
        """Return the last outcome of an execution that was cancelled: what it used so far is our own count."""
        usage = TokenCounts()
        if run.decoder is not None:
            usage = run.decoder.usage()[0]
        elif run.is_sent:  # providers read the prompt before they respond
            usage = TokenCounts(uncached=run.request.estimated_tokens)
        if isinstance(run.ending, RequestError):
            error = run.ending
            return RequestError(error.code, error.message, error.param, usage=usage, usage_source="estimated")
        if run.ending is not None:
            return run.ending
        return RequestOutput(run.live.engine_id, finish_reason="cancelled", usage=usage, usage_source="estimated")

    async def _serve(self, run: _Run) -> None:
        live = run.live
        outcome: Outcome
        try:
            async with asyncio.timeout(live.job.deadline - time.time()):
                await self._try_until_accepted(run)
                return
        except asyncio.CancelledError:
            outcome = self._early_outcome(run)
        except TimeoutError:
            late = UpstreamFailed("timeout", "The model's provider did not answer in time.")
            outcome = self._fail(run, make_overload_failure() if run.is_held_back else late)
        except UpstreamFailed as exc:
            outcome = self._fail(run, exc)
        except Exception:
            log.exception("relay_failed", **live.job.billing_context.log_fields())
            outcome = self._fail(run, UpstreamFailed("internal_error", "The relay failed. Send the request again."))
        self._send(run, outcome)

    def _fail(self, run: _Run, failure: UpstreamFailed) -> RequestError:
        usage, source = (TokenCounts(), "engine") if run.decoder is None else run.decoder.usage()
        error = RequestError(failure.code, failure.message, failure.param, failure.retry_after, usage, source)  # type: ignore[arg-type]
        fields = run.live.job.billing_context.log_fields()
        cause = str(failure.__cause__ or "")  # such as an invalid certificate
        # NOTE: an upstream's own message may quote the prompt, so it is not logged.
        message = "" if failure.is_quoted else failure.message
        log.warning("upstream_failed", **fields, code=failure.code, message=message, cause=cause)
        return error

    async def _try_until_accepted(self, run: _Run) -> None:
        """Send the request, and again while the upstream has no capacity.

        Raises:
            UpstreamFailed: it failed otherwise, or the request does not wait for capacity.
        """
        live, attempt, is_new = run.live, 0, False
        credential = self._encoder.credential(live)
        while True:
            try:
                async with self._capacity(run, credential) as entry, self._slots:
                    await self._try_accepted(run, credential, entry, is_new=is_new)
                return
            except ConnectionLost as exc:
                if not exc.is_stale:
                    raise make_upstream_failure("The connection to the model's provider was lost.") from exc
                is_new = True  # the server had closed it, so it did not receive the request
            except UpstreamFailed as exc:
                if run.decoder is not None or not exc.is_capacity or not run.request.waits_for_capacity:
                    raise
                least = min(MIN_WAIT_SECONDS * 2 ** min(attempt, 10), 1.0)
                seconds = _pause(attempt) if exc.retry_after is None else max(exc.retry_after, least)
                attempt += 1
                if time.time() + seconds >= live.job.deadline:
                    raise
                run.is_sent, run.is_held_back = False, True
                await asyncio.sleep(seconds)
                run.is_held_back = False

    async def _try_accepted(self, run: _Run, credential: int | None, entry: Entry | None, *, is_new: bool) -> None:
        """Send the request once, if the circuit breaker accepts it, and record the result there.

        Raises:
            ConnectionLost: the connection was lost.
            UpstreamFailed: it failed otherwise.
        """
        attempt: UpstreamAttempt | None = None  # None: its failure does not show the upstream's state
        sent_at = time.monotonic()
        try:
            request = self._encoder.encode(run.request, run.live)
            attempt = self.breaker.enter(_requester(run.live.job, credential), credential)
            await self._try(run, request, entry, is_new=is_new)
            self.breaker.note_success(attempt)
        except UpstreamUnreachable as exc:
            failure = make_upstream_failure("The model's provider cannot be reached.", is_unreachable=True)
            self._note_failure(attempt, failure)
            raise failure from exc
        except ConnectionLost as exc:
            self._note_failure(attempt, None if exc.is_stale else make_upstream_failure("The connection was lost."))
            raise
        except UpstreamFailed as exc:
            self._note_failure(attempt, exc)
            raise
        except BaseException:
            is_late = time.time() > run.live.job.deadline - DEADLINE_SECONDS
            is_silent = run.live.first_token_at is None and time.monotonic() - sent_at >= SILENT_SECONDS
            late = make_upstream_failure("The model's provider did not answer.") if is_late and is_silent else None
            self._note_failure(attempt, late)
            raise

    def _note_failure(self, attempt: UpstreamAttempt | None, failure: UpstreamFailed | None) -> None:
        """Record the end of an attempt in the circuit breaker. `failure`: None if the upstream's state is not known."""
        if attempt is None:
            return
        if failure is None:
            self.breaker.note_abandoned(attempt)
        else:
            self.breaker.note_failure(attempt, failure)

    @asynccontextmanager
    async def _capacity(self, run: _Run, credential: int | None) -> AsyncIterator[Entry | None]:
        """Wait until the credential's limits allow the request, and use its place meanwhile.

        Raises:
            UpstreamFailed: the request does not wait for capacity, or its deadline is too early.
        """
        if self._limits is None or credential is None:
            yield None
            return
        deadline = run.live.job.deadline if run.request.waits_for_capacity else 0.0
        most = self._secrets.max_concurrency(credential)
        run.is_held_back = True
        tokens, is_shared = run.request.estimated_tokens, not run.live.job.is_tenant_credential
        found = await self._limits.enter(credential, most, tokens, deadline, is_shared=is_shared)
        if isinstance(found, Wait):
            raise make_overload_failure(found.seconds)
        run.is_held_back = False
        try:
            yield found
        finally:
            self._limits.leave(found)

    async def _try(self, run: _Run, encoded: bytes, entry: Entry | None, *, is_new: bool) -> None:
        """Send the request once, and deliver the response."""
        request, live = run.request, run.live
        connection = await self._pool.take(is_new=is_new)
        try:
            run.is_sent = True
            live.scheduled_at = live.scheduled_at or time.monotonic()
            await connection.send(encoded)
            if connection.status != 200:
                body = await _read(connection, MAX_ERROR_BYTES)
                is_own = live.job.is_tenant_credential
                body = self._encoder.redact(body, live)
                failure = response_failure(connection.status, connection.headers, body, is_tenant_credential=is_own)
                self._learn(entry, connection, failure.retry_after if failure.is_capacity else None)
                raise failure
            self._learn(entry, connection)
            if request.operation == "embeddings":
                numbers = (self._upstream.dimensions or MAX_DIMENSIONS) * len(live.job.input_lengths)
                body = await _read(connection, min(MAX_RESPONSE_BYTES, numbers * NUMBER_BYTES + MAX_ERROR_BYTES))
                self._send(run, decode_vectors(live.engine_id, body, request, len(live.job.input_lengths)))
                return
            is_anthropic = self._upstream.protocol == UpstreamEngine.ANTHROPIC
            make = AnthropicDecoder if is_anthropic else OpenAIDecoder
            params = live.job.params
            run.decoder = make(live.engine_id, request, params.n, params.max_tokens)
            await self._relay_stream(run, run.decoder, connection.chunks())
        finally:
            self._pool.give_back(connection)

    def _learn(self, entry: Entry | None, connection: UpstreamConnection, retry_after: float | None = None) -> None:
        """Share the rate limits that the headers of a response report."""
        if entry is not None and self._limits is not None:
            self._limits.learn(entry, reported_limits(connection.headers), retry_after)

    async def _relay_stream(self, run: _Run, decoder: StreamDecoder, chunks: AsyncIterator[bytes]) -> None:
        parser, size = EventParser(), 0
        async for chunk in chunks:
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise make_upstream_failure("The model's provider sent a response that is too large.")
            self._decode(run, decoder, parser.feed(chunk))
            if decoder.is_complete:
                break
        if not decoder.is_complete:
            self._decode(run, decoder, parser.close())
        for output in decoder.finish():
            self._send(run, output)
        # The connection can be used again only after the end of the response.
        with suppress(TimeoutError, ConnectionLost):
            async with asyncio.timeout(END_SECONDS):
                await anext(chunks, None)

    def _decode(self, run: _Run, decoder: StreamDecoder, events: Iterable[bytes]) -> None:
        for event in events:
            for output in decoder.decode(event):
                self._send(run, output)

    def _send(self, run: _Run, outcome: Outcome) -> None:
        live = run.live
        if live.engine_id not in self._live:
            return  # it has ended
        if not isinstance(outcome, Requeued):
            outcome = run.bounds.apply(outcome)
        if isinstance(outcome, RequestOutput):
            has_content = outcome.text or outcome.reasoning or outcome.calls or outcome.vectors
            if live.first_token_at is None and has_content:
                live.first_token_at = time.monotonic()
        if is_last(outcome):
            del self._live[live.engine_id]
            self._metrics.record_end(live, outcome)
        self._outbox.append((live, outcome))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._flush_scheduled = False
        self._deliver(outbox)


def _requester(job: InferenceJob, credential: int | None) -> Requester:
    return Requester(job.billing_context.tenant_id, credential if job.is_tenant_credential else None)


def _pause(attempt: int) -> float:
    """Return the seconds to wait before a request is repeated, if the upstream names no time."""
    seconds: float = min(FIRST_WAIT_SECONDS * 2 ** min(attempt, 10), MAX_WAIT_SECONDS)
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - so that requests are not repeated together


async def _read(connection: UpstreamConnection, max_bytes: int) -> bytes:
    """Return the body of a response.

    Raises:
        UpstreamFailed: it is too large.
    """
    body = bytearray()
    async for chunk in connection.chunks():
        body += chunk
        if len(body) > max_bytes:
            raise make_upstream_failure("The model's provider sent a response that is too large.")
    return bytes(body)


def describe_upstream(upstream: UpstreamSpec) -> Machine:
    """Return the description of a relay's replica."""
    return Machine(
        version=VERSION,
        device=f"upstream ({upstream.engine})",
        cores=1,
        dtype="",
        max_model_len=upstream.context_length,
        block_size=0,
    )
