"""The sampler: correct distributions that depend only on the row's logits, seed and position."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.sampling.sampler import (
    SampleRow,
    _min_weight_top_k,
    _min_weight_top_p,
    _sample_index,
    _top_p_threshold,
    sample,
    uniform,
)

DRAWS = 20_000
PROBABILITIES = torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1])


def choose(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    tokens: list[int] = sample(logits, rows).tolist()
    return tokens


def draws(logits: torch.Tensor, **params: float) -> Counter[int]:
    rows = [SampleRow(SamplingParams(**params), 7, position) for position in range(DRAWS)]  # type: ignore[arg-type]
    return Counter(choose(logits.expand(DRAWS, -1), rows))


def assert_follows(counts: Counter[int], expected: torch.Tensor) -> None:
    assert set(counts) <= set(expected.nonzero()[:, 0].tolist())
    for token, share in enumerate(expected.tolist()):
        error = abs(counts[token] / DRAWS - share)
        assert error <= 4 * (share * (1 - share) / DRAWS) ** 0.5, (token, share, counts[token] / DRAWS)


def test_plain_samples_follow_the_softmax() -> None:
    assert_follows(draws(PROBABILITIES.log()), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(-1)
    assert_follows(draws(PROBABILITIES.log(), temperature=temperature), expected)


def test_top_k_keeps_the_k_most_likely_tokens() -> None:
    assert_follows(draws(PROBABILITIES.log(), top_k=2), torch.tensor([4, 0, 3, 0, 0]) / 7)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0, [4, 0, 0, 0, 0]),
        (1e-9, [4, 0, 0, 0, 0]),
        (0.39, [4, 0, 0, 0, 0]),
        (0.41, [4, 0, 3, 0, 0]),
        (0.8, [4, 0, 3, 1.5, 0]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: list[float]) -> None:
    expected = torch.tensor(kept)
    assert_follows(draws(PROBABILITIES.log(), top_p=top_p), expected / expected.sum())


def test_top_p_is_relative_to_the_top_k() -> None:
    # Of the three most likely, 0.4 and 0.3 of 0.85 reach 0.8; of all five they would not.
    assert_follows(draws(PROBABILITIES.log(), top_k=3, top_p=0.8), torch.tensor([4, 0, 3, 0, 0]) / 7)


def test_top_p_is_relative_to_the_top_k_beside_a_larger_top_k() -> None:
    logits = PROBABILITIES.log().expand(2, -1)
    params = SamplingParams(top_k=3, top_p=0.8), SamplingParams(top_k=4)
    found = [choose(logits, [SampleRow(p, 7, position) for p in params]) for position in range(300)]
    assert {tokens[0] for tokens in found} == {0, 2}
    assert {tokens[1] for tokens in found} == {0, 2, 3, 4}


def test_an_exactly_reached_share_counts_as_reached() -> None:
    weights = torch.tensor([[0.25, 0.5, 0.125, 0.125]])
    for share, least in ((0.5, 0.5), (0.75, 0.25)):
        top_p = torch.tensor([share], dtype=torch.float64)
        assert _min_weight_top_k(weights, torch.tensor([4]), top_p, 4).tolist() == [least]
        assert _min_weight_top_p(weights, top_p).tolist() == [least]


def test_a_large_top_k() -> None:
    logits = torch.arange(2000) * 1e-3
    rows = [SampleRow(SamplingParams(top_k=600), 7, position) for position in range(8000)]
    tokens = set(choose(logits.expand(8000, -1), rows))
    assert min(tokens) == 1400
    assert len(tokens) > 590


def test_a_random_number_at_the_edge_selects_a_token_with_weight() -> None:
    weights = torch.zeros(2, 700)
    weights[:, [300, 310]] = 0.5
    assert _sample_index(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [300, 310]


def test_top_p_looks_beyond_its_first_candidates() -> None:
    logits = torch.zeros(2000)  # so flat that 0.9 of it takes 1,800 tokens
    rows = [SampleRow(SamplingParams(top_p=0.9), 7, position) for position in range(2000)]
    tokens = set(choose(logits.expand(2000, -1), rows))
    assert len(tokens) > 1000
    assert draws(torch.tensor([5.0] + [0.0] * 1999), top_p=0.2).keys() != {0}


def test_min_p_keeps_tokens_relative_to_the_best() -> None:
    assert_follows(draws(PROBABILITIES.log(), min_p=0.3), torch.tensor([4, 0, 3, 1.5, 0]) / 8.5)


def test_top_p_is_relative_to_the_tokens_kept_by_min_p() -> None:
    # Of 0.4, 0.3 and 0.15, the first two are 0.82; of all five, they are 0.7.
    assert_follows(draws(PROBABILITIES.log(), min_p=0.3, top_p=0.8), torch.tensor([4, 0, 3, 0, 0]) / 7)


def test_ties_with_the_last_kept_token_are_kept() -> None:
    assert_follows(draws(torch.tensor([1.0, 0.0, 0.0, 0.0]), top_k=2), torch.tensor([1.0, 0, 0, 0]).softmax(-1))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.02}])
def test_frequencies_pass_a_chi_square_test(params: dict[str, float]) -> None:
    logits = torch.randn(700, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = (logits / params.get("temperature", 1.0)).softmax(-1).double()
    ranked = expected.sort(descending=True).values
    least = {
        "top_k": ranked[99],
        "top_p": ranked[int((ranked.cumsum(-1) < 0.9).sum())],
        "min_p": 0.02 * ranked[0],
    }.get(next(iter(params), ""), 0.0)
    expected[expected < least] = 0
    expected *= DRAWS / expected.sum()
    counts = draws(logits, **params)
    observed = torch.tensor([counts[token] for token in range(700)]).double()
    assert not observed[expected == 0].any()
    often = expected >= 5
    pairs = zip(observed[often].tolist(), expected[often].tolist(), strict=True)
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = int(often.sum()) - 1
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_the_least_weight_of_a_nucleus_is_found_to_the_last_bit(spread: float) -> None:
    weights = (torch.randn(50, 3000) * spread).softmax(-1)
    wanted = torch.linspace(0.001, 0.999, 50, dtype=torch.float64) * weights.sum(-1)
    ranked = weights.sort(-1, descending=True).values
    sums = ranked.double().cumsum(-1)
    found = _top_p_threshold(weights, wanted)
    for row in range(50):
        last = int((sums[row] < wanted[row]).sum())
        if abs(sums[row, last] - wanted[row]) > 1e-6 and abs(sums[row, last - 1] - wanted[row]) > 1e-6:
            assert found[row] == ranked[row, last]


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    logits = torch.randn(4, 50)
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert choose(logits, [SampleRow(params, 1, p) for p in range(4)]) == logits.argmax(-1).tolist()


def test_greedy_selects_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, 500)
    logits[0, [7, 300]] = 1
    assert choose(logits, [SampleRow(SamplingParams(temperature=0), 1, 0)] * 2) == [7, 0]


def test_a_seed_is_independent_of_other_rows() -> None:
    # In half precision and coarse, so that there are many ties.
    logits = (torch.randn(10, 800) * 3).round().bfloat16()
    kinds = [
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=700),
        SamplingParams(top_p=0.99, temperature=1.8),
        SamplingParams(top_p=0.1),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.7, temperature=1.3),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(temperature=0.6),
    ]
    rows = [SampleRow(params, 5, 17) for params in kinds]
    alone = [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert choose(logits, rows) == alone
    order = [3, 0, 9, 5, 1, 8, 4, 2, 7, 6]
    assert choose(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_seeds_and_positions_give_other_numbers() -> None:
    numbers = {uniform(seed, position) for seed in (-1, 0, 1, 2**63) for position in range(100)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 400 - 0.5) < 0.06


def test_half_precision_logits() -> None:
    logits = PROBABILITIES.log().bfloat16()
    assert_follows(draws(logits), logits.float().softmax(-1))
