"""A simple reference of sampling, one row and one token at a time, to compare with the engine's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.sampling.sampler import uniform

CLOSE = 1e-5  # relative difference between float32 and float64


def edited(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], eos: Collection[int]
) -> list[float]:
    """Return the logits after bias, min_tokens and penalties."""
    scores = list(logits)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(answer) < params.min_tokens:
        for token in [*params.stop_token_ids, *(() if params.ignore_eos else eos)]:
            scores[token] = -1e30  # tokens that a grammar forbids are even lower
    for token in range(len(scores)):
        if token in prompt or token in answer:
            penalty = params.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= params.frequency_penalty * list(answer).count(token)
        scores[token] -= params.presence_penalty * (token in answer)
    return scores


def _cut(weights: list[float], least: float, doubtful: list[bool]) -> list[float]:
    doubtful.append(any(0 < abs(w - least) <= CLOSE * least for w in weights))
    return [w if w >= least else 0.0 for w in weights]


def acceptable(scores: Sequence[float], params: SamplingParams, seed: int, position: int) -> set[int]:
    """Return the correct tokens for these edited logits; several if the result depends on the last digits."""
    best = max(scores)
    anything = set(range(len(scores)))
    if best == -math.inf:
        return anything  # no token is allowed
    if params.temperature == 0 or params.top_k == 1:
        near = {i for i, s in enumerate(scores) if best - CLOSE * max(1, abs(best)) <= s < best}
        return near | {list(scores).index(best)}
    weights = [math.exp((s - best) / params.temperature) for s in scores]
    doubtful: list[bool] = []
    weights = _cut(weights, params.min_p, doubtful)
    ranked = sorted(weights, reverse=True)
    if 0 < params.top_k < len(ranked):
        weights = _cut(weights, ranked[params.top_k - 1], doubtful)
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        wanted = params.top_p * sum(ranked)
        for i, weight in enumerate(ranked):
            so_far = sum(ranked[: i + 1])
            doubtful.append(abs(so_far - wanted) <= CLOSE * wanted)
            if so_far >= wanted:
                weights = _cut(weights, weight, doubtful)
                break
    if any(doubtful):
        return anything
    target, so_far, found = uniform(seed, position) * sum(weights), 0.0, set()
    for token, weight in enumerate(weights):
        if weight and so_far - CLOSE * sum(weights) <= target <= so_far + weight + CLOSE * sum(weights):
            found.add(token)
        so_far += weight
    return found
