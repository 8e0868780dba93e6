"""An engine without a model: the scheduler and the caches are real, the tokens are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inference_worker.contract.config import EngineConfig, ModelConfig
from inference_worker.contract.request import CacheBreakpoint, Request, RequestOutput, SamplingParams, ServiceClass
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import StepResult
from inference_worker.engine.scheduling.scheduler import ScheduledSequence, SchedulerOutput
from inference_worker.engine.scheduling.sequence import Sequence
from inference_worker.engine.telemetry.roofline import Roofline

EOS = 2
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_model_len=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    dtype="float32",
    eos_token_ids=(EOS,),
)


def counting(seq: Sequence) -> int:
    """Return the default tokens: 100, 101 and so on."""
    return 100 + seq.num_output_tokens % 800


class FakeRunner:
    """Answers each step with tokens from `choose`, and remembers the batches it was given."""

    def __init__(self, num_blocks: int, choose: Callable[[Sequence], int] = counting) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.restore_seconds = 0.0
        self.async_scheduling = False
        self.roofline = Roofline.of(TINY, weight_bytes=4, kv_value_bytes=4)
        self.choose = choose
        self.steps: list[dict[str, int]] = []  # request id -> tokens computed
        self.during: Callable[[SchedulerOutput], None] = lambda _: None

    def launch(self, output: SchedulerOutput) -> Callable[[], StepResult]:
        result = self.execute(output)
        return lambda: result

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.steps.append({s.seq.request_id: s.num_new_tokens for s in output.scheduled})
        tokens = [self.choose(s.seq) for s in output.scheduled if s.samples]
        self.during(output)
        return StepResult(tokens)


class MemoryRunner(FakeRunner):
    """A fake device with a memory: each block holds the tokens written to it, and each step finds, for every request
    in it, exactly that request's tokens in that request's blocks.

    Work is done in the order it was launched, and no sooner than its answer is asked for.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, async_scheduling: bool = False
    ) -> None:
        super().__init__(num_blocks)
        self.num_host_blocks = num_host_blocks
        self.async_scheduling = async_scheduling
        self.block_size = block_size
        self.blocks: dict[int, list[int | None]] = {i: [None] * block_size for i in range(1, num_blocks + 1)}
        self.slots: dict[int, list[int | None]] = {i: [None] * block_size for i in range(num_host_blocks)}
        self._sampled: dict[Sequence, int] = {}  # the token each request was given last
        self._queue: list[Callable[[], None]] = []
        self.faults: list[str] = []  # what an engine survives as a failed step, and a test must not

    def launch(self, output: SchedulerOutput) -> Callable[[], StepResult]:
        self.steps.append({s.seq.request_id: s.num_new_tokens for s in output.scheduled})
        tables = [list(s.seq.block_ids) for s in output.scheduled]  # as they are now, and not when the work is done
        known = [list(s.seq.tokens) for s in output.scheduled]
        result = StepResult()

        def work() -> None:
            self._copy(output)
            for s, table, tokens in zip(output.scheduled, tables, known, strict=True):
                self._compute(s, table, tokens)
            result.tokens = [self._sampled[s.seq] for s in output.scheduled if s.samples]

        self._queue.append(work)
        self.during(output)

        def wait() -> StepResult:
            while work in self._queue:
                self._queue.pop(0)()
            return result

        return wait

    def _copy(self, output: SchedulerOutput) -> None:
        for kind, source, target in output.operations:
            origin = self.slots if kind == "restore" else self.blocks
            goal = self.slots if kind == "save" else self.blocks
            goal[target] = list(origin[source])

    def _compute(self, scheduled: ScheduledSequence, table: list[int], tokens: list[int]) -> None:
        end = scheduled.start + scheduled.num_new_tokens
        if scheduled.in_flight:
            tokens = [*tokens, self._sampled[scheduled.seq]]
        for position in range(scheduled.start, end):
            block = self.blocks[table[position // self.block_size]]
            block[position % self.block_size] = tokens[position]
        held = [token for block_id in table for token in self.blocks[block_id]]
        if held[:end] != tokens[:end]:
            self.faults.append(f"{scheduled.seq} finds other tokens than its own")
            raise RuntimeError(self.faults[-1])
        if scheduled.samples:
            self._sampled[scheduled.seq] = 100 + (end - scheduled.seq.num_prompt_tokens) % 800


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fake_engine(
    num_blocks: int = 10,
    *,
    block_size: int = 16,
    choose: Callable[[Sequence], int] = counting,
    clock: Callable[[], float] | None = None,
    runner: FakeRunner | None = None,
    **settings: float,
) -> tuple[LLMEngine, FakeRunner]:
    config = EngineConfig(model_dir=Path(), block_size=block_size, **settings)  # type: ignore[arg-type]
    runner = runner or FakeRunner(num_blocks, choose)
    return LLMEngine(config, runner=runner, model_config=TINY, clock=clock or Clock()), runner


def request(
    name: str,
    prompt: int | list[int],
    *,
    salt: bytes = b"",
    arrival: float = 0.0,
    tenant: str = "",
    weight: float = 1.0,
    service_class: ServiceClass = ServiceClass.DEFAULT,
    priority: int = 0,
    breakpoints: tuple[CacheBreakpoint, ...] = (),
    expires_at: float | None = None,
    **params: object,
) -> Request:
    """Return a request whose prompt is `prompt`, or that many tokens from 10 on."""
    ids = prompt if isinstance(prompt, list) else [10 + i % 900 for i in range(prompt)]
    params.setdefault("max_tokens", 1)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(name, ids, sampling, salt, arrival, tenant, weight, service_class, priority, breakpoints, expires_at)


def distinct(count: int, mark: int) -> list[int]:
    """A prompt that shares no prefix with one of another mark."""
    return [mark, *(10 + i % 900 for i in range(count - 1))]


def run(engine: LLMEngine, steps: int = 10_000) -> dict[str, list[RequestOutput]]:
    """Step until all is done, checking every account after every step; the outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(steps):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
