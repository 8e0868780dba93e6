"""Sampling: from logits to the next tokens of a batch.

Order: logit_bias, min_tokens (`logits_processors`), penalties (`penalties`), grammar, temperature, min_p, top_k,
top_p, random choice. Only a few candidates are sorted. A row's token depends only on the row's logits, seed and
position.

A draft is verified by sampling its position as without drafts, and is accepted if it is the sampled token. For a draft
that does not depend on a random choice, this is rejection sampling: a token with the probability p is accepted with the
probability p, and otherwise replaced by a token of the remaining distribution. The result is not only distributed as
without drafts but equal, because the position's random number is the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn import functional

from inference_worker.contract.request import SamplingParams, TokenLogprobs
from inference_worker.contract.validation import has_penalties
from inference_worker.engine.sampling.logits_processors import LogitsProcessors, apply_edits, apply_masks, edits_logits
from inference_worker.engine.sampling.logprobs import RankedTokens, rank_tokens
from inference_worker.engine.sampling.penalties import Penalties, PenaltyRow
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from inference_worker.engine.sequences.sequence import SequenceStatus
from inference_worker.engine.structured_output.grammars import Masks, fill_masks
from inference_worker.engine.tensors import download, rows_per_call, upload, upload_all
from kernels.native import operators
from kernels.native.library import Library

_CANDIDATES = 64  # most likely tokens that top_p examines before the whole vocabulary
_NARROW = 512  # rows with a larger top_k are computed separately, so that they do not slow down the others
_BITS_OF_1 = 0x3F800000  # bits of the float32 1.0, the maximum weight
_BLOCK = 256  # vocabulary tokens that are summed or compared together before the search within the block


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The sampling parameters of one row. `seed` and the token's `position` determine its random number."""

    params: SamplingParams
    seed: int
    position: int
    edits: LogitsProcessors | None = None  # None: no bias and no minimum length
    penalty: PenaltyRow | None = None  # None: no penalties
    allowed: Masks | None = None  # bits of `fill_masks`; None: every token is allowed

    @property
    def greedy(self) -> bool:
        return self.params.is_greedy


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen tokens: one for each sequence, and one for each of its accepted drafts."""

    tokens: torch.Tensor  # int32 [tokens]
    ranked: RankedTokens | None = None  # tokens with requested log-probabilities
    places: Sequence[int] = ()  # places of the ranked tokens in `tokens`
    counts: Sequence[int] | None = None  # tokens of each sequence; None: one

    def download(self) -> Sampled:
        """Start the copies to host memory. They can be read after a later `mark` was waited for."""
        ranked = self.ranked.download() if self.ranked else None
        return Sampled(download(self.tokens), ranked, self.places, self.counts)

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the tokens, and by index the requested log-probabilities. On a device, this waits."""
        logprobs = dict(zip(self.places, self.ranked.read(), strict=True)) if self.ranked else {}
        return self.tokens.tolist(), logprobs


