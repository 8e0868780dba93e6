"""The interface between the Celery worker and an engine: `EngineClient`, and its implementation with a resident engine.

An engine is not thread-safe, and this module runs it in one thread. Submissions and cancellations go through an inbox
that is read before each step. A step's outputs are passed to one callback.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.messages import InferenceJob
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.prefix_digest import PrefixDigest
from inference_worker.contract.request import Request, RequestError, RequestOutput, RequestRejected, TokenCounts
from inference_worker.engine.engine import EngineStats
from inference_worker.engine.structured_output.grammars import GrammarCompiler

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 5.0  # for the engine's last step


@dataclass(frozen=True)
class PinnedPrefixes:
    """The pins of a tenant that the broker has, of all replicas."""

    pins: Mapping[bytes, int] = field(default_factory=dict)  # seconds by hash of one prompt's blocks
    room: int | None = None  # number of further pins; None: not requested


@dataclass(eq=False)
class ActiveJob:
    """A claimed execution, until its end has been published."""

    job: InferenceJob
    attempt: int
    replica_id: str = ""  # the replica that claimed it
    block_size: int = 0  # tokens of the replica's KV cache blocks
    claimed_at: float = field(default_factory=time.monotonic)
    scheduled_at: float | None = None
    first_token_at: float | None = None
    paid: PinnedPrefixes = field(default_factory=PinnedPrefixes)  # paid pins of the prompt's blocks, on any replica
    next_seq: int = 0  # number of the next stream event, set by the publisher
    reasoning_tokens: int = 0  # reasoning tokens of its outputs, set by the publisher
    pins_reported: bool = False  # whether the broker has the execution's pins, set by the publisher

    @property
    def engine_id(self) -> str:
        """The engine's request id, which is unique for each attempt."""
        return f"{self.job.billing_context.request_id}/{self.job.billing_context.execution}/{self.attempt}"


@dataclass(frozen=True)
class Requeued:
    """The outcome of an execution that returns to the queue without having started."""


Outcome = RequestOutput | RequestError | Requeued
Delivery = tuple[ActiveJob, Outcome]
Deliver = Callable[[Sequence[Delivery]], None]


def is_last(outcome: Outcome) -> bool:
    """Return whether this is the execution's last outcome. One of several sequences may end earlier, without usage."""
    return not isinstance(outcome, RequestOutput) or outcome.usage is not None


