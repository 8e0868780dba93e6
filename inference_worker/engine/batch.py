"""The inputs of a step: rows of block tables that persist between steps, and index arrays for the device."""

from __future__ import annotations

from collections.abc import Sequence as Entries
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt

from inference_worker.engine.sequences.sequence import Sequence, SequenceStatus
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput

Indexes = npt.NDArray[np.int32]

_TABLE_UNIT = 16  # block tables have a multiple of it as width, so that few variants of a kernel are compiled


@dataclass(slots=True)
class StepInputs:
    """The index arrays of a step, all int32. Decodes come first."""

    query_lens: list[int]  # new tokens of each sequence
    lengths: list[int]  # tokens of each sequence, including the new ones
    token_ids: Indexes  # [num_tokens]; −1 − i: the token that the previous step sampled as its i-th
    positions: Indexes  # [num_tokens]
    slot_mapping: Indexes  # [num_tokens], block × block_size + offset; with several groups of layers [groups, …]
    query_start_loc: Indexes  # [num_seqs + 1]
    seq_lens: Indexes  # [num_seqs]
    block_table: Indexes  # [num_seqs, blocks], padded with block 0; with several groups of layers [groups, …]
    sampled: Indexes  # rows of the tokens whose logits are sampled
    has_in_flight: bool  # some token ids are those of the previous step

    def arrays(self) -> tuple[Indexes, ...]:
        """Return the arrays in the order of their declaration."""
        return (
            self.token_ids, self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, self.block_table,
            self.sampled,
        )  # fmt: skip


@dataclass(slots=True)
class _Row:
    index: int  # in the block table
    epoch: int  # epoch of the sequence; after a preemption it has other blocks
    num_blocks: int = 0  # blocks in each group
    last_block: int = 0  # last block of the first group
    num_released: list[int] = field(default_factory=list)  # released blocks of each group
    place: int = -1  # place of its token among the tokens that the previous step sampled