class Sampler:
    """Chooses the next tokens of sequences, and stores per-sequence state as long as the sequence lives.

    Args:
        eos_token_ids: ids that `min_tokens` excludes.
        max_rows: maximum rows per call; None: the fastest number. With one row, threads split a sum in only one way.
        kernels: the C kernels, which find the maxima of logits in float32.
    """

    def __init__(
        self, eos_token_ids: Collection[int], *, max_rows: int | None = None, kernels: Library | None = None
    ) -> None:
        self._eos = tuple(eos_token_ids)
        self._max_rows = max_rows
        self._kernels = kernels
        self._edits: WeakKeyDictionary[EngineSequence, LogitsProcessors] = WeakKeyDictionary()
        self._penalties: Penalties | None = None  # made for the first request with penalties

    def sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[EngineSequence],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Sampled:
        """Return the token of each sequence at its position, with log-probabilities if requested. The token of a
        sequence that has ended is arbitrary.

        Args:
            logits: [rows, vocab], with a row for each sequence and each of its drafts.
            positions: of the first row of each sequence.
            drafts: of each sequence; empty: none.
        """
        if any(drafts):
            chosen, rows, counts = self._verify(logits, seqs, positions, drafts)
            logits = logits.index_select(0, upload(rows, logits.device))
            places = [place for place, count in enumerate(counts) for _ in range(count)]
        else:
            # The host works here while the device runs the forward pass.
            chosen, counts, places = self._choose(logits, seqs, positions), None, list(range(len(seqs)))
        tokens = chosen.to(torch.int32)
        requested = {i: n for i, place in enumerate(places) if (n := seqs[place].params.logprobs) is not None}
        if not requested:
            return Sampled(tokens, counts=counts)
        index = upload(list(requested), logits.device)
        ranked = rank_tokens(logits.index_select(0, index), chosen.index_select(0, index), list(requested.values()))
        return Sampled(tokens, ranked, list(requested), counts)

    def _verify(
        self,
        logits: torch.Tensor,
        seqs: Sequence[EngineSequence],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the tokens of all sequences, their rows in `logits`, and each sequence's number of tokens.

        A draft changes the next token's penalties and its grammar's mask. So sequences with them are sampled one
        position at a time, until a draft is rejected. All positions of the other sequences are sampled together.
        """
        first_rows = list(accumulate((1 + len(draft) for draft in drafts), initial=0))
        chosen: list[list[int]] = [[] for _ in seqs]
        is_serial = [_has_state(seq) for seq in seqs]
        pushed = [0] * len(seqs)  # drafts that the grammars have accepted
        work = [(i, depth) for i, draft in enumerate(drafts) for depth in range(1 if is_serial[i] else 1 + len(draft))]
        try:
            while work:
                index = upload([first_rows[i] + depth for i, depth in work], logits.device)
                found = self._choose(
                    logits.index_select(0, index),
                    [seqs[i] for i, _ in work],
                    [positions[i] + depth for i, depth in work],
                ).tolist()
                for (i, _), token in zip(work, found, strict=True):
                    chosen[i].append(token)
                work = [
                    (i, depth + 1)
                    for i, depth in work
                    if is_serial[i] and self._continues(seqs[i], chosen[i], drafts[i], pushed, i)
                ]
        finally:
            for seq, count in zip(seqs, pushed, strict=True):
                if seq.grammar is not None:
                    seq.grammar.pop(count)
        counts = [_count_accepted(tokens, draft) for tokens, draft in zip(chosen, drafts, strict=True)]
        kept = [token for tokens, count in zip(chosen, counts, strict=True) for token in tokens[:count]]
        rows = [first + depth for first, count in zip(first_rows, counts, strict=False) for depth in range(count)]
        return upload(kept, logits.device, torch.int64), rows, counts

    def _continues(
        self, seq: EngineSequence, chosen: Sequence[int], draft: Sequence[int], pushed: list[int], place: int
    ) -> bool:
        """Return whether the next position of a sequence is sampled, after its grammar was advanced."""
        depth = len(chosen)
        if depth > len(draft) or chosen[-1] != draft[depth - 1]:
            return False
        if seq.grammar is None:
            return True
        count = seq.grammar.push([chosen[-1]])
        pushed[place] += count
        return bool(count) and not seq.grammar.complete

    def _choose(self, logits: torch.Tensor, seqs: Sequence[EngineSequence], positions: Sequence[int]) -> torch.Tensor:
        """Return the token of each row: int64 [len(seqs)]."""
        if all(map(_is_most_likely, seqs)):
            return _argmax(logits, self._kernels)
        masks = _allowed_tokens(seqs)
        rows = [
            SampleRow(
                seq.params,
                seq.seed,
                position,
                self._edits_of(seq, logits.shape[-1]),
                self._penalty_of(seq, position, logits),
                masks.get(i),
            )
            for i, (seq, position) in enumerate(zip(seqs, positions, strict=True))
        ]
        chosen = sample(logits, rows, self._max_rows, self._penalties, self._kernels)
        penalized = [(i, row.penalty) for i, row in enumerate(rows) if row.penalty is not None]
        if self._penalties is not None and penalized:
            self._penalties.add(penalized, chosen)
        return chosen

    def _edits_of(self, seq: EngineSequence, vocab_size: int) -> LogitsProcessors | None:
        if not edits_logits(seq.params):
            return None
        edits = self._edits.get(seq)
        if edits is None:
            # A tokenizer may have more tokens than the model. An id beyond a row's end would point into the next row.
            eos = [token for token in self._eos if token < vocab_size]
            edits = self._edits[seq] = LogitsProcessors(seq.params, seq.num_prompt_tokens, eos)
        return edits

    def _penalty_of(self, seq: EngineSequence, position: int, logits: torch.Tensor) -> PenaltyRow | None:
        if not has_penalties(seq.params) or seq.status is SequenceStatus.FINISHED:
            return None
        if self._penalties is None:
            self._penalties = Penalties(logits.shape[-1], logits.device)
        return self._penalties.row_of(seq, position)


def _is_most_likely(seq: EngineSequence) -> bool:
    """Return whether the next token is the one with the largest logit, without changes of the logits."""
    params = seq.params
    is_free = seq.grammar is None and seq.reasoning is None
    return is_free and params.is_greedy and not edits_logits(params) and not has_penalties(params)


def _has_state(seq: EngineSequence) -> bool:
    """Return whether the choice of a token changes how the next one is chosen."""
    return seq.grammar is not None or has_penalties(seq.params)


def _count_accepted(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return the number of tokens to keep: those equal to the drafts, and the first other one."""
    for depth, (token, expected) in enumerate(zip(tokens, draft, strict=False)):
        if token != expected:
            return depth + 1
    return len(tokens)


def _allowed_tokens(seqs: Sequence[EngineSequence]) -> dict[int, Masks]:
    """Return the masks of the sequences with a grammar or forced tokens, by index."""
    grammars = {
        i: seq.grammar
        for i, seq in enumerate(seqs)
        if seq.grammar is not None
        and seq.status is not SequenceStatus.FINISHED
        and (seq.reasoning is None or seq.reasoning.grammar_applies)
    }
    masks: dict[int, Masks] = {}
    if grammars:
        masks = dict(zip(grammars, fill_masks(list(grammars.values())), strict=True))
    for i, seq in enumerate(seqs):
        if seq.reasoning is not None and (mask := seq.reasoning.mask(masks.get(i))) is not None:
            masks[i] = mask
    return masks


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a seed and a position. It does not depend on anything else."""
    raw = hashlib.blake2b(struct.pack("<Qq", seed & (2**64 - 1), position), digest_size=8, person=b"sample").digest()
    return float(int.from_bytes(raw, "little") >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    max_rows: int | None = None,
    penalties: Penalties | None = None,
    kernels: Library | None = None,
) -> torch.Tensor:
    """Return one token for each row: int64 [len(rows)], on the logits' device. The logits are not changed.

    Args:
        logits: [len(rows), vocab].
        max_rows, kernels: as in `Sampler`.
        penalties: of the rows that have any.
    """
    step = max_rows or rows_per_call(logits.shape[-1], logits.device)
    parts = [
        _choose(logits[at : at + step], rows[at : at + step], penalties, kernels) for at in range(0, len(rows), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose(
    logits: torch.Tensor, rows: Sequence[SampleRow], penalties: Penalties | None, kernels: Library | None
) -> torch.Tensor:
    edits = [(i, row.edits, row.position) for i, row in enumerate(rows) if row.edits is not None]
    penalized = [(i, row.penalty, row.params) for i, row in enumerate(rows) if row.penalty is not None]
    masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
    if edits or penalized or masks:
        logits = logits.to(torch.float32, copy=True)
    if edits:
        apply_edits(logits, edits)
    if penalized and penalties is not None:
        penalties.apply(logits, penalized)
    if masks:
        apply_masks(logits, list(masks), np.stack(list(masks.values())))
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if len(drawn) == len(rows):
        return _draw(logits.float(), rows)
    tokens = _argmax(logits, kernels)
    if drawn:
        index = upload(drawn, logits.device)
        tokens[index] = _draw(logits.index_select(0, index).float(), [rows[i] for i in drawn])
    return tokens


def _argmax(logits: torch.Tensor, kernels: Library | None) -> torch.Tensor:
    """Return the index of each row's maximum; the first one if there are several."""
    if kernels is not None and logits.dtype == torch.float32:
        return operators.argmax(kernels, logits)
    if logits.is_cuda or logits.shape[-1] % _BLOCK:
        return logits.max(-1).indices
    # On the CPU, finding a maximum is many times as fast as finding its index.
    blocks = logits.reshape(len(logits), -1, _BLOCK)
    best = blocks.amax(-1).max(-1).indices[:, None]
    within = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK))[:, 0].max(-1).indices
    return best[:, 0] * _BLOCK + within


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    vocab = scores.shape[-1]
    top_k = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    limited = [i for i, row in enumerate(rows) if top_k[i] < vocab or row.params.top_p < 1.0]
    wide = [i for i in limited if _NARROW < top_k[i] < vocab]
    narrow = [i for i in limited if top_k[i] <= _NARROW and top_k[i] < vocab]
    unlimited = [i for i in limited if top_k[i] == vocab]
    temperature, min_p, top_p, numbers, ks, *indexes = upload_all(
        [
            np.array([row.params.temperature for row in rows], dtype=np.float32),
            np.array([row.params.min_p for row in rows], dtype=np.float32),
            # A share of 1 must not lose a token by rounding.
            np.array([row.params.top_p if row.params.top_p < 1.0 else 2.0 for row in rows]),
            np.array([uniform(row.seed, row.position) for row in rows]),
            *(np.array(values, dtype=np.int64) for values in (top_k, wide, narrow, unlimited)),
        ],
        scores.device,
    )
    weights = (scores / temperature[:, None]).softmax(-1)
    if any(row.params.min_p for row in rows):
        _zero_below(weights, min_p * weights.amax(-1))
    if limited:
        minimum = torch.zeros(len(rows), device=scores.device)  # 0 in rows without a limit
        for group, index in zip((wide, narrow, unlimited), indexes, strict=True):
            if group:
                part, ps = weights.index_select(0, index), top_p.index_select(0, index)
                if group is unlimited:
                    minimum[index] = _min_weight_top_p(part, ps)
                else:
                    most = max(top_k[i] for i in group)
                    minimum[index] = _min_weight_top_k(part, ks.index_select(0, index), ps, most)
        _zero_below(weights, minimum)
    return _sample_index(weights, numbers)


