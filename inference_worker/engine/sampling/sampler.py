"""From logits to the next tokens, for a whole batch at once.

Order: logit_bias, min_tokens, penalties (`logit_edits`), grammar, temperature, min_p, top_k, top_p, the draw. Nothing
is sorted but a few candidates, and a row's token depends on that row alone: its logits, its seed, its position.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn import functional

from inference_worker.contract.request import SamplingParams, TokenLogprobs
from inference_worker.engine.sampling.logits_processors import LogitsProcessors, apply_edits, apply_masks, edits_logits
from inference_worker.engine.sampling.logprobs import RankedTokens, rank_tokens
from inference_worker.engine.scheduling.sequence import Sequence as EngineSequence
from inference_worker.engine.structured_output.grammars import Masks, fill_masks
from inference_worker.engine.tensors import rows_at_once, upload

GREEDY_BELOW = 1e-5  # a temperature below this is 0
_CANDIDATES = 64  # likeliest tokens looked at for top_p, before the whole vocabulary is
_NARROW = 512  # a top_k beyond this is looked for apart from the others, so that they do not pay for it
_BITS_OF_1 = 0x3F800000  # of the float32 1.0: no weight is larger
_BLOCK = 256  # tokens of the vocabulary summed, or compared, as one before one of them is looked for


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to choose the token of one row: `seed` and the token's `position` fix its random number."""

    params: SamplingParams
    seed: int
    position: int
    edits: LogitsProcessors | None = None  # None: the logits stay as they are
    allowed: Masks | None = None  # bits, as of `fill_masks`; None: every token is

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen, still on its device: reading it waits for the device, making it does not."""

    tokens: torch.Tensor  # int64 [rows]
    ranked: RankedTokens | None = None  # of the places that asked for log-probabilities
    places: Sequence[int] = ()

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the tokens, and by place the log-probabilities of those that asked."""
        logprobs = dict(zip(self.places, self.ranked.read(), strict=True)) if self.ranked else {}
        return self.tokens.tolist(), logprobs


class Sampler:
    """Chooses the next tokens of sequences, and keeps what it must remember of each, for as long as it lives.

    Args:
        eos_token_ids: what `min_tokens` forbids.
        at_once: rows to work on at once, if not as many as are fast. In one row the threads cut a sum in one way only.
    """

    def __init__(self, eos_token_ids: Collection[int], *, at_once: int | None = None) -> None:
        self._eos = tuple(eos_token_ids)
        self._at_once = at_once
        self._edits: WeakKeyDictionary[EngineSequence, LogitsProcessors] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, seqs: Sequence[EngineSequence], positions: Sequence[int]) -> Sampled:
        """Return the token of each sequence at its position, with its log-probabilities if it asks for them.

        Args:
            logits: [len(seqs), vocab].
        """
        # The device is busy with the forward pass; the host has until that is done.
        grammars = {i: seq.grammar for i, seq in enumerate(seqs) if seq.grammar is not None}
        masks = dict(zip(grammars, fill_masks(list(grammars.values())), strict=True)) if grammars else {}
        rows = [
            SampleRow(seq.params, seq.seed, position, self._edits_of(seq, logits.shape[-1]), masks.get(i))
            for i, (seq, position) in enumerate(zip(seqs, positions, strict=True))
        ]
        tokens = sample(logits, rows, self._at_once)
        asked = {i: n for i, seq in enumerate(seqs) if (n := seq.params.logprobs) is not None}
        if not asked:
            return Sampled(tokens)
        places = upload(list(asked), logits.device)
        ranked = rank_tokens(logits.index_select(0, places), tokens.index_select(0, places), list(asked.values()))
        return Sampled(tokens, ranked, list(asked))

    def _edits_of(self, seq: EngineSequence, vocab_size: int) -> LogitsProcessors | None:
        if not edits_logits(seq.params):
            return None
        edits = self._edits.get(seq)
        if edits is None:
            # A tokenizer may know more tokens than the model: an id beyond a row's end would be in the next one.
            eos = [token for token in self._eos if token < vocab_size]
            edits = self._edits[seq] = LogitsProcessors(seq.params, seq.tokens[: seq.num_prompt_tokens], eos)
        edits.note(seq.tokens)
        return edits


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a seed and a position: the same wherever and beside whomever it is
    drawn."""
    raw = hashlib.blake2b(struct.pack("<Qq", seed & (2**64 - 1), position), digest_size=8, person=b"sample").digest()
    return float(int.from_bytes(raw, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], at_once: int | None = None) -> torch.Tensor:
    """One token for each row: int64 [len(rows)], on the logits' device. The logits stay as they are.

    Args:
        logits: [len(rows), vocab].
        at_once: as in `Sampler`.
    """
    if all(row.greedy and row.edits is None and row.allowed is None for row in rows):
        return _argmax(logits)
    step = at_once or rows_at_once(logits.shape[-1], logits.device)
    parts = [_choose(logits[at : at + step], rows[at : at + step]) for at in range(0, len(rows), step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    edits = [(i, row.edits, row.position) for i, row in enumerate(rows) if row.edits is not None]
    masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
    if edits or masks:
        logits = logits.to(torch.float32, copy=True)
        apply_edits(logits, edits)
    if masks:
        apply_masks(logits, list(masks), np.stack(list(masks.values())))
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if len(drawn) == len(rows):
        return _draw(logits.float(), rows)
    tokens = _argmax(logits)
    if drawn:
        index = upload(drawn, logits.device)
        tokens[index] = _draw(logits.index_select(0, index).float(), [rows[i] for i in drawn])
    return tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest of each row."""
    if logits.is_cuda or logits.shape[-1] % _BLOCK:
        return logits.max(-1).indices
    # The CPU finds a maximum many times as fast as its place.
    blocks = logits.reshape(len(logits), -1, _BLOCK)
    best = blocks.amax(-1).max(-1).indices[:, None]
    within = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK))[:, 0].max(-1).indices
    return best[:, 0] * _BLOCK + within


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    device = scores.device
    temperature = upload([row.params.temperature for row in rows], device)
    weights = (scores / temperature[:, None]).softmax(-1)
    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        _cut(weights, upload(min_p, device) * weights.amax(-1))
    vocab = weights.shape[-1]
    top_k = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    top_p = [row.params.top_p for row in rows]
    limited = [i for i in range(len(rows)) if top_k[i] < vocab or top_p[i] < 1.0]
    if limited:
        _cut(weights, _least_weights(weights, limited, top_k, top_p))
    numbers = upload([uniform(row.seed, row.position) for row in rows], device, torch.float64)
    return _invert(weights, numbers)


