"""The engine of an embedding model or cross-encoder. A request has many inputs, each with a vector or a score as its
result. There is no KV cache.

A step computes inputs of several requests, up to its token budget. Requests are ordered by class, then by the tenant
that has been served least. So a request with thousands of inputs takes many steps, and other requests are computed
between.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, RequestError, RequestOutput, RequestRejected, TokenCounts
from inference_worker.engine.embeddings.embedding_metrics import EmbeddingMetrics
from inference_worker.engine.embeddings.embedding_runner import Embedder, EmbeddingRunner, Vectors
from inference_worker.engine.engine import EngineStats
from inference_worker.engine.scheduling.fairness import FairShareTable
from inference_worker.engine.scheduling.waiting import WaitingQueue
from inference_worker.engine.sequences.sequence import RequestGroup, Sequence

log = logging.getLogger(__name__)


class EmbeddingEngine:
    """Continuous batching over one encoder. Not thread-safe.

    Args:
        runner, model_config: built from `config` if not given.
        clock: seconds, as in the requests' `arrival`.
    """

    grammars = None

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Embedder | None = None,
        model_config: EncoderConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.model_config = model_config or EncoderConfig.from_dir(config.model_dir)
        own_limit = self.model_config.max_model_len
        self.max_model_len = min(own_limit, config.max_model_len or own_limit)
        # At least one input of any length.
        self._max_num_batched_tokens = max(config.max_num_batched_tokens, self.max_model_len)
        self._runner = runner or EmbeddingRunner(config, self.model_config)
        self._tenants = FairShareTable()
        self._waiting = WaitingQueue(self._tenants, num_cached=lambda _: 0)
        self._tasks: dict[str, _Task] = {}
        self._numbers = itertools.count()
        self.metrics = EmbeddingMetrics()
        self.grammars = None

    @property
    def slow(self) -> SlowReason | None:
        """Return why the model uses a slower backend than the machine's default, or None."""
        return self._runner.slow

    def add_request(self, request: Request) -> None:
        """Accept a request. `step` returns all its vectors together.

        Raises:
            RequestRejected: the request can never be served.
        """
        self._check(request)
        task = self._tasks[request.request_id] = _Task(request, next(self._numbers), self._clock())
        self._tenants.arrive(request.tenant, request.weight)
        self._waiting.add(task.sequence)

    def abort(self, request_id: str, *, billed: bool = True) -> RequestOutput | None:
        """End a request and return its last output with its usage. None if the request has ended. Embeddings have no
        pins."""
        task = self._tasks.get(request_id)
        return None if task is None else self._end(task, RequestOutput(request_id, finish_reason="cancelled"))

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Return an output for each request that ended."""
        started = self._clock()
        outputs = [
            self._end(self._tasks[seq.request_id], _failed_output(seq.request_id, "request_expired", _EXPIRED))
            for seq in self._waiting.pop_expired(started)
        ]
        chosen = self._choose(started)
        if not chosen:
            return outputs
        scheduled = self._clock()
        try:
            pairs = self.model_config.is_cross_encoder
            vectors = self._runner.embed(
                [task.inputs[n] for task, n in chosen],
                [task.request.second_starts[n] for task, n in chosen] if pairs else None,
            )
        except Exception:  # only the requests of a failed step fail
            log.exception("a step of %d inputs failed", len(chosen))
            broken = dict.fromkeys(task for task, _ in chosen)
            return outputs + [self._end(task, _failed_output(task.name, "internal_error", _FAILED)) for task in broken]
        computed = self._clock()
        for (task, n), vector in zip(chosen, vectors, strict=True):
            task.take(n, vector)
        finished = dict.fromkeys(task for task, _ in chosen if task.complete)
        outputs += [self._end(task, RequestOutput(task.name, finish_reason="stop")) for task in finished]
        tokens = sum(len(task.inputs[n]) for task, n in chosen)
        self.metrics.step(len(chosen), tokens, scheduled - started, computed - scheduled, self._clock() - computed)
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._tasks)

    def prefix_digest(self) -> None:
        """Return None: there is no prefix cache."""

    def stats(self) -> EngineStats:
        metrics = self.metrics
        return EngineStats(
            num_running=0,
            num_waiting=len(self._tasks),
            steps=metrics.steps,
            batched_sequences=metrics.inputs,
            batched_tokens=metrics.tokens,
            prompt_tokens=metrics.tokens,
            cached_tokens=0,
            output_tokens=0,
            preemptions=0,
            kv_blocks=0,
            kv_blocks_used=0,
            kv_tokens=0,
            schedule_seconds=metrics.schedule_seconds,
            forward_seconds=metrics.forward_seconds,
            output_seconds=metrics.output_seconds,
        )

    def _check(self, request: Request) -> None:
        lengths, prompt = request.input_lengths, request.prompt_token_ids
        if request.request_id in self._tasks:
            raise RequestRejected("duplicate_request", f"request {request.request_id} already exists; use a unique id")
        starts, scores = request.second_starts, self.model_config.is_cross_encoder
        if not lengths or bool(starts) != scores:
            usage = (
                "a cross-encoder; use /v1/rerank or /v1/score" if scores else "an embedding model; use /v1/embeddings"
            )
            raise RequestRejected("invalid_value", f"this is {usage}", "model")
        if starts and (len(starts) != len(lengths) or min(starts) < 1):
            raise RequestRejected("invalid_prompt", "each pair of texts needs the start of its second text", "input")
        if min(lengths) < 1 or sum(lengths) != len(prompt):
            raise RequestRejected("invalid_prompt", "an input is empty", "input")
        if max(lengths) > self.max_model_len:
            message = f"an input has {max(lengths)} tokens; the model's limit is {self.max_model_len}"
            raise RequestRejected("context_length_exceeded", message, "input")
        vocab = self.model_config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestRejected("invalid_prompt", f"token ids must be from 0 to {vocab - 1}", "input")

    def _choose(self, now: float) -> list[tuple[_Task, int]]:
        """Return the inputs of the next step. The batch class gets only remaining capacity."""
        chosen: list[tuple[_Task, int]] = []
        left = self._max_num_batched_tokens
        for batch in (False, True):
            candidates = self._waiting.candidates(now, batch)
            while (seq := candidates.next()) is not None:
                task = self._tasks[seq.request_id]
                taken = list(task.next_inputs(left))
                tokens = sum(len(task.inputs[n]) for n in taken)
                task.begin(now, tokens)
                self._tenants[task.request.tenant].charge(tokens, 0)
                chosen += [(task, n) for n in taken]
                left -= tokens
                if task.unscheduled:  # the next step continues with it, or with a tenant that was served less
                    return chosen
                self._waiting.remove(seq)
        return chosen

    def _end(self, task: _Task, output: RequestOutput) -> RequestOutput:
        """Complete `output` as the last output of the task's request."""
        del self._tasks[task.name]
        if task.unscheduled:
            self._waiting.remove(task.sequence)
        is_complete = output.finish_reason == "stop"
        searches = task.request.searches if is_complete else 0
        output.usage = TokenCounts(uncached=task.scheduled_tokens, searches=searches)
        output.scheduled_at = task.sequence.group.scheduled_at
        if is_complete:
            output.vectors = task.vectors()
        self.metrics.record_end(task.sequence.group, output, self._clock())
        return output


