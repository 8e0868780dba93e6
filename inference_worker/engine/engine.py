"""The engine: accepts requests and generates tokens, one step at a time. Not thread-safe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.prefix_digest import PrefixDigest
from inference_worker.contract.request import Request, RequestOutput, RequestRejected, TokenLogprobs
from inference_worker.contract.validation import check_sampling
from inference_worker.engine.capacity.layer_groups import group_layers
from inference_worker.engine.capacity.roofline import BatchShape
from inference_worker.engine.draft_loading import load_draft_model
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.model_runner import ModelRunner
from inference_worker.engine.output import append_tokens, end, fail, note_prompt_logprobs
from inference_worker.engine.reasoning import ReasoningTracker
from inference_worker.engine.scheduling.scheduler import Scheduler
from inference_worker.engine.sequences.runner import LaunchedStep, Runner, StepResult
from inference_worker.engine.sequences.sequence import RequestGroup, Sequence, SequenceStatus
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput
from inference_worker.engine.speculation.draft_model import DraftModel
from inference_worker.engine.speculation.drafter import Drafter
from inference_worker.engine.speculation.forced_tokens import ForcedTokens, take_forced_tokens
from inference_worker.engine.speculation.prompt_lookup import PromptLookup
from inference_worker.engine.speculation.speculator import Speculator
from inference_worker.engine.structured_output.grammars import GrammarCompiler, GrammarFailed
from inference_worker.engine.telemetry.telemetry import EngineMetrics, StepSeconds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state, and its totals since its start."""

    num_running: int
    num_waiting: int
    steps: int
    batched_sequences: int  # sum of all steps' batch sizes
    batched_tokens: int  # sum of all steps' tokens
    prompt_tokens: int  # prompt tokens of scheduled requests
    cached_tokens: int  # part of prompt_tokens that was read from the prefix cache
    output_tokens: int
    preemptions: int
    kv_blocks: int
    kv_blocks_used: int  # used by running requests
    kv_tokens: int  # tokens of the longest sequence that fits
    schedule_seconds: float
    forward_seconds: float
    output_seconds: float
    held_back: int = 0  # part of num_waiting that waits for an upstream's capacity and uses no slot
    circuit_open: bool = False  # the circuit breaker of an upstream rejects requests
    tenants_paused: int = 0  # by an upstream's circuit breaker