def _cut(weights: torch.Tensor, least: torch.Tensor) -> None:
    """Make 0 of all weights of a row that are below its least one. Equal weights stay, or go, together."""
    weights.mul_(torch.ge(weights, least[:, None], out=torch.empty_like(weights)))


def _least_weights(
    weights: torch.Tensor, limited: Sequence[int], top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """Return the least weight that top_k and top_p leave in each row; 0 in rows that are not `limited`."""
    vocab, device = weights.shape[-1], weights.device
    least = torch.zeros(len(weights), device=device)
    wide = [i for i in limited if _NARROW < top_k[i] < vocab]
    narrow = [i for i in limited if top_k[i] <= _NARROW and top_k[i] < vocab]
    for which in (wide, narrow):
        if which:
            index, ks = upload(which, device), [top_k[i] for i in which]
            least[index] = _least_of_top(weights.index_select(0, index), ks, [top_p[i] for i in which])
    whole = [i for i in limited if top_k[i] == vocab]
    if whole:
        index, ps = upload(whole, device), upload([top_p[i] for i in whole], device, torch.float64)
        least[index] = _least_of_all(weights.index_select(0, index), ps)
    return least


def _least_of_top(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Return the least weight left where top_p is a share of what top_k leaves."""
    device = weights.device
    ks = upload(top_k, device)[:, None]
    # A share of 1 must lose no token to rounding.
    ps = upload([p if p < 1.0 else 2.0 for p in top_p], device, torch.float64)[:, None]
    values = weights.topk(max(top_k), dim=-1).values
    ranks = torch.arange(values.shape[-1], device=device)
    sums = values.double().masked_fill(ranks >= ks, 0.0).cumsum(-1)
    missing = (sums < ps * sums[:, -1:]).sum(-1, keepdim=True)  # the number of the likeliest that is not enough
    return values.gather(-1, torch.minimum(missing, ks - 1))[:, 0]


def _least_of_all(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the least weight left where top_p is a share of everything."""
    wanted = top_p * weights.sum(-1)
    if weights.is_cuda:  # whether a few candidates are enough, the host could only learn by waiting
        return _nucleus(weights, wanted)
    values = weights.topk(min(_CANDIDATES, weights.shape[-1]), dim=-1).values
    missing = (values.double().cumsum(-1) < wanted[:, None]).sum(-1)
    least = values.gather(-1, missing.clamp(max=values.shape[-1] - 1)[:, None])[:, 0]
    beyond = (missing == values.shape[-1]).nonzero()[:, 0]
    if len(beyond):
        least[beyond] = _nucleus(weights.index_select(0, beyond), wanted[beyond])
    return least


def _nucleus(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the largest weight of which it is true that those at least as large add up to what is wanted.

    Positive floats are in the order of their bits, so 30 halvings find it, without sorting.
    """
    low = torch.zeros(len(weights), dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, _BITS_OF_1 + 1)
    kept = torch.empty_like(weights)
    for _ in range(30):
        middle = (low + high) // 2
        torch.ge(weights, middle.view(torch.float32)[:, None], out=kept)
        enough = kept.mul_(weights).sum(-1) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index [rows] at which the running sum of `weights` [rows, vocab] first exceeds the number's share of the whole.

    First the block of the vocabulary is looked for, then the token in it.
    """
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    block, rest = _search(blocks.sum(-1), numbers)
    within = blocks.gather(1, block[:, None, None].expand(-1, -1, _BLOCK))[:, 0]
    token, _ = _search(within, rest)
    return (block * _BLOCK + token).clamp_(max=vocab - 1)


def _search(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each row, and where in the weight there the number's share of the whole lies, from 0 to 1."""
    sums = weights.double().cumsum(-1)
    total = sums[:, -1]
    # Rounding may put the target at the whole, which no running sum exceeds.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    picked = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1)
    after = sums.gather(-1, picked)
    before = functional.pad(sums, (1, 0)).gather(-1, picked)
    return picked[:, 0], ((target - before) / (after - before))[:, 0]