class EngineClient(Protocol):
    """The engine interface for the worker. All methods are thread-safe and return immediately."""

    def submit(self, live: ActiveJob) -> None: ...

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        """End the execution within two steps, as cancelled with its usage, or with `failure` if given."""

    def requeue(self, live: ActiveJob) -> None:
        """Remove the execution from the engine, unless it has sent a token."""

    def live(self) -> list[ActiveJob]:
        """Return the submitted executions that have not ended."""

    def stats(self) -> EngineStats: ...

    def prefix_digest(self) -> PrefixDigest | None: ...

    def metrics(self) -> MetricsSnapshot: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """The interface of a resident engine, for generation or for embeddings. Methods are those of `LLMEngine`."""

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str, *, billed: bool = True) -> RequestOutput | None: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def prefix_digest(self) -> PrefixDigest | None:
        """Return the digest of the prefix cache, if there is one. Any thread may call it."""

    @property
    def metrics(self) -> WorkerMetrics: ...

    @property
    def slow(self) -> SlowReason | None:
        """Return why the model uses a slower backend than the machine's default, or None."""

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The grammar compiler; None without structured output."""


class WorkerMetrics(Protocol):
    def snapshot(self) -> MetricsSnapshot: ...


class ResidentEngine:
    """An `EngineClient` with an engine in this process."""

    def __init__(self, engine: Engine, deliver: Deliver, on_broken: Callable[[], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_broken = on_broken
        self._wake = threading.Condition()
        self._submitted: list[ActiveJob] = []
        self._preparing: list[ActiveJob] = []  # submitted; their grammars are being compiled
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._cancelled: list[tuple[ActiveJob, RequestError | Requeued | None]] = []
        self._live: dict[str, ActiveJob] = {}
        self._closing = False
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, live: ActiveJob) -> None:
        structured = live.job.structured
        grammars = self._engine.grammars
        known = structured is None or grammars is None or grammars.knows(_tenant(live), structured)
        with self._wake:
            (self._submitted if known else self._preparing).append(live)
            self._wake.notify()
        if not known:
            self._compiler.submit(self._prepare, live)

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        self._remove(live, failure)

    def requeue(self, live: ActiveJob) -> None:
        self._remove(live, Requeued())

    def _remove(self, live: ActiveJob, outcome: RequestError | Requeued | None) -> None:
        with self._wake:
            self._mark_prepared(live)
            self._cancelled.append((live, outcome))
            self._wake.notify()

    def _prepare(self, live: ActiveJob) -> None:
        """Compile the grammar while the engine serves other requests, so that the engine finds the result in the
        cache."""
        structured, grammars = live.job.structured, self._engine.grammars
        if structured is not None and grammars is not None:
            with contextlib.suppress(RequestRejected):
                grammars.start(_tenant(live), structured)
        with self._wake:
            self._mark_prepared(live)
            self._wake.notify()

    def _mark_prepared(self, live: ActiveJob) -> None:
        if live in self._preparing:  # otherwise it was cancelled before
            self._preparing.remove(live)
            self._submitted.append(live)

    def live(self) -> list[ActiveJob]:
        with self._wake:
            return [*self._live.values(), *self._submitted, *self._preparing]

    def stats(self) -> EngineStats:
        return self._stats

    def prefix_digest(self) -> PrefixDigest | None:
        return self._engine.prefix_digest()

    def metrics(self) -> MetricsSnapshot:
        return self._engine.metrics.snapshot()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            log.error("engine_left", executions=[live.engine_id for live in self.live()])
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._engine.grammars is not None:
            self._engine.grammars.close()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                outputs = self._take_inbox()
                if self._engine.has_unfinished():
                    outputs += self._deliveries(self._engine.step())
                self._stats = self._engine.stats()
                self._finish(outputs)
        except Exception:
            log.exception("engine_broken")
            failure = RequestError("internal_error", "the engine failed; send the request again")
            self._finish([(live, failure) for live in self.live()])
            self._on_broken()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._submitted or self._cancelled or self._closing or self._engine.has_unfinished()):
                self._wake.wait()
            return not self._closing

    def _take_inbox(self) -> list[Delivery]:
        with self._wake:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            self._live.update((live.engine_id, live) for live in submitted)
        outputs: list[Delivery] = []
        unwanted = {live.engine_id for live, _ in cancelled}
        for live in submitted:
            if live.engine_id in unwanted:
                continue
            try:
                self._engine.add_request(_engine_request(live))
            except RequestRejected as exc:
                outputs.append((live, RequestError(exc.code, exc.message, exc.param)))
        ended = {live.engine_id for live, _ in outputs}
        for live, outcome in cancelled:
            begun = live.first_token_at is not None
            if live.engine_id not in self._live or live.engine_id in ended or (begun and isinstance(outcome, Requeued)):
                continue
            ended.add(live.engine_id)
            output = self._engine.abort(live.engine_id, billed=outcome is None)
            outputs.append((live, outcome or output or _nothing_done(live)))
        return outputs

    def _deliveries(self, outputs: Sequence[RequestOutput]) -> list[Delivery]:
        now = time.monotonic()
        deliveries: list[Delivery] = []
        for output in outputs:
            live = self._live[output.request_id]
            if live.first_token_at is None and (output.token_ids or output.vectors):
                live.first_token_at = now
                live.scheduled_at = output.scheduled_at
            deliveries.append((live, output.error or output))
        return deliveries

    def _finish(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        with self._wake:
            for live, output in deliveries:
                if is_last(output):
                    self._live.pop(live.engine_id, None)
        self._deliver(deliveries)


def _tenant(live: ActiveJob) -> str:
    """Return the engine's name of the tenant: the id that the gateway determined from the API key."""
    return str(live.job.billing_context.tenant_id)


def _engine_request(live: ActiveJob) -> Request:
    job = live.job
    return Request(
        request_id=live.engine_id,
        prompt_token_ids=job.prompt_token_ids,
        params=job.params,
        cache_salt=job.cache_salt,
        arrival=live.claimed_at,
        tenant=_tenant(live),
        weight=job.weight,
        service_class=job.service_class,
        priority=job.priority,
        breakpoints=job.breakpoints,
        structured=job.structured,
        reasoning=job.reasoning,
        input_lengths=job.input_lengths,
        second_starts=job.second_starts,
        searches=job.searches,
        speculates=job.speculates,
        prediction=job.prediction,
        paid=live.paid.pins,
        pin_room=live.paid.room,
    )


def _nothing_done(live: ActiveJob) -> RequestOutput:
    return RequestOutput(live.engine_id, finish_reason="cancelled", usage=TokenCounts())
