"""The worker's engine profiles on the embedded model: the effect of long prompts on decoding streams.

    python -m benchmarks.profiles
    python -m benchmarks.profiles --add small=64,32,16

One engine at a time runs in this process, without a platform. `--streams` streams decode, and each starts a new short
prompt when its output is complete. Meanwhile `--senders` clients send prompts of 512 tokens (--long-prompt), each the
next one when its output of 16 to 48 tokens is complete. No two prompts share a prefix. TTFT is that of the long
prompts, ITL that of the streams, tokens/s that of all. The profiles are measured in turn in each round, and the results
are medians over the rounds.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.options import parse
from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.engine_config import PROFILES, EngineConfig, EngineProfile
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import ModelRunner

LONG_ANSWER = (16, 48)  # tokens; lengths are random, so that clients do not synchronize
SHORT_PROMPT, SHORT_ANSWER = 32, 128


@dataclass
class Round:
    """The result of one round of one profile. Times are in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> tuple[float, ...]:
        """Return TTFT p50 and p95, and ITL p50, p95 and p99 in milliseconds, and tokens per second."""
        of_ttft, of_gaps = (statistics.quantiles(times, n=100, method="inclusive") for times in (self.ttft, self.gaps))
        times = (of_ttft[49], of_ttft[94], of_gaps[49], of_gaps[94], of_gaps[98])
        return (*(1e3 * value for value in times), self.tokens / self.seconds)


class Load:
    """The clients of one round."""

    def __init__(self, engine: LLMEngine, draw: random.Random, options: argparse.Namespace) -> None:
        self._engine = engine
        self._long_prompt = options.long_prompt
        self._draw = draw
        self._names: Iterator[int] = iter(range(1 << 30))
        self._fresh: set[str] = set()  # requests without a token yet
        self._last: dict[str, float] = {}  # time of a request's submission or last token
        self.result = Round()
        for _ in range(options.streams):
            self._send(
                "stream", SHORT_PROMPT, draw.randint(1, SHORT_ANSWER)
            )  # random, so that they do not end together
        for _ in range(options.senders):
            self._send("long", self._long_prompt, self._draw.randint(*LONG_ANSWER))

    def run(self, prompts: int) -> Round:
        """Step until `prompts` long prompts have their first token, without the initial ones."""
        started, ignored = time.perf_counter(), sum(name.startswith("long") for name in self._last)
        while len(self.result.ttft) < ignored + prompts:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id
                self._token(name, now, first=name in self._fresh)
                if output.finished:
                    del self._last[name]
                    if name.startswith("stream"):
                        self._send("stream", SHORT_PROMPT, SHORT_ANSWER)
                    else:
                        self._send("long", self._long_prompt, self._draw.randint(*LONG_ANSWER))
            if len(self.result.ttft) < ignored:  # the start is not a steady state
                self.result.gaps.clear()
                self.result.tokens, started = 0, now
        self.result.seconds = time.perf_counter() - started
        self.result.ttft = self.result.ttft[ignored:]
        return self.result

    def _token(self, name: str, now: float, *, first: bool) -> None:
        since = now - self._last[name]
        self._last[name] = now
        self.result.tokens += 1
        self._fresh.discard(name)
        if first and name.startswith("long"):
            self.result.ttft.append(since)
        elif not first and name.startswith("stream"):
            self.result.gaps.append(since)

    def _send(self, client_type: str, prompt: int, answer: int) -> None:
        name = f"{client_type}-{next(self._names)}"
        ids = [self._draw.randrange(1000, 40_000) for _ in range(prompt)]
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self._engine.add_request(Request(name, ids, params, arrival=time.monotonic()))
        self._last[name] = time.perf_counter()
        self._fresh.add(name)


def prepare(threads: int) -> tuple[EngineConfig, ModelConfig, ModelRunner]:
    """Return the embedded model, loaded once for all profiles, since they differ only in scheduling."""
    with tempfile.TemporaryDirectory() as state:
        model_dir = ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(state))
        config = EngineConfig(model_dir, threads=threads, measure_peaks=False)
        model = read_decoder_directory(model_dir)
        return config, model, ModelRunner(config, model, model.max_model_len)


def measure(profiles: dict[str, EngineProfile], options: argparse.Namespace) -> dict[str, list[Round]]:
    """Measure the profiles in turn. If interrupted, return the complete rounds."""
    config, model, runner = prepare(options.threads)
    done: dict[str, list[Round]] = {name: [] for name in profiles}
    with suppress(KeyboardInterrupt):
        for number in range(options.rounds):
            results: dict[str, Round] = {}
            for name, profile in profiles.items():
                engine = LLMEngine(replace(config, **asdict(profile)), runner=runner, model_config=model)
                draw = random.Random(number)  # noqa: S311 (prompts, not secrets)
                results[name] = Load(engine, draw, options).run(options.prompts)
            for name, result in results.items():
                done[name].append(result)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts (default 7)")
    parser.add_argument("--prompts", type=int, default=8, help="long prompts counted in a round")
    parser.add_argument("--streams", type=int, default=12, help="streams that decode (default 12)")
    parser.add_argument("--senders", type=int, default=2, help="callers that send long prompts (default 2)")
    parser.add_argument("--long-prompt", type=int, default=512, help="tokens of a long prompt (default 512)")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: as many as there are cores (default)")
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=MAX_NUM_BATCHED_TOKENS,LONG_PREFILL_TOKEN_THRESHOLD,MAX_NUM_SEQS",
        help="an additional profile; may be repeated",
    )
    parser.add_argument("--only", action="store_true", help="no profiles but those added")
    options = parse(parser, {"rounds": 1, "prompts": 2, "streams": 2, "senders": 2, "long_prompt": 32})
    profiles: dict[str, EngineProfile] = {} if options.only else dict(PROFILES)
    for text in options.add:
        name, _, figures = text.partition("=")
        profiles[name] = EngineProfile(*map(int, figures.split(",")))
    logging.disable(logging.INFO)
    rounds = measure(profiles, options)
    if not all(rounds.values()):
        raise SystemExit("interrupted before the first round was over")
    sys.stdout.write(
        f"{options.streams} streams, {options.senders} senders of prompts of {options.long_prompt}; milliseconds;"
        f" medians of {len(next(iter(rounds.values())))} rounds\n"
        f"{'profile':<12}{'step':>6}{'chunk':>6}{'batch':>6}"
        f"{'TTFT p50':>10}{'p95':>8}{'ITL p50':>9}{'p95':>7}{'p99':>7}{'tokens/s':>10}\n"
    )
    for name, profile in profiles.items():
        figures = zip(*(result.figures() for result in rounds[name]), strict=True)
        ttft50, ttft95, itl50, itl95, itl99, rate = map(statistics.median, figures)
        sys.stdout.write(
            f"{name:<12}{profile.max_num_batched_tokens:>6}{profile.long_prefill_token_threshold:>6}{profile.max_num_seqs:>6}"
            f"{ttft50:>10.0f}{ttft95:>8.0f}{itl50:>9.1f}{itl95:>7.1f}{itl99:>7.1f}{rate:>10.1f}\n"
        )


if __name__ == "__main__":
    main()
