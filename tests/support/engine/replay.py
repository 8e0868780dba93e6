"""Replay of real traces through the scheduler and KV cache with a fake model, and the best possible cache hit rates.

The traces are in tests/data/traces. `python -m benchmarks.replay` prints the results.
"""

from __future__ import annotations

import csv
import gzip
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import TINY, FakeRunner, FakeStep

TRACES = Path(__file__).parents[2] / "data" / "traces"
MOONCAKE_BLOCK = 512  # tokens of a block of the Mooncake trace
VOCAB = 1 << 18
ANSWER = VOCAB - 1  # the token of generated outputs; no prompt contains it


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trace, with its output."""

    prompt: list[int]
    answer: list[int]
    arrival: float = 0.0  # seconds
    tenant: str = ""


Conversation = Iterable[Turn]  # a turn is sent when the previous one is complete


class Lengths(NamedTuple):
    """A request with known lengths and unknown content."""

    prompt: int
    output: int


def mooncake(limit: int | None = None, most_output: int | None = None) -> Iterator[Conversation]:
    """Return the Mooncake chat trace. Each request is a separate conversation, since the trace does not link turns.

    A block contains its ID in the trace, so blocks are equal only where the trace has equal IDs.
    """
    with gzip.open(TRACES / "mooncake_conversation.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in islice(file, limit):
            row = json.loads(line)
            prompt: list[int] = []
            for block in row["hash_ids"]:
                prompt += [block] * min(MOONCAKE_BLOCK, row["input_length"] - len(prompt))
            output = min(row["output_length"], most_output or row["output_length"])
            yield [Turn(prompt, [ANSWER] * output, row["timestamp"] / 1000)]


def azure() -> list[Lengths]:
    """Return the lengths of the Azure conversation trace, in its order."""
    with gzip.open(TRACES / "azure_conversation.csv.gz", "rt", encoding="utf-8") as file:
        return [Lengths(int(row["context_tokens"]), int(row["generated_tokens"])) for row in csv.DictReader(file)]


def unrelated(lengths: Iterable[Lengths], tenants: int = 1) -> Iterator[Conversation]:
    """Return requests of these lengths, of `tenants` tenants in turn, without common prefixes: each prompt begins with
    a different token."""
    for number, (prompt, output) in enumerate(lengths):
        tokens = [number, *[ANSWER - 1] * (prompt - 1)]
        yield [Turn(tokens, [ANSWER] * output, tenant=str(number % tenants))]


def taubench(tokenizer: Tokenizer, limit: int | None = None) -> list[list[Turn]]:
    """Return the tau-bench conversations in the model's tokens. Each turn of the agent is a request.

    The embedded model's chat template has no tools, so they are text in the system prompt, in the agent's messages
    and in messages of the role "tool".
    """
    shared = json.loads(gzip.decompress((TRACES / "taubench_system_and_tools.json.gz").read_bytes()))
    system = {"role": "system", "content": f"{shared['system']}\n\n# Tools\n\n{_lines(shared['tools'])}"}
    with gzip.open(TRACES / "taubench_trajectories.jsonl.gz", "rt", encoding="utf-8") as file:
        trajectories = [json.loads(line)["messages"] for line in islice(file, limit)]
    return [list(_turns(tokenizer, [system, *map(_as_text, messages)])) for messages in trajectories]


def _turns(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Iterator[Turn]:
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(list(messages[:index]))
            # The model's output: the text, and the token that ends a message.
            answer = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
            yield Turn(prompt, answer)


def _as_text(message: dict[str, Any]) -> dict[str, str]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join(filter(None, [message.get("content"), _lines(calls)]))}


def _lines(values: Iterable[Any]) -> str:
    return "\n".join(json.dumps(value) for value in values)


# Best possible hit rates


class Chains:
    """Numbers of full prompt blocks. Blocks have equal numbers only if their tokens and all blocks before are equal."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, turn: Turn) -> list[int]:
        """Return the full blocks computed for a turn: those of its prompt, and of its output without the last token."""
        tokens, size = turn.prompt + turn.answer[:-1], self.block_size
        chain, block = [], -1
        for start in range(0, len(tokens) - size + 1, size):
            block = self._numbers.setdefault((block, tuple(tokens[start : start + size])), len(self._numbers))
            chain.append(block)
        return chain


