"""Locality in the engine's fair queue: throughput and fairness beside today's order.

    python -m benchmarks.locality --json figures.json

No model runs: the scheduler and the KV cache are real, and a step takes a fixed time and a time per computed token.
`--tokens` lists the values of EngineConfig.locality_tokens; 0 is the order by the tenants' counters only.

- `tau-bench`: the conversations of the tau-bench trace, in turn those of several tenants. Nothing is shared between
  tenants, so each has its own copy of the long system prompt, and the cache cannot hold all copies.
- `adversarial`: one tenant always has requests with the same long prefix waiting, another one unrelated prompts. An
  order by cached tokens only would never serve the second tenant.

`computed` is the number of computed prompt tokens divided by all prompt tokens. `throughput` is in tokens of prompts
and outputs per second of simulated time. `violation` is the largest growth of the difference between the services of
two tenants while both have waiting requests, in weighted tokens (an output token counts twice).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.models import bundled_model
from benchmarks.options import parse, write_figures
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.replay import ANSWER, Conversation, Replayer, Turn, taubench

BLOCK = 32
QUICK = {"tokens": [0, 2048], "conversations": 2, "requests": 10}
STEP_SECONDS, TOKEN_SECONDS = 0.005, 0.0001
PREFIX, OWN, OUTPUT = 2000, 64, 32  # tokens of a request of the adversarial trace


class Violations:
    """The largest growth of the difference of service while both of two tenants wait."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._ranges: dict[tuple[Any, Any], tuple[float, float]] = {}

    def note(self, served: Mapping[Any, float]) -> None:
        """Note the services of the tenants that wait now."""
        ranges = {}
        for pair in combinations(sorted(served), 2):
            difference = served[pair[0]] - served[pair[1]]
            low, high = self._ranges.get(pair, (difference, difference))
            ranges[pair] = min(low, difference), max(high, difference)
            self.largest = max(self.largest, ranges[pair][1] - ranges[pair][0])
        self._ranges = ranges


def main() -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, conversations=48, blocks=1200)
    return compare(parse(parser, QUICK), ("violation",), measure)


def add_arguments(parser: argparse.ArgumentParser, conversations: int, blocks: int) -> None:
    """Add the arguments of a comparison, with these defaults."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 2048, 8192, 32768], help="values to compare")
    parser.add_argument("--conversations", type=int, default=conversations, help="of tau-bench (default %(default)s)")
    parser.add_argument("--tenants", type=int, default=8, help="of tau-bench (default %(default)s)")
    parser.add_argument("--requests", type=int, default=400, help="of each adversarial tenant (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=blocks, help="of 32 tokens, in each cache (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")


def compare(
    options: argparse.Namespace,
    columns: Sequence[str],
    replay: Callable[[list[Conversation], int, int, int], dict[str, Any]],
) -> int:
    """Replay each trace with each value of `--tokens`, and print a table with the additional `columns`.

    Args:
        replay: returns the figures for the conversations, blocks of a cache, concurrent conversations and value.
    """
    rows = []
    for trace, conversations, blocks, window in traces(options):
        print(f"\n{trace}, caches of {blocks * BLOCK:,} tokens")
        print(
            f"{'locality':>9} {'requests':>9} {'computed':>9} {'throughput':>11}", *(f"{name:>10}" for name in columns)
        )
        for tokens in options.tokens:
            row = {"trace": trace, "locality_tokens": tokens, **replay(conversations, blocks, window, tokens)}
            rows.append(row)
            figures = f"{tokens:>9,} {row['requests']:>9,} {row['computed']:>9.1%} {row['throughput']:>7,.0f} t/s"
            print(figures, *(f"{row[name]:>10,.0f}" for name in columns), flush=True)
    write_figures(options, rows)
    return 0


def traces(options: argparse.Namespace) -> Iterator[tuple[str, list[Conversation], int, int]]:
    """Return each trace with its cache size and its number of concurrent conversations."""
    tokenizer = Tokenizer.from_dir(bundled_model())
    agents = taubench(tokenizer, options.conversations)
    yield "tau-bench", [_of(number % options.tenants, turns) for number, turns in enumerate(agents)], options.blocks, 32
    yield "adversarial", list(_adversarial(options.requests)), 400, 48


def _of(tenant: int, turns: list[Turn]) -> list[Turn]:
    """Return the turns as those of a tenant, which shares no blocks with others."""
    return [replace(turn, prompt=[tenant + 1, *turn.prompt], tenant=f"t{tenant}") for turn in turns]


def _adversarial(count: int) -> Iterator[list[Turn]]:
    for number in range(count):
        own = [1000 + number] * OWN
        yield [Turn([1] * PREFIX + own, [ANSWER] * OUTPUT, tenant="cached")]
        yield [Turn([2000 + number] * (PREFIX // 4) + own, [ANSWER] * OUTPUT, tenant="unrelated")]


def measure(conversations: list[Conversation], blocks: int, window: int, locality_tokens: int) -> dict[str, Any]:
    """Return the figures of a replay."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "locality_tokens": locality_tokens}
    replayer, violations = Replayer(blocks, BLOCK, **settings), Violations()

    def note(engine: LLMEngine) -> None:
        waiting = [tenant for tenant in engine.scheduler.tenants.active() if tenant.num_waiting]
        violations.note({tenant.name: tenant.served for tenant in waiting})

    result = replayer.play(conversations, window, note)
    if result.errors:
        raise RuntimeError(result.errors[0])
    computed = result.computed_tokens + result.output_tokens
    seconds = result.steps * STEP_SECONDS + computed * TOKEN_SECONDS
    return {
        "requests": result.requests,
        "computed": result.computed_tokens / result.prompt_tokens,
        "throughput": (result.prompt_tokens + result.output_tokens) / seconds,
        "violation": violations.largest,
    }


if __name__ == "__main__":
    sys.exit(main())
