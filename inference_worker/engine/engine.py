"""The engine: requests in, tokens out, one step at a time. Single-threaded: whoever calls it owns it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from inference_worker.engine.config import EngineConfig, ModelConfig
from inference_worker.engine.kv_cache import KVCacheManager
from inference_worker.engine.model_runner import ModelRunner, Runner
from inference_worker.engine.output import append_token, end, fail
from inference_worker.engine.request import Request, RequestOutput, RequestRejected
from inference_worker.engine.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from inference_worker.engine.sequence import Sequence, Status
from inference_worker.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, and what it has done since its start."""

    num_running: int
    num_waiting: int
    steps: int
    batched_sequences: int  # sum over steps of the sequences in the batch
    batched_tokens: int  # sum over steps of the tokens computed
    prompt_tokens: int  # of requests scheduled
    cached_tokens: int  # of these, read from the prefix cache
    output_tokens: int
    preemptions: int
    kv_blocks: int
    kv_blocks_used: int  # held by running requests
    schedule_seconds: float
    forward_seconds: float
    output_seconds: float


class LLMEngine:
    """Continuous batching over one model.

    Args:
        config: how to serve it.
        runner: what computes the steps; made from `config` when absent.
        model_config, tokenizer: read from `config.model_dir` when absent. Requests of an engine with a runner of its
            own and no tokenizer get tokens and no text.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        model_config: ModelConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config or ModelConfig.from_dir(config.model_dir)
        self.tokenizer = tokenizer if tokenizer or runner else Tokenizer.from_dir(config.model_dir)
        own_limit = self.model_config.max_model_len
        self.max_model_len = min(own_limit, config.max_model_len or own_limit)
        self._eos = frozenset(self.tokenizer.eos_token_ids if self.tokenizer else self.model_config.eos_token_ids)
        self._runner = runner or ModelRunner(config, self.model_config, self.max_model_len)
        cache = KVCacheManager(self._runner.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            cache,
            max_batch=config.max_batch,
            step_tokens=config.step_tokens,
            long_prompt_tokens=config.long_prompt_tokens,
        )
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._batched_sequences = self._batched_tokens = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._schedule_seconds = self._forward_seconds = self._output_seconds = 0.0

    def add_request(self, request: Request) -> None:
        """Accept a request; its tokens come from `step`.

        Raises:
            RequestRejected: it can never be served.
        """
        self._check(request)
        text = self.tokenizer.detokenizer(request.params.stop) if self.tokenizer else None
        seq = Sequence(request, text)
        self._sequences[seq.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once; its last output, with the usage so far. None if it is not there any more."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        output = end(seq, RequestOutput(request_id), "cancelled")
        self._drop(seq)
        return output

    def step(self) -> list[RequestOutput]:
        """Schedule, compute and account for one batch. One output for each request that got a token or ended."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        outputs = [self._fail(seq, "context_length_exceeded", _OUTGROWN) for seq in batch.outgrown]
        if not batch.scheduled:
            return outputs
        scheduled = time.perf_counter()
        self._schedule_seconds += scheduled - started
        self._count(batch)
        try:
            result = self._runner.execute(batch)
        except Exception:  # whatever broke the step, only those in it may suffer
            log.exception("a step of %d sequences failed", len(batch.scheduled))
            return outputs + [self._fail(s.seq, "internal_error", _STEP_FAILED) for s in batch.scheduled]
        computed = time.perf_counter()
        self._forward_seconds += computed - scheduled
        outputs += self._account(batch, result.tokens)
        self._output_seconds += time.perf_counter() - computed
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def stats(self) -> EngineStats:
        pool = self.scheduler.cache.pool
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            steps=self._steps,
            batched_sequences=self._batched_sequences,
            batched_tokens=self._batched_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self.scheduler.preemptions,
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_free,
            schedule_seconds=self._schedule_seconds,
            forward_seconds=self._forward_seconds,
            output_seconds=self._output_seconds,
        )

    def check_integrity(self) -> None:
        """Check every account of requests and blocks; cheap enough for an idle moment.

        Raises:
            RuntimeError: something is not as it must be.
        """
        self.scheduler.check_integrity()
        queued = {seq.request_id for seq in self.scheduler.running + self.scheduler.waiting}
        if queued != set(self._sequences):
            raise RuntimeError("engine integrity: a request is neither running nor waiting")

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self._sequences:
            raise RequestRejected("duplicate_request", f"request {request.request_id} is being served already")
        if not prompt:
            raise RequestRejected("invalid_prompt", "the prompt is empty", "messages")
        vocab = self.model_config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestRejected("invalid_prompt", f"token ids must be from 0 to {vocab - 1}", "messages")
        if params.max_tokens < 1:
            raise RequestRejected("invalid_value", "max_tokens must be at least 1", "max_tokens")
        pool = self.scheduler.cache.pool.num_blocks * self.config.block_size
        limit = min(self.max_model_len, pool)
        if len(prompt) + params.max_tokens > limit:
            alone = len(prompt) >= limit
            wanted = f"the prompt has {len(prompt)} tokens"
            if alone:
                advice, param = "shorten the messages", "messages"
            else:
                wanted += f" and max_tokens is {params.max_tokens}"
                advice, param = "shorten the messages, or lower max_tokens", "max_tokens"
            message = f"this model's context is {limit} tokens, but {wanted}; {advice}"
            raise RequestRejected("context_length_exceeded", message, param)

    def _count(self, batch: SchedulerOutput) -> None:
        self._steps += 1
        self._batched_sequences += len(batch.scheduled)
        self._batched_tokens += batch.num_tokens
        for seq in batch.started:
            seq.scheduled_at = time.monotonic()
            self._prompt_tokens += seq.num_prompt_tokens
            self._cached_tokens += seq.cache_read or 0

    def _account(self, batch: SchedulerOutput, tokens: list[int]) -> list[RequestOutput]:
        outputs = []
        sampled = iter(tokens)
        for scheduled in batch.scheduled:
            token_id = next(sampled) if scheduled.samples else None
            try:
                output = self._advance(scheduled, token_id)
            except Exception:  # one request's trouble must not reach the others
                log.exception("request %s failed", scheduled.seq.request_id)
                output = self._fail(scheduled.seq, "internal_error", _STEP_FAILED)
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(self, scheduled: ScheduledSequence, token_id: int | None) -> RequestOutput | None:
        seq = scheduled.seq
        if seq.status is Status.FINISHED:
            return None  # aborted while the step ran: its token is dropped, and not billed
        self.scheduler.complete(scheduled)
        if token_id is None:
            return None
        output = append_token(seq, token_id, self._eos)
        self._output_tokens += 1
        if output.finished:
            self._drop(seq)
        return output

    def _fail(self, seq: Sequence, code: str, message: str) -> RequestOutput:
        output = fail(seq, code, message)
        self._drop(seq)
        return output

    def _drop(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self._sequences.pop(seq.request_id, None)


_OUTGROWN = "the request has outgrown the KV cache"
_STEP_FAILED = "the engine failed on this request; it can be sent again"