def _zero_below(weights: torch.Tensor, minimum: torch.Tensor) -> None:
    """Set all weights of a row that are below its minimum to 0. Equal weights are treated equally."""
    weights.mul_(torch.ge(weights, minimum[:, None], out=torch.empty_like(weights)))


def _min_weight_top_k(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, most: int) -> torch.Tensor:
    """Return the minimum weight in each row, with top_p as a share of the top_k weights. `most` is the maximum of
    top_k."""
    ks, ps = top_k[:, None], top_p[:, None]
    values = weights.topk(most, dim=-1).values
    ranks = torch.arange(values.shape[-1], device=weights.device)
    sums = values.double().masked_fill(ranks >= ks, 0.0).cumsum(-1)
    missing = (sums < ps * sums[:, -1:]).sum(-1, keepdim=True)  # number of top tokens whose sum is below the target
    return values.gather(-1, torch.minimum(missing, ks - 1))[:, 0]


def _min_weight_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the minimum weight in each row, with top_p as a share of all weights."""
    target = top_p * weights.sum(-1)
    if weights.is_cuda:  # checking whether a few candidates suffice would wait for the device
        return _top_p_threshold(weights, target)
    values = weights.topk(min(_CANDIDATES, weights.shape[-1]), dim=-1).values
    missing = (values.double().cumsum(-1) < target[:, None]).sum(-1)
    minimum = values.gather(-1, missing.clamp(max=values.shape[-1] - 1)[:, None])[:, 0]
    beyond = (missing == values.shape[-1]).nonzero()[:, 0]
    if len(beyond):
        minimum[beyond] = _top_p_threshold(weights.index_select(0, beyond), target[beyond])
    return minimum


def _top_p_threshold(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the largest threshold for which the weights at or above it sum to at least the target.

    The bits of positive floats have the order of the floats, so 30 bisections find the threshold without sorting.
    """
    low = torch.zeros(len(weights), dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, _BITS_OF_1 + 1)
    at_least = torch.empty_like(weights)
    for _ in range(30):
        middle = (low + high) // 2
        torch.ge(weights, middle.view(torch.float32)[:, None], out=at_least)
        enough = at_least.mul_(weights).sum(-1) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)


def _sample_index(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the index [rows] at which the cumulative sum of `weights` [rows, vocab] first exceeds the number's share.

    First the block of the vocabulary is searched, then the token in the block.
    """
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    block, remainder = _search_cumulative(blocks.sum(-1), numbers)
    within = blocks.gather(1, block[:, None, None].expand(-1, -1, _BLOCK))[:, 0]
    token, _ = _search_cumulative(within, remainder)
    return (block * _BLOCK + token).clamp_(max=vocab - 1)


def _search_cumulative(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's index, and the position of the target within the weight at the index, from 0 to 1."""
    sums = weights.double().cumsum(-1)
    total = sums[:, -1]
    # By rounding, the target may equal the total, which no cumulative sum exceeds.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    picked = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1)
    after = sums.gather(-1, picked)
    before = functional.pad(sums, (1, 0)).gather(-1, picked)
    return picked[:, 0], ((target - before) / (after - before))[:, 0]