class PrefixCache:
    """A minimal prefix cache. It evicts the least recently used block, and the end of a prompt before its beginning.

    It has no concurrent requests, blocks in use or hashes.

    Args:
        num_blocks: its size; None: unlimited.
    """

    def __init__(self, block_size: int, num_blocks: int | None = None) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.prompt_tokens = self.hit_tokens = self.computed_tokens = 0
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens whose block was cached, as billed."""
        return self.hit_tokens / self.prompt_tokens

    def serve(self, num_prompt_tokens: int, chain: list[int]) -> None:
        """Count the cached part of a prompt, then cache all its blocks.

        If the whole prompt is cached, its last block is computed again for the logits of its last token.
        """
        whole = chain[: num_prompt_tokens // self.block_size]
        hits = next((i for i, block in enumerate(whole) if block not in self._cached), len(whole))
        self.prompt_tokens += num_prompt_tokens
        self.hit_tokens += hits * self.block_size
        usable = min(hits, (num_prompt_tokens - 1) // self.block_size)
        self.computed_tokens += num_prompt_tokens - usable * self.block_size
        for block in reversed(chain):
            self._cached[block] = None
            self._cached.move_to_end(block)
        while self.num_blocks is not None and len(self._cached) > self.num_blocks:
            self._cached.popitem(last=False)


def simulate(conversations: Iterable[Conversation], block_size: int, *pools: int | None) -> list[PrefixCache]:
    """Return a cache for each size in `pools` (None: unlimited), after serving all turns one by one."""
    chains = Chains(block_size)
    caches = [PrefixCache(block_size, num_blocks) for num_blocks in pools]
    for conversation in conversations:
        for turn in conversation:
            chain = chains.of(turn)
            for cache in caches:
                cache.serve(len(turn.prompt), chain)
    return caches


# The replay


@dataclass(slots=True)
class Replay:
    """The results of a replay."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, as billed
    computed_tokens: int = 0  # of the prompts, repeated for preempted requests
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    sequences: int = 0  # in all steps together
    held_blocks: int = 0  # after each step, summed
    held_tokens: int = 0  # computed tokens in these blocks, summed
    submit_seconds: float = 0.0
    step_seconds: float = 0.0  # of the engine, without the fake model's time
    schedule_seconds: float = 0.0  # of these
    output_seconds: float = 0.0  # of these
    errors: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def waste(self, block_size: int) -> float:
        """Return the unused share of the allocated blocks. It is meaningful if requests share no blocks."""
        return 1 - self.held_tokens / (self.held_blocks * block_size)


class TimedRunner(FakeRunner):
    """A fake runner that measures its own time, so that it can be subtracted."""

    seconds = 0.0

    def launch(self, output: SchedulerOutput) -> FakeStep:
        started = time.perf_counter()
        self.steps.clear()
        try:
            return super().launch(output)
        finally:
            self.seconds += time.perf_counter() - started


class Replayer:
    """An engine without a model that serves a trace's conversations.

    The clock shows the trace's arrival time of the last request. The load is determined by `play`'s window, not by
    the clock, since a fake model's steps take no time.

    Args:
        num_blocks, block_size: the KV cache.
        settings: of EngineConfig.
    """

    def __init__(self, num_blocks: int, block_size: int, **settings: Any) -> None:
        self._answers: dict[str, list[int]] = {}
        self._now = 0.0
        self.runner = TimedRunner(num_blocks, self._choose)
        self.runner.during = self._note
        config = EngineConfig(Path(), block_size=block_size, **settings)
        model = replace(TINY, vocab_size=VOCAB, max_model_len=1 << 20, eos_token_ids=())
        self.engine = LLMEngine(config, runner=self.runner, model_config=model, clock=lambda: self._now)
        self.replay = Replay()

    def play(
        self,
        conversations: Iterable[Conversation],
        window: int,
        on_step: Callable[[LLMEngine], None] = lambda _: None,
    ) -> Replay:
        """Serve all conversations in order, `window` of them concurrently, and call `on_step` after each step."""
        engine, result = self.engine, self.replay
        fresh = iter(conversations)
        under_way: dict[str, Iterator[Turn]] = {}
        while True:
            while len(under_way) < window and (conversation := next(fresh, None)) is not None:
                self._send(iter(conversation), under_way)
            if not under_way:
                break
            started = time.perf_counter()
            outputs = engine.step()
            result.step_seconds += time.perf_counter() - started
            on_step(engine)
            for output in outputs:
                if output.finished:
                    if output.error is not None:
                        result.errors.append(f"{output.request_id}: {output.error.message}")
                    if output.usage is not None:
                        result.cached_tokens += output.usage.cache_read
                    self._send(under_way.pop(output.request_id), under_way)
        self._conclude()
        return result

    def _send(self, turns: Iterator[Turn], under_way: dict[str, Iterator[Turn]]) -> None:
        """Send a conversation's next turn, if there is one."""
        turn = next(turns, None)
        if turn is None:
            return
        result = self.replay
        name = str(result.requests)
        result.requests += 1
        result.prompt_tokens += len(turn.prompt)
        self._now = max(self._now, turn.arrival)
        self._answers[name] = turn.answer
        params = SamplingParams(max_tokens=len(turn.answer), temperature=0, ignore_eos=True)
        started = time.perf_counter()
        self.engine.add_request(Request(name, turn.prompt, params, arrival=self._now, tenant=turn.tenant))
        result.submit_seconds += time.perf_counter() - started
        under_way[name] = turns

    def _choose(self, seq: Sequence) -> int:
        return self._answers[seq.request_id][seq.num_output_tokens]

    def _note(self, _: SchedulerOutput) -> None:
        self.replay.held_blocks += self.engine.stats().kv_blocks_used
        self.replay.held_tokens += sum(seq.num_computed_tokens for seq in self.engine.scheduler.running)

    def _conclude(self) -> None:
        stats, result = self.engine.stats(), self.replay
        result.step_seconds -= self.runner.seconds
        result.steps, result.sequences = stats.steps, stats.batched_sequences
        result.output_tokens, result.preemptions = stats.output_tokens, stats.preemptions
        # The last token of an output is never computed.
        result.computed_tokens = stats.batched_tokens - (stats.output_tokens - result.requests)
        result.schedule_seconds, result.output_seconds = stats.schedule_seconds, stats.output_seconds