class PersistentBatch:
    """The running sequences' rows of the block table. A step updates them with the blocks of its new tokens.

    Rows keep their place, and a step's block table is a selection of rows. So no row moves when sequences come and go.

    Args:
        num_rows: maximum number of running sequences.
        max_blocks: maximum number of blocks of a sequence.
        block_size: tokens of a block.
        num_groups: groups of layers, each with its own block table.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_groups, num_rows, _table_width(max_blocks)), dtype=np.int32)
        self._table = self._tables[0] if num_groups == 1 else self._tables
        self._free = list(range(num_rows))[::-1]
        self._rows: dict[Sequence, _Row] = {}

    def update(self, output: SchedulerOutput) -> StepInputs:
        """Update the rows of the step's sequences, and return the step's inputs."""
        scheduled = output.scheduled
        self._remove_ended(scheduled)
        rows, token_ids = [], []
        for s in scheduled:
            row = self._update_row(s)
            rows.append(row)
            token_ids += s.seq.tokens[s.start : s.start + s.num_known_tokens]
            token_ids += s.drafts
            if s.in_flight:
                token_ids.append(-1 - row.place)
        query_lens = [s.num_new_tokens for s in scheduled]
        lengths = [s.start + s.num_new_tokens for s in scheduled]
        seq_lens = np.array(lengths, dtype=np.int32)
        indexes = row_of_token = np.array([row.index for row in rows])
        if output.num_tokens == len(scheduled):  # one token of each sequence
            query_start_loc = np.arange(len(scheduled) + 1, dtype=np.int32)
            positions = seq_lens - 1
        else:
            counts = np.array(query_lens, dtype=np.int32)
            query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int32)
            np.cumsum(counts, out=query_start_loc[1:])
            # The last token of a sequence has the position seq_len - 1.
            positions = np.arange(output.num_tokens, dtype=np.int32) + np.repeat(seq_lens - query_start_loc[1:], counts)
            row_of_token = np.repeat(indexes, counts)
        blocks = self._table[..., row_of_token, positions // self._block_size]
        width = _table_width(-(-max(lengths) // self._block_size))
        return StepInputs(
            query_lens=query_lens,
            lengths=lengths,
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self._table[..., indexes, :width],
            sampled=_place_samples(scheduled, rows, query_start_loc[1:]),
            has_in_flight=any(s.in_flight for s in scheduled),
        )

    def check(self) -> None:
        """Check that rows are used once, and that the block table equals one that is built from the sequences' blocks.

        Raises:
            RuntimeError: it differs.
        """
        used = [row.index for row in self._rows.values()]
        if sorted(used + self._free) != list(range(self._tables.shape[1])):
            raise RuntimeError("batch integrity: a row is used twice or lost")
        rebuilt = np.zeros_like(self._tables)
        for seq, row in self._rows.items():
            tables = seq.block_tables if _is_current(seq, row) else self._tables[:, row.index, : row.num_blocks]
            rebuilt[:, row.index, : len(tables[0])] = tables
            if len(tables[0]) < row.num_blocks:  # blocks of rejected drafts, until the next update
                rest = slice(len(tables[0]), row.num_blocks)
                rebuilt[:, row.index, rest] = self._tables[:, row.index, rest]
            for group, num_released in enumerate(seq.num_released):  # rows of sequences that rest are not updated
                rebuilt[group, row.index, :num_released] = self._tables[group, row.index, :num_released]
        if not np.array_equal(self._tables, rebuilt):
            raise RuntimeError("batch integrity: the block table differs from the sequences' blocks")

    def _remove_ended(self, scheduled: Entries[ScheduledSequence]) -> None:
        """Remove the rows of the sequences that have ended or were preempted."""
        for s in scheduled:
            row = self._rows.get(s.seq)
            if row is None or not _is_current(s.seq, row):
                break
        else:
            if len(scheduled) == len(self._rows):
                return
        for seq, row in [entry for entry in self._rows.items() if not _is_current(*entry)]:
            self._tables[:, row.index, : row.num_blocks] = 0
            self._free.append(row.index)
            del self._rows[seq]

    def _update_row(self, s: ScheduledSequence) -> _Row:
        row = self._rows.get(s.seq)
        if row is None:
            row = self._rows[s.seq] = _Row(self._free.pop(), s.epoch)
        tables = s.seq.block_tables
        if not tables:  # it ended after its scheduling
            return row
        if row.num_released != s.seq.num_released:
            for table, num_released in zip(self._tables, s.seq.num_released, strict=True):
                table[row.index, :num_released] = 0
            row.num_released = list(s.seq.num_released)
        count, last_block = len(tables[0]), tables[0][-1]
        if s.num_new_tokens == 1 and count == row.num_blocks and last_block == row.last_block:
            return row
        if count < row.num_blocks:  # blocks of rejected drafts were released
            self._tables[:, row.index, count : row.num_blocks] = 0
        # New tokens are written to new blocks, to the last one, or to a copy that replaces a shared one.
        first = min(row.num_blocks, s.start // self._block_size)
        for group, blocks in enumerate(tables):
            self._tables[group, row.index, first:count] = blocks[first:]
        row.num_blocks, row.last_block = count, last_block
        return row


def _place_samples(scheduled: Entries[ScheduledSequence], rows: Entries[_Row], ends: Indexes) -> Indexes:
    """Return the rows of the tokens whose logits are sampled, and set each row's place among the sampled tokens.

    Args:
        ends: the index after the last token of each sequence.
    """
    samples = [s.samples for s in scheduled]
    for place, row in enumerate(compress(rows, samples)):
        row.place = place
    if any(s.drafts for s in scheduled):
        ranges = [np.arange(end - s.num_samples, end) for s, end in zip(scheduled, ends, strict=True) if s.samples]
        return np.concatenate(ranges).astype(np.int32)
    return ends - 1 if all(samples) else ends[np.array(samples)] - 1


def _is_current(seq: Sequence, row: _Row) -> bool:
    return seq.status is SequenceStatus.RUNNING and seq.epoch == row.epoch


def _table_width(num_blocks: int) -> int:
    return -(-num_blocks // _TABLE_UNIT) * _TABLE_UNIT
