"""Replays of real traces through the scheduler and the KV cache, with a simulated model.

    python -m benchmarks.replay
    python -m benchmarks.replay --requests 1500 --sections hits,waste

There are five sections, printed as one table each:
hits      the Mooncake chat trace at its block size of 512: share of the prompt tokens read from the prefix cache, for
          several cache sizes, compared with an LRU cache of the same size that serves one request after the other, and
          with an unbounded cache
agent     tau-bench conversations in the embedded model's tokens, a request for each of the agent's turns: the same
waste     share of the used KV memory without a token in it, for the lengths of the Azure conversation trace
tenants   the cost of sharing the engine: the Azure requests as those of one tenant and of several equal tenants, with
          sufficient and with scarce memory; uncached parts of a preempted request's prompt are computed again
overhead  microseconds of the engine's Python code per sequence of a step, and per step, by batch size

Counts of tokens, blocks and preemptions depend only on the code. Microseconds depend on the machine: compare them
within one run only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.options import parse
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.replay import (
    MOONCAKE_BLOCK,
    Conversation,
    Lengths,
    Replay,
    Replayer,
    azure,
    mooncake,
    simulate,
    taubench,
    unrelated,
)

AMPLE = 120_000  # blocks of 512, more than the whole trace needs
Row = tuple[str, ...]


def main() -> None:
    options = parse_arguments()
    for name in options.sections:
        header, rows = SECTIONS[name](options)
        print(f"\n{name}\n{table(header, rows)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=names, default=[*SECTIONS], help=f"{','.join(SECTIONS)} (default all)")
    parser.add_argument("--requests", type=int, help="of the Mooncake trace (default all 5,606)")
    parser.add_argument("--pools", type=numbers, default=[1_000, 3_000, 10_000, 30_000, AMPLE], help="KV blocks of 512")
    parser.add_argument("--window", type=int, default=4, help="concurrent Mooncake requests (default 4)")
    parser.add_argument(
        "--answers", type=int, default=4, help="maximum tokens of a Mooncake output; 0: no limit (default 4)"
    )
    parser.add_argument("--conversations", type=int, help="of tau-bench (default all 96)")
    parser.add_argument("--every", type=int, default=10, help="uses every N-th Azure request (default 10)")
    parser.add_argument("--block-sizes", type=numbers, default=[8, 16, 32, 64, 128, 256], help="for the waste")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 256], help="for the overhead")
    pools = {"pools": [1_000], "block_sizes": [32], "batches": [1, 8]}
    return parse(parser, {"requests": 100, "conversations": 1, "every": 400, **pools})


def hits(options: argparse.Namespace) -> tuple[Row, Iterable[Row]]:
    most = options.answers or None
    note("simulating LRU caches")
    caches = simulate(mooncake(options.requests, most), MOONCAKE_BLOCK, *options.pools, None)
    ideal = caches.pop()

    def rows() -> Iterator[Row]:
        for num_blocks, lru in zip(options.pools, caches, strict=True):
            replayer = Replayer(num_blocks, MOONCAKE_BLOCK, max_num_seqs=options.window, max_num_batched_tokens=8192)
            result = play(replayer, mooncake(options.requests, most), options.window, f"{num_blocks} blocks")
            yield (
                f"{num_blocks:,}", f"{result.requests:,}", f"{ideal.hit_rate:.2%}", f"{lru.hit_rate:.2%}",
                f"{result.hit_rate:.2%}", f"{result.computed_tokens / lru.computed_tokens:.4f}",
                str(result.preemptions),
            )  # fmt: skip

    header = ("blocks of 512", "requests", "without bounds", "LRU", "engine", "computed/LRU's", "preemptions")
    return header, rows()


def agent(options: argparse.Namespace) -> tuple[Row, Iterable[Row]]:
    note("tokenizing the conversations")
    with tempfile.TemporaryDirectory() as state:
        tokenizer = Tokenizer.from_dir(ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(state)))
    conversations = taubench(tokenizer, options.conversations)

    def rows() -> Iterator[Row]:
        for block_size in (16, 32, 64):
            [ideal] = simulate(conversations, block_size, None)
            replayer = Replayer(400_000 // block_size, block_size, max_num_seqs=32, max_num_batched_tokens=2048)
            result = play(replayer, conversations, 32, f"blocks of {block_size}")
            yield (
                str(block_size), f"{result.requests:,}", f"{result.prompt_tokens:,}", f"{ideal.hit_rate:.2%}",
                f"{result.hit_rate:.2%}", f"{result.computed_tokens / ideal.computed_tokens:.4f}",
            )  # fmt: skip

    return ("block size", "requests", "prompt tokens", "without bounds", "engine", "computed/ideal's"), rows()


def waste(options: argparse.Namespace) -> tuple[Row, Iterable[Row]]:
    lengths = azure()[:: options.every]

    def rows() -> Iterator[Row]:
        for block_size in options.block_sizes:
            replayer = Replayer(1_000_000 // block_size, block_size, max_num_seqs=64, max_num_batched_tokens=2048)
            result = play(replayer, unrelated(lengths), 96, f"blocks of {block_size}")
            batch = result.sequences / result.steps
            yield str(block_size), f"{result.requests:,}", f"{batch:.1f}", f"{result.waste(block_size):.2%}"

    return ("block size", "requests", "mean batch", "waste"), rows()


def tenants(options: argparse.Namespace) -> tuple[Row, Iterable[Row]]:
    lengths = azure()[:: options.every]

    def rows() -> Iterator[Row]:
        for num_blocks in (30_000, 2_000):
            for count, window in ((1, 96), (10, 96), (100, 300)):
                replayer = Replayer(num_blocks, 32, max_num_seqs=64, max_num_batched_tokens=2048)
                result = play(replayer, unrelated(lengths, count), window, f"{count} tenants")
                yield (
                    f"{num_blocks:,}", str(count), str(window), f"{result.sequences / result.steps:.1f}",
                    f"{result.preemptions:,}", f"{result.computed_tokens / result.prompt_tokens:.3f}",
                    f"{result.schedule_seconds / result.steps * 1e6:,.0f}",
                )  # fmt: skip

    header = (
        "blocks of 32", "tenants", "under way", "mean batch", "preemptions", "computed/prompt tokens",
        "scheduling, µs/step",
    )  # fmt: skip
    return header, rows()


def overhead(options: argparse.Namespace) -> tuple[Row, Iterable[Row]]:
    def rows() -> Iterator[Row]:
        for batch in options.batches:
            lengths = [Lengths(n.prompt, min(n.output, 200)) for n in azure()[: max(20, 3 * batch)]]
            replayer = Replayer(batch * 500, 32, max_num_seqs=batch, max_num_batched_tokens=2048)
            result = play(replayer, unrelated(lengths), batch + batch // 2, f"batch of {batch}")
            parts = (result.step_seconds, result.schedule_seconds, result.output_seconds)
            per_step = result.step_seconds / result.steps
            yield (
                str(batch), f"{result.sequences / result.steps:.1f}", f"{per_step * 1e6:,.0f}",
                *(f"{seconds / result.sequences * 1e6:.1f}" for seconds in parts),
                f"{result.submit_seconds / result.prompt_tokens * 1e9:.0f}",
            )  # fmt: skip

    header = ("batch", "mean", "µs/step", "µs/sequence", "scheduling", "output", "submitting, ns/prompt token")
    return header, rows()


SECTIONS: dict[str, Callable[[argparse.Namespace], tuple[Row, Iterable[Row]]]] = {
    "hits": hits,
    "agent": agent,
    "waste": waste,
    "tenants": tenants,
    "overhead": overhead,
}


def play(replayer: Replayer, trace: Iterable[Conversation], window: int, label: str) -> Replay:
    """Replay `trace`, and print the progress to standard error every two seconds."""
    last = time.monotonic()

    def on_step(_: LLMEngine) -> None:
        nonlocal last
        if time.monotonic() - last > 2:
            last = time.monotonic()
            note(f"{label}: {replayer.replay.requests:,} requests")

    result = replayer.play(trace, window, on_step)
    if result.errors:
        raise SystemExit(f"{label}: {len(result.errors)} requests failed; the first: {result.errors[0]}")
    return result


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(header: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table, aligned for a terminal as well."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = ["| " + " | ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    texts.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(texts)


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return chosen


def numbers(text: str) -> list[int]:
    values = [int(value) for value in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("want numbers of at least 1")
    return values


if __name__ == "__main__":
    main()
