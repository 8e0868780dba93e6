"""Repetition, presence and frequency penalties. The tokens of each sequence and their counts stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from inference_worker.engine.sequences.sequence import SequenceStatus
from inference_worker.engine.tensors import upload_all

_MIN_ROWS = 8
_MIN_WIDTH = 1024


@dataclass(slots=True)
class PenaltyRow:
    """The row of one sequence on the device.

    index: of the row.
    length: number of tokens in the history: distinct tokens of the prompt, if they are penalized, and the output.
    num_outputs: number of output tokens in the history.
    epoch: of the sequence. A preemption may drop a token that is in the history.
    """

    index: int
    length: int
    num_outputs: int
    epoch: int


def is_host(device: torch.device) -> bool:
    """Return whether Python can read the tensors of `device` without waiting for it."""
    return device.type == "cpu"


class Penalties:
    """The tokens of all penalized sequences. A sampled token is added on the device, before the host knows it.

    The history of a row is the list of its tokens, whose logits are changed. A token may be in the history several
    times, because each time the same result is written. The counts of a row are those of the output's tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab, self._device = vocab_size, device
        self._is_host = is_host(device)
        self._rows: dict[EngineSequence, PenaltyRow] = {}
        self._free: list[int] = []
        self._history = torch.zeros(0, _MIN_WIDTH, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def row_of(self, seq: EngineSequence, position: int) -> PenaltyRow:
        """Return the row of a sequence whose next token is at `position`. It is built if it is not up to date."""
        num_outputs = position - seq.num_prompt_tokens
        row = self._rows.get(seq)
        if row is None or row.num_outputs != num_outputs or row.epoch != seq.epoch:
            row = self._rows[seq] = self._build(seq, num_outputs, self._take_row() if row is None else row.index)
        return row

    def add(self, rows: Sequence[tuple[int, PenaltyRow]], chosen: torch.Tensor) -> None:
        """Add the chosen tokens, int64 [batch], to the histories of these rows. Each has its index in the batch."""
        self._widen(max(row.length for _, row in rows) + 1)
        if self._is_host:
            self._add_on_host(rows, chosen)
        else:
            self._add_on_device(rows, chosen)
        for _, row in rows:
            row.length += 1
            row.num_outputs += 1

    def apply(self, scores: torch.Tensor, rows: Sequence[tuple[int, PenaltyRow, SamplingParams]]) -> None:
        """Penalize the tokens of the histories in `scores`, float32 [batch, vocab] and contiguous, in place."""
        if self._is_host:
            self._apply_on_host(scores.numpy(), rows)
        else:
            self._apply_on_device(scores, rows)

    def _add_on_host(self, rows: Sequence[tuple[int, PenaltyRow]], chosen: torch.Tensor) -> None:
        history, counts, tokens = self._history.numpy(), self._counts.numpy(), chosen.tolist()
        for place, row in rows:
            history[row.index, row.length] = tokens[place]
            counts[row.index, tokens[place]] += 1

    def _apply_on_host(
        self, scores: npt.NDArray[np.float32], rows: Sequence[tuple[int, PenaltyRow, SamplingParams]]
    ) -> None:
        """Penalize row by row: on the CPU, an operation on all rows costs more than numpy's operations on some."""
        history, all_counts = self._history.numpy(), self._counts.numpy()
        for place, row, params in rows:
            tokens, line = history[row.index, : row.length], scores[place]
            logits = line[tokens]
            if params.repetition_penalty != 1.0:
                divisor = np.float32(params.repetition_penalty)
                logits = np.where(logits > 0, logits / divisor, logits * divisor)
            if params.presence_penalty or params.frequency_penalty:
                counts = all_counts[row.index][tokens].astype(np.float32)
                frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
                logits -= frequency * counts + presence * (counts > 0)
            line[tokens] = logits

    def _add_on_device(self, rows: Sequence[tuple[int, PenaltyRow]], chosen: torch.Tensor) -> None:
        places = np.array([index for index, _ in rows])
        starts = np.array([row.index * self._vocab for _, row in rows])
        ends = np.array([row.index * self._history.shape[1] + row.length for _, row in rows])
        places_, starts_, ends_ = upload_all([places, starts, ends], self._device)
        tokens = chosen.index_select(0, places_)
        self._history.view(-1).index_copy_(0, ends_, tokens)
        counts = self._counts.view(-1)
        counts.index_add_(0, tokens + starts_, torch.ones_like(tokens, dtype=torch.int32))

    def _apply_on_device(self, scores: torch.Tensor, rows: Sequence[tuple[int, PenaltyRow, SamplingParams]]) -> None:
        """Penalize all rows together, by operations that do not wait for the device."""
        lengths = np.array([row.length for _, row, _ in rows])
        total = int(lengths.sum())
        if not total:
            return
        places = np.array([place for place, _, _ in rows])
        indexes = np.array([row.index for _, row, _ in rows])
        shifts = indexes * self._history.shape[1] - (np.cumsum(lengths) - lengths)
        divisors = np.array([params.repetition_penalty for _, _, params in rows], dtype=np.float32)
        presences = np.array([params.presence_penalty for _, _, params in rows], dtype=np.float32)
        frequencies = np.array([params.frequency_penalty for _, _, params in rows], dtype=np.float32)
        repeats, *values = upload_all(
            [lengths, shifts, places * self._vocab, indexes * self._vocab, divisors, presences, frequencies],
            self._device,
        )
        shift, score_offset = (_repeat(value, repeats, total) for value in values[:2])
        tokens = self._history.view(-1).index_select(0, shift.add_(torch.arange(total, device=self._device)))
        index, flat = score_offset.add_(tokens), scores.view(-1)
        logits = flat.index_select(0, index)
        if (divisors != 1).any():
            divisor = _repeat(values[3], repeats, total)
            # Positive logits are divided and negative ones multiplied, so that all become less likely.
            logits = torch.where(logits > 0, logits / divisor, logits * divisor)
        if presences.any() or frequencies.any():
            count_offset, presence, frequency = (_repeat(value, repeats, total) for value in (values[2], *values[4:]))
            counts = self._counts.view(-1).index_select(0, count_offset.add_(tokens))
            logits -= frequency.mul_(counts).add_(presence.mul_(counts > 0))
        flat.index_copy_(0, index, logits)

    def _build(self, seq: EngineSequence, num_outputs: int, index: int) -> PenaltyRow:
        repeats = seq.params.repetition_penalty != 1.0
        prompt = sorted(set(seq.tokens[: seq.num_prompt_tokens])) if repeats else []
        output = seq.tokens[seq.num_prompt_tokens : seq.num_prompt_tokens + num_outputs]
        counts = Counter(output)
        history = prompt + output
        self._widen(len(history))
        arrays = [np.array(history, dtype=np.int64), np.array([*counts], dtype=np.int64)]
        tokens, distinct, values = upload_all([*arrays, np.array([*counts.values()], dtype=np.int32)], self._device)
        self._history[index, : len(history)] = tokens
        self._counts[index].zero_().index_copy_(0, distinct, values)
        return PenaltyRow(index, len(history), num_outputs, seq.epoch)

    def _take_row(self) -> int:
        if not self._free:
            for seq in [seq for seq in self._rows if seq.status is SequenceStatus.FINISHED]:
                self._free.append(self._rows.pop(seq).index)
        if not self._free:
            count = len(self._counts)
            more = max(_MIN_ROWS, count)
            self._free = list(range(count, count + more))
            self._history = torch.cat((self._history, self._history.new_zeros(more, self._history.shape[1])))
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab)))
        return self._free.pop()

    def _widen(self, length: int) -> None:
        """Provide space for histories of `length` tokens."""
        rows, width = self._history.shape
        if length > width:
            wider = self._history.new_zeros(rows, max(length, 2 * width))
            wider[:, :width] = self._history
            self._history = wider


def _repeat(values: torch.Tensor, repeats: torch.Tensor, total: int) -> torch.Tensor:
    """Return each row's value for each token of its history."""
    return torch.repeat_interleave(values, repeats, output_size=total)
