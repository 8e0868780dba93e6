"""Replays of real traces: the scheduler and the KV cache reuse all that is possible and waste little memory.

Only the model is fake. The possible hit rates come from a simulation that shares no code with the engine.
"""

from __future__ import annotations

import pytest

from inference_worker.checkpoints.tokenizer import Tokenizer
from tests.support.engine.replay import (
    MOONCAKE_BLOCK,
    Lengths,
    PrefixCache,
    Replay,
    Replayer,
    Turn,
    azure,
    mooncake,
    simulate,
    taubench,
    unrelated,
)

pytestmark = pytest.mark.timeout(300)  # takes seconds on an idle machine; this limit is for shared cores

AMPLE = 100_000  # blocks; the trace has 95,189 different ones, so none is evicted
SCARCE = (1_000, 10_000, 30_000)
# Outputs are shortened to save time. No prompt of the trace continues a block that an output ended, so outputs are
# never reused; whole ones would fill 4% of the blocks. `python -m benchmarks.replay --answers 0` keeps them whole.
MOST_OUTPUT = 4


def play_mooncake(num_blocks: int, window: int) -> Replay:
    replayer = Replayer(num_blocks, MOONCAKE_BLOCK, max_num_seqs=window, max_num_batched_tokens=8192)
    result = replayer.play(mooncake(most_output=MOST_OUTPUT), window)
    replayer.engine.check_integrity()
    assert result.requests == 5606
    assert not result.errors
    assert not replayer.engine.stats().kv_blocks_used
    return result


@pytest.fixture(scope="module")
def lru() -> dict[int, PrefixCache]:
    pools = [*SCARCE, AMPLE]
    return dict(zip(pools, simulate(mooncake(most_output=MOST_OUTPUT), MOONCAKE_BLOCK, *pools), strict=True))


def test_the_simulated_rates_equal_those_published_for_the_trace(lru: dict[int, PrefixCache]) -> None:
    assert lru[AMPLE].hit_rate == pytest.approx(0.347, abs=0.001)
    # 4.5, 21.5 and 33.2% of the whole trace; this is its first half, from a cold start.
    assert [lru[pool].hit_rate for pool in SCARCE] == pytest.approx([0.045, 0.214, 0.321], abs=0.001)


def test_with_ample_memory_all_possible_blocks_are_reused(lru: dict[int, PrefixCache]) -> None:
    result = play_mooncake(AMPLE, window=32)
    assert result.hit_rate == pytest.approx(0.347, abs=0.005)
    assert result.preemptions == 0
    # To the token: concurrent requests wait for each other's blocks instead of computing them twice, and only
    # the last block of a fully cached prompt is computed again.
    assert result.cached_tokens == lru[AMPLE].hit_tokens
    assert result.computed_tokens == lru[AMPLE].computed_tokens


@pytest.mark.parametrize(
    "num_blocks", [1_000, *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in (10_000, 30_000))]
)
def test_with_scarce_memory_the_most_recently_used_blocks_are_kept(
    lru: dict[int, PrefixCache], num_blocks: int
) -> None:
    result = play_mooncake(num_blocks, window=4)
    # Four concurrent requests use up to some hundred blocks, and end in another order than they started.
    assert result.hit_rate == pytest.approx(lru[num_blocks].hit_rate, abs=0.001)


def test_less_than_4_percent_of_allocated_memory_is_wasted() -> None:
    block_size, lengths = 32, azure()[::10]
    replayer = Replayer(30_000, block_size, max_num_seqs=64, max_num_batched_tokens=2048)
    result = replayer.play(unrelated(lengths), window=96)
    assert not result.errors
    assert result.requests == len(lengths) == 974
    assert result.output_tokens == sum(length.output for length in lengths)
    assert result.cached_tokens == 0  # no block is shared, so no token counts twice
    assert result.sequences > 55 * result.steps  # the load is continuous
    assert 0 < result.waste(block_size) < 0.04


def test_waste_is_the_empty_part_of_last_blocks() -> None:
    replayer = Replayer(100, 16)
    result = replayer.play(unrelated([Lengths(24, 1)]), window=1)
    assert (result.held_blocks, result.held_tokens) == (2, 24)
    assert result.waste(16) == 0.25


def test_an_agents_turns_reuse_shared_prompts_and_earlier_turns(tokenizer: Tokenizer) -> None:
    block_size = 16
    conversations = taubench(tokenizer, limit=32)
    [ideal] = simulate(conversations, block_size, None)
    assert ideal.hit_rate > 0.95  # the published share is 96 %
    replayer = Replayer(20_000, block_size, max_num_seqs=8, max_num_batched_tokens=2048)
    result = replayer.play(conversations, window=8)
    replayer.engine.check_integrity()
    assert not result.errors
    assert result.requests == sum(len(turns) for turns in conversations) > 300
    assert result.hit_rate == pytest.approx(ideal.hit_rate, abs=0.01)
    assert result.computed_tokens == pytest.approx(ideal.computed_tokens, rel=0.01)


def test_an_output_is_reused_by_the_next_turn() -> None:
    first = Turn(list(range(8)), list(range(8, 24)))
    second = Turn([*first.prompt, *first.answer, 99], [1])
    replayer = Replayer(10, 4)
    result = replayer.play([[first, second]], window=1)
    # 23 of the first turn's 24 tokens were computed, which are 5 full blocks.
    assert result.cached_tokens == 20
    [ideal] = simulate([[first, second]], 4, None)
    assert (ideal.hit_tokens, ideal.computed_tokens) == (20, result.computed_tokens)


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    turn = Turn(list(range(8)), [1])
    result = Replayer(10, 4).play([[turn], [turn]], window=1)
    assert result.cached_tokens == 8
    assert result.computed_tokens == 8 + 4
    [ideal] = simulate([[turn], [turn]], 4, None)
    assert (ideal.hit_tokens, ideal.computed_tokens) == (8, 12)