class _Task:
    """A request with its inputs, shortest last, and the vectors computed so far."""

    def __init__(self, request: Request, number: int, now: float) -> None:
        self.request = request
        self.name = request.request_id
        tokens = iter(request.prompt_token_ids)
        self.inputs = [list(itertools.islice(tokens, length)) for length in request.input_lengths]
        # Similar lengths are adjacent, so that a step gets inputs of similar length.
        self._order = sorted(range(len(self.inputs)), key=lambda n: len(self.inputs[n]))
        self._found: dict[int, Vectors] = {}
        self.scheduled_tokens = 0
        self.sequence = Sequence(request, None, RequestGroup(request))
        self.sequence.number, self.sequence.waiting_since = number, now
        self.sequence.group.arrived_at = request.arrival if 0 < request.arrival < now else now

    @property
    def unscheduled(self) -> bool:
        return bool(self._order)

    @property
    def complete(self) -> bool:
        return len(self._found) == len(self.inputs)

    def next_inputs(self, tokens: int) -> Iterator[int]:
        """Yield inputs that fit into `tokens`, longest first."""
        while self._order and len(self.inputs[self._order[-1]]) <= tokens:
            tokens -= len(self.inputs[self._order[-1]])
            yield self._order.pop()

    def begin(self, now: float, tokens: int) -> None:
        group = self.sequence.group
        self.scheduled_tokens += tokens
        if tokens:
            group.scheduled_at = now if group.scheduled_at is None else group.scheduled_at
            group.prompt_usage = TokenCounts(uncached=self.scheduled_tokens)

    def take(self, n: int, vector: Vectors) -> None:
        self._found[n] = vector

    def vectors(self) -> bytes:
        return np.stack([self._found[n] for n in range(len(self.inputs))]).astype("<f4").tobytes()


def _failed_output(request_id: str, code: str, message: str) -> RequestOutput:
    return RequestOutput(request_id, error=RequestError(code, message))


_EXPIRED = "the request waited too long in the queue; send it again later"
_FAILED = "the engine failed on this request; send it again"