class LLMEngine:
    """Continuous batching over one model.

    Args:
        config: the engine's configuration.
        runner: computes the steps; built from `config` if not given.
        model_config, tokenizer: read from `config.model_dir` if not given. With a given runner and no tokenizer,
            outputs have tokens and no text.
        clock: seconds, as in the requests' `arrival`.
        timer: seconds, for durations of a step's parts.
        drafters: sources of drafts; forced tokens and prompt lookup if not given.
        draft_model: that of `config.draft_model_dir` if not given.

    With asynchronous scheduling, a step is scheduled and launched before the previous one has finished, and its decodes
    use tokens that are in flight. Tokens that depend on the previous ones by a grammar are sampled when these are on
    the host, while the device computes the step. If a request has ended meanwhile, the step's result for it is dropped
    and not billed. Its blocks can still be reused immediately, because the device runs steps in order.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        model_config: ModelConfig | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
        drafters: Items[Drafter] | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._clock, self._timer = clock, timer
        self.config = config
        self.model_config = model_config or read_decoder_directory(config.model_dir)
        self.tokenizer = tokenizer if tokenizer or runner else Tokenizer.from_dir(config.model_dir)
        own_limit = self.model_config.max_model_len
        self.max_model_len = min(own_limit, config.max_model_len or own_limit)
        self._eos = frozenset(self.tokenizer.eos_token_ids if self.tokenizer else self.model_config.eos_token_ids)
        self.grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size)
        self._runner = runner or ModelRunner(config, self.model_config, self.max_model_len, self._eos)
        groups = group_layers(self.model_config.windows, self.model_config.num_layers, self.max_model_len)
        cache = KVCacheManager(
            self._runner.num_blocks,
            config.block_size,
            windows=groups.windows,
            tokens_in_flight=config.max_tokens_in_flight,
            prefix_cache=config.prefix_cache,
            num_host_blocks=self._runner.num_host_blocks,
            pin_share=config.pin_share,
            tenant_pin_share=config.tenant_pin_share,
        )
        # A step that is launched early cannot contain drafts, which follow the tokens of the previous step.
        self.speculator = None
        if config.speculation and not self._runner.async_scheduling:
            if draft_model is None and config.draft_model_dir is not None and isinstance(self._runner, ModelRunner):
                draft_model = load_draft_model(
                    config, config.draft_model_dir, self._runner, self.max_model_len, self._eos
                )
            if drafters is None:
                drafters = (ForcedTokens(), PromptLookup())
            self.speculator = Speculator(drafters, self._eos, draft_model)
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_starting_tokens=config.max_starting_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_long_partial_prefills=config.max_long_partial_prefills,
            locality_tokens=config.locality_tokens,
            speculator=self.speculator,
        )
        self._kv_tokens = cache.demand.max_tokens(cache.pool.num_blocks, self.max_model_len)
        self._groups: dict[str, RequestGroup] = {}
        self._in_flight: _Launched | None = None
        self._computed_at = self._ended_at = 0.0  # timer when the last step returned, and when it was recorded
        self.metrics = EngineMetrics(
            self.scheduler, self._runner.roofline, self._runner.attention_choice, speculator=self.speculator
        )

    @property
    def slow(self) -> SlowReason | None:
        """Return why the model uses a slower backend than the machine's default, or None."""
        return self._runner.slow

    @property
    def computes_with(self) -> str:
        """Return the log's line about instruction sets, threads, weights, kernels, attention and KV cache."""
        return self._runner.computes_with

    def add_request(self, request: Request) -> None:
        """Accept a request. `step` returns its tokens.

        Raises:
            RequestRejected: the request can never be served.
        """
        self._check(request)
        answers = range(request.params.n)
        form, tenant = request.structured, request.tenant
        grammars = [self.grammars.start(tenant, form) if form else None for _ in answers]
        reasonings = [self._reasoning(request) for _ in answers]
        group = self._groups[request.request_id] = RequestGroup(request)
        self.metrics.record_arrival(group, self._clock())
        for index in answers:
            seq = Sequence(request, None, group, index)
            seq.grammar, seq.reasoning = grammars[index], reasonings[index]
            seq.speculates = self.speculator is not None and request.speculates
            if self.tokenizer is not None:
                splitter = seq.reasoning.splitter if seq.reasoning else None
                continues = self.tokenizer.is_continued(request.prompt_token_ids)
                seq.detokenizer = self.tokenizer.detokenizer(request.params, splitter, continues=continues)
            self.scheduler.add(seq, self._clock())

    def abort(self, request_id: str, *, billed: bool = True) -> RequestOutput | None:
        """End all sequences of a request and return its last output with its usage. None if the request has ended.

        If the request is not billed, pinned blocks that it did not compute are unpinned.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        output = RequestOutput(request_id)
        for seq in group.sequences:
            if seq.status is not SequenceStatus.FINISHED:
                output = end(seq, RequestOutput(request_id, index=seq.index), "cancelled")
                self.scheduler.finish(seq)
            if not billed:
                self.scheduler.cache.withdraw_pins(seq)
        return self._conclude(group, output)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Return an output for each sequence that got a token or ended."""
        started = self._timer()
        batch = self.scheduler.schedule(self._clock())
        outputs = self._fail_all(batch.expired, "request_expired", _EXPIRED)
        outputs += self._fail_all(batch.exceeds_kv_cache, "context_length_exceeded", _EXCEEDS_KV_CACHE)
        launched = None
        if batch.scheduled:
            shape = self.metrics.record_schedule(batch)
            at = self._timer()
            try:
                launched = _Launched(batch, shape, started, at, self._runner.launch(batch))
            except Exception:  # only the requests of a failed step fail
                log.exception(_STEP_LOG, len(batch.scheduled))
                outputs += self._step_failed(batch)
        if self._in_flight is not None:
            previous, self._in_flight = self._in_flight, None
            outputs += self._collect(previous)
        if launched is not None:
            try:
                launched.step.sample()
            except Exception:
                log.exception(_STEP_LOG, len(batch.scheduled))
                outputs += self._step_failed(batch)
                launched = None
        if self._runner.async_scheduling:
            self._in_flight = launched
        elif launched is not None:
            outputs += self._collect(launched)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes and return True. Return False, without a change, while requests run."""
        return self.scheduler.cache.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        return bool(self._groups) or self._in_flight is not None

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def prefix_digest(self) -> PrefixDigest | None:
        """Return the digest of the prefix cache. Any thread may call it."""
        return self.scheduler.cache.prefix_digest()

    def stats(self) -> EngineStats:
        pool, metrics = self.scheduler.cache.pool, self.metrics
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            steps=metrics.steps_done,
            batched_sequences=metrics.batched_sequences,
            batched_tokens=metrics.batched_tokens,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            output_tokens=metrics.output_tokens,
            preemptions=self.scheduler.preemptions,
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_held,
            kv_tokens=self._kv_tokens,
            schedule_seconds=metrics.schedule_seconds,
            forward_seconds=metrics.forward_seconds,
            output_seconds=metrics.output_seconds,
        )

    def check_integrity(self) -> None:
        """Check the accounting of requests and blocks. Cheap enough for idle times.

        Raises:
            RuntimeError: an invariant is violated.
        """
        self.scheduler.check_integrity()
        queued = {*self.scheduler.running, *self.scheduler.waiting}
        unfinished = {
            s for group in self._groups.values() for s in group.sequences if s.status is not SequenceStatus.FINISHED
        }
        if queued != unfinished or {seq.request_id for seq in queued} != set(self._groups):
            raise RuntimeError("engine integrity: a request is neither running nor waiting")

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self._groups:
            raise RequestRejected("duplicate_request", f"request {request.request_id} already exists; use a unique id")
        if not prompt:
            raise RequestRejected("invalid_prompt", "the prompt is empty", "messages")
        vocab = self.model_config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestRejected("invalid_prompt", f"token ids must be from 0 to {vocab - 1}", "messages")
        if any(not 0 <= token < vocab for token in request.prediction):
            message = f"the token ids of the prediction must be from 0 to {vocab - 1}"
            raise RequestRejected("invalid_value", message, "prediction")
        check_sampling(params, vocab)
        if request.structured and params.ignore_eos:
            message = "ignore_eos cannot be combined with structured output, which determines the end of the output"
            raise RequestRejected("invalid_value", message, "ignore_eos")
        limit = min(self.max_model_len, self._kv_tokens)
        if len(prompt) + params.max_tokens > limit:
            alone = len(prompt) >= limit
            requested = f"the prompt has {len(prompt)} tokens"
            if alone:
                advice, param = "shorten the messages", "messages"
            else:
                requested += f" and max_tokens is {params.max_tokens}"
                advice, param = "shorten the messages, or lower max_tokens", "max_tokens"
            message = f"this model's context is {limit} tokens, but {requested}; {advice}"
            raise RequestRejected("context_length_exceeded", message, param)

    def _reasoning(self, request: Request) -> ReasoningTracker | None:
        if request.reasoning is None:
            return None
        if self.tokenizer is None:
            raise RequestRejected("invalid_value", "this engine has no tokenizer to read reasoning", "reasoning")
        vocab_size = max(self.model_config.vocab_size, self.tokenizer.vocab_size)
        has_grammar = request.structured is not None
        return ReasoningTracker(request.reasoning, self.tokenizer, vocab_size, self._eos, has_grammar=has_grammar)

    def _collect(self, launched: _Launched) -> list[RequestOutput]:
        try:
            result = launched.step.read()
        except Exception:
            log.exception(_STEP_LOG, len(launched.batch.scheduled))
            return self._step_failed(launched.batch)
        computed = self._timer()
        outputs = self._account(launched.batch, result)
        ended = self._timer()
        # A step that was launched early starts on the device when the previous one has finished.
        seconds = StepSeconds(
            schedule=launched.at - launched.started,
            forward=computed - max(launched.at, self._computed_at),
            output=ended - computed,
            total=ended - max(launched.started, self._ended_at),
        )
        self._computed_at, self._ended_at = computed, ended
        self.metrics.step(launched.batch, launched.shape, seconds)
        if self.speculator is not None and launched.shape.samples == launched.batch.num_tokens:
            self.speculator.costs.observe(launched.batch.num_tokens, seconds.total - self.speculator.draft_seconds)
        self._weigh_restoring(launched.batch.num_tokens, seconds.forward)
        return outputs

    def _weigh_restoring(self, num_tokens: int, seconds: float) -> None:
        """Enable restores from CPU memory only if they are faster than computing the tokens, as measured."""
        if num_tokens >= _MEASURED_TOKENS:  # a step of decodes does not show the cost of a prompt token
            block_seconds = self.config.block_size * seconds / num_tokens
            cache = self.scheduler.cache
            cache.restores = self._runner.restore_seconds * cache.num_groups <= block_seconds

    def _step_failed(self, batch: SchedulerOutput) -> list[RequestOutput]:
        self.scheduler.cache.operations_failed(batch.operations)
        return self._fail_all([s.seq for s in batch.scheduled], "internal_error", _STEP_FAILED)

    def _account(self, batch: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        outputs, now = [], self._clock()
        sampled = iter(enumerate(result.tokens))
        for place, scheduled in enumerate(batch.scheduled):
            row, token_ids = next(sampled) if scheduled.samples else (-1, [])
            try:
                note_prompt_logprobs(scheduled.seq, scheduled.start, result.prompt_logprobs.get(place, ()))
                output = self._advance(scheduled, token_ids, result.logprobs.get(row, []), now)
            except GrammarFailed as exc:
                log.warning("request %s: its grammar failed: %s", scheduled.seq.request_id, exc)
                outputs += self._fail_all([scheduled.seq], "unsupported_schema", _TOO_COMPLEX)
                continue
            except Exception:  # an error of one request must not affect the others
                log.exception("request %s failed", scheduled.seq.request_id)
                outputs += self._fail_all([scheduled.seq], "internal_error", _STEP_FAILED)
                continue
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(
        self, scheduled: ScheduledSequence, token_ids: list[int], logprobs: list[TokenLogprobs], now: float
    ) -> RequestOutput | None:
        seq, num_drafts = scheduled.seq, len(scheduled.drafts)
        is_current = self.scheduler.complete(scheduled, len(token_ids))
        if not token_ids or seq.status is SequenceStatus.FINISHED:
            return None  # aborted while the step ran: the token is dropped and not billed
        output = append_tokens(seq, token_ids, self._eos, logprobs)
        count = len(output.token_ids)  # accepted drafts after the end of the output are dropped
        self.scheduler.charge_output(seq, count)
        if self.speculator is not None and seq.speculates:
            accepted = self.speculator.record(seq, num_drafts, token_ids[:count])
            seq.accepted_drafts += accepted
            seq.rejected_drafts += num_drafts - accepted
        if num_drafts and is_current:
            self.scheduler.cache.publish(seq, min(seq.num_computed_tokens, len(seq.tokens)))
        if self.speculator is not None and seq.speculates and not output.finished:
            self._append_forced(seq, output)
        output.index = seq.index
        self.metrics.tokens(seq, len(output.token_ids), now)
        if output.finished:
            self.scheduler.finish(seq)
            self._conclude(seq.group, output)
        return output

    def _append_forced(self, seq: Sequence, output: RequestOutput) -> None:
        """Add the tokens that the grammar forces to the sequence and to its output."""
        forced = take_forced_tokens(seq)
        if forced:
            count = len(output.token_ids)
            append_tokens(seq, forced, self._eos, output=output)
            self.scheduler.charge_output(seq, len(output.token_ids) - count)
            self.metrics.forced_tokens += len(output.token_ids) - count

    def _fail_all(self, sequences: list[Sequence], code: str, message: str) -> list[RequestOutput]:
        """End the requests of these sequences, each with all its sequences."""
        outputs = []
        for seq in sequences:
            group = self._groups.get(seq.request_id)
            if group is None or group is not seq.group:
                continue  # another sequence of the request has failed, or it was aborted
            for sequence in group.sequences:
                self.scheduler.finish(sequence)
                self.scheduler.cache.withdraw_pins(sequence)
            outputs.append(self._conclude(group, fail(seq, code, message)))
        return outputs

    def _conclude(self, group: RequestGroup, output: RequestOutput) -> RequestOutput:
        """Complete `output` as the last output of its request if no other sequence is unfinished."""
        if group.finished:
            del self._groups[group.request.request_id]
            output.usage, output.cache, output.pins = group.usage(), group.cache_report, group.pins
            output.accepted_drafts = sum(seq.accepted_drafts for seq in group.sequences)
            output.rejected_drafts = sum(seq.rejected_drafts for seq in group.sequences)
            self.metrics.record_end(group, output, self._clock())
        else:
            output.usage = None
        return output


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight."""

    batch: SchedulerOutput
    shape: BatchShape
    started: float  # timer at the start of its scheduling
    at: float  # timer at its launch
    step: LaunchedStep


_MEASURED_TOKENS = 128
_STEP_LOG = "a step of %d sequences failed"
_EXCEEDS_KV_CACHE = "the prompt and its output do not fit into the KV cache; shorten the prompt or lower max_tokens"
_TOO_COMPLEX = "the structured output format is too complex; simplify it"
_EXPIRED = "the request waited too long in the queue; send it again later"
_STEP_FAILED = "the engine failed on this request; send it again"
