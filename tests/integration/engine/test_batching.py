"""Continuous batching compared with static batching by a cost model, independent of the machine's speed.

A step takes the time of reading the model's weights once or of computing its tokens, whichever is longer.
`python -m benchmarks.batching` does the same with a real model and a real clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.batching import BatchingResult, CostModel, Job, collect, continuous, draw, make_factory, static
from tests.support.engine.replay import Lengths

BATCH = 32
CPU = CostModel(weights_seconds=20e-3, token_seconds=0.8e-3)  # a 135M model on two cores: limited by arithmetic
GPU = CostModel(weights_seconds=3.5e-3, token_seconds=21e-6)  # an 8B model on an H200: limited by reading weights
TIMEOUT = 1.0


@pytest.mark.parametrize(
    ("cost", "scale", "max_lengths", "max_num_batched_tokens"),
    [(CPU, 0.25, Lengths(1536, 512), 512), (GPU, 1.0, Lengths(16_384, 1024), 2048)],
    ids=["cpu", "gpu"],
)
def test_continuous_batching_has_2_5_times_the_throughput_of_static(
    cost: CostModel, scale: float, max_lengths: Lengths, max_num_batched_tokens: int
) -> None:
    # 320 requests, so that the last few, which cannot fill a batch, have little weight.
    jobs = draw(320, scale, max_lengths=max_lengths)
    make = make_factory(cost)
    ours = continuous(make, jobs, BATCH, max_num_batched_tokens)
    padded = static(make, jobs, BATCH, TIMEOUT, drop=False)
    dropping = static(make, jobs, BATCH, TIMEOUT, drop=True)
    assert ours.useful_tokens == padded.useful_tokens == sum(job.output for job in jobs)
    assert ours.rate >= 2.5 * padded.rate
    assert ours.rate >= 2.5 * dropping.rate


def test_static_batching_waits_for_the_longest_request() -> None:
    jobs = [Job(0, prompt=10, output=3), Job(1, prompt=4, output=7), Job(2, prompt=6, output=2)]
    make = make_factory(CostModel(1.0, 0.25))
    # Batches of two: (10 + 7, 10 + 7), then only (6 + 2). The last token of an output is not computed.
    padded = static(make, jobs, 2, 0.0, drop=False)
    assert padded == BatchingResult(seconds=5 + 6 + 1.5 + 1, useful_tokens=12, steps=7 + 2, computed_tokens=2 * 16 + 7)
    dropping = static(make, jobs, 2, 0.0, drop=True)
    assert dropping == BatchingResult(
        seconds=5 + 6 + 1.5 + 1, useful_tokens=12, steps=7 + 2, computed_tokens=12 + 16 + 7
    )


def test_continuous_batching_starts_the_next_request_immediately() -> None:
    jobs = [Job(0, prompt=1, output=4), Job(1, prompt=1, output=2), Job(2, prompt=1, output=2, arrival=1.0)]
    outcome = continuous(make_factory(CostModel(1.0, 0.0)), jobs, 2, 16)
    assert outcome == BatchingResult(seconds=4, useful_tokens=8, steps=4, computed_tokens=8)


def test_time_passes_without_waiting_requests() -> None:
    jobs = [Job(0, prompt=1, output=1), Job(1, prompt=1, output=1, arrival=10.0)]
    make = make_factory(CostModel(1.0, 0.0))
    assert continuous(make, jobs, 2, 16).seconds == 11
    assert static(make, jobs, 2, 0.5, drop=False).seconds == 11.5


@pytest.mark.parametrize(
    ("arrivals", "now", "expected"),
    [
        ([0, 0, 0], 0.0, (2, 0.0)),  # full
        ([0, 3, 9], 0.0, (2, 3.0)),  # full when the second has arrived
        ([0, 7], 0.0, (1, 5.0)),  # the first waits only five seconds
        ([0], 0.0, (1, 5.0)),
        ([0, 7], 8.0, (2, 8.0)),  # both arrived while the machine was busy
        ([0], 8.0, (1, 8.0)),
    ],
)
def test_a_static_batch_is_collected_by_size_or_timeout(
    arrivals: Sequence[float], now: float, expected: tuple[int, float]
) -> None:
    waiting = [Job(number, 1, 1, arrival) for number, arrival in enumerate(arrivals)]
    rows, begin = collect(waiting, now, size=2, timeout=5.0)
    assert (len(rows), begin) == expected


def test_generated_requests_are_deterministic() -> None:
    jobs = draw(100, 0.25, rate=2.0)
    assert jobs == draw(100, 0.25, rate=2.0)
    assert jobs != draw(100, 0.25, rate=2.0, seed=2)
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    assert 25 < jobs[-1].arrival < 100
    assert all(job.prompt <= 1536 and 1 <= job.output <= 512 for job in jobs)
