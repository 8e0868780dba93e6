"""From logits to the next tokens, for a whole batch at once."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_worker.engine.request import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature below this is 0
_TOP_CANDIDATES = 512  # tokens looked at for top-p before the whole vocabulary is sorted


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to choose the token of one row: `seed` and the token's `position` fix its random number."""

    params: SamplingParams
    seed: int
    position: int

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed and a position: the same wherever and beside whomever it is drawn."""
    raw = hashlib.blake2b(struct.pack("<Qq", seed & (2**64 - 1), position), digest_size=8, person=b"sample").digest()
    return float(int.from_bytes(raw, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token for each row.

    Args:
        logits: [len(rows), vocab].
    """
    chosen: list[int] = logits.max(-1).indices.tolist()  # four times as fast as argmax on the CPU
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        scores = logits[torch.tensor(drawn, device=logits.device)] if len(drawn) < len(rows) else logits
        tokens = _draw(scores.float(), [rows[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            chosen[i] = token
    return chosen


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    device = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], device=device)
    scores = logits / temperature[:, None]
    numbers = torch.tensor([uniform(r.seed, r.position) for r in rows], dtype=torch.float64, device=device)
    tokens = [0] * len(rows)
    limited = [r.params.top_k > 0 or r.params.top_p < 1.0 for r in rows]
    for mask, draw in ((False, _draw_all), (True, _draw_limited)):
        which = [i for i, is_limited in enumerate(limited) if is_limited is mask]
        if which:
            index = torch.tensor(which, device=device)
            found = draw(scores[index], numbers[index], [rows[i].params for i in which])
            for i, token in zip(which, found, strict=True):
                tokens[i] = token
    return tokens


def _draw_all(scores: torch.Tensor, numbers: torch.Tensor, _: Sequence[SamplingParams]) -> list[int]:
    """Draw from the whole vocabulary, in its own order: no sorting."""
    return _invert(scores.softmax(-1, dtype=torch.float64), numbers).tolist()


def _draw_limited(scores: torch.Tensor, numbers: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """Draw from the top_k likeliest tokens, of these from the fewest whose share is at least top_p."""
    vocab = scores.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    count = min(vocab, max([_TOP_CANDIDATES, *(k for k in top_k if k < vocab)]))
    device = scores.device
    ks, ps = torch.tensor(top_k, device=device), torch.tensor([p.top_p for p in params], device=device)
    values, tokens = scores.topk(count, dim=-1)
    # Shares are of the top_k tokens, which may be more than the candidates.
    whole = torch.where(ks >= vocab, scores.logsumexp(-1), _log_sum_of_top(values, ks))
    shares = (values - whole[:, None]).exp()
    short = (ks > count) & (shares.sum(-1) < ps)
    if bool(short.any()) and count < vocab:
        values, tokens = scores.sort(dim=-1, descending=True)
        shares = (values - whole[:, None]).exp()
    before = shares.cumsum(-1) - shares
    ranks = torch.arange(shares.shape[-1], device=device)
    kept = (ranks < ks[:, None]) & ((before < ps[:, None]) | (ranks == 0))
    picked = _invert(shares.double().masked_fill(~kept, 0.0), numbers)
    return tokens.gather(-1, picked[:, None])[:, 0].tolist()


def _log_sum_of_top(values: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    ranks = torch.arange(values.shape[-1], device=values.device)
    return values.masked_fill(ranks >= ks[:, None], float("-inf")).logsumexp(-1)


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index [rows] at which the running sum of `weights` [rows, n] first exceeds the number's share of the whole."""
    sums = weights.cumsum(-1)
    target = (numbers * sums[:, -1])[:, None]
    picked = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding may put the target at the whole: then it is the last token that has any weight.
    last = (weights > 0).to(torch.int64).cumsum(-1).argmax(-1)
    return torch.minimum(picked, last)
