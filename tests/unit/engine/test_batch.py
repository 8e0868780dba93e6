"""The rows that persist between steps. Random schedules are checked by every `MemoryRunner` (`fakes.py`)."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.batch import PersistentBatch
from inference_worker.engine.sequences.sequence import Sequence, SequenceStatus
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput
from tests.support.engine.step_inputs import check_inputs

BLOCK = 4


def running(tokens: int, *block_ids: int) -> Sequence:
    seq = Sequence(Request("x", list(range(tokens)), SamplingParams()), None)
    seq.status, seq.block_tables, seq.num_released = SequenceStatus.RUNNING, [list(block_ids)], [0]
    return seq


def step(*entries: tuple[Sequence, int, int]) -> SchedulerOutput:
    """Return a step of sequences, each with its first new token and their number. All sample a token."""
    scheduled = [ScheduledSequence(seq, start, count, True, seq.epoch) for seq, start, count in entries]
    return SchedulerOutput(scheduled, sum(count for _, _, count in entries))


def update(batch: PersistentBatch, output: SchedulerOutput) -> list[list[int]]:
    """Return the block table of a step, without its padding."""
    inputs = batch.update(output)
    check_inputs(inputs, output, SchedulerOutput(), BLOCK)
    batch.check()
    rows: list[list[int]] = inputs.block_table.tolist()
    return [[block for block in row if block] for row in rows]


def test_a_shared_block_that_is_replaced_by_a_copy() -> None:
    batch, seq = PersistentBatch(2, 8, BLOCK), running(7, 5, 6)
    assert update(batch, step((seq, 0, 6))) == [[5, 6]]
    seq.block_tables[0][1] = 9
    assert update(batch, step((seq, 6, 1))) == [[5, 9]]


def test_a_row_is_reused_after_its_sequence_has_ended() -> None:
    batch, first, second = PersistentBatch(1, 8, BLOCK), running(20, 5, 6, 7, 8, 9), running(6, 3, 2)
    assert update(batch, step((first, 0, 20))) == [[5, 6, 7, 8, 9]]
    first.status, first.block_tables = SequenceStatus.FINISHED, []
    assert update(batch, step((second, 0, 6))) == [[3, 2]]


def test_a_preempted_sequence_gets_other_blocks() -> None:
    batch, seq = PersistentBatch(1, 8, BLOCK), running(9, 5, 6, 7)
    update(batch, step((seq, 0, 9)))
    seq.epoch, seq.block_tables = 1, [[4, 3]]
    assert update(batch, step((seq, 0, 8))) == [[4, 3]]


def test_a_sequence_that_rests_for_a_step_keeps_its_row() -> None:
    batch, first, second = PersistentBatch(2, 8, BLOCK), running(9, 5, 6, 7), running(6, 3, 2)
    assert update(batch, step((first, 0, 8), (second, 0, 5))) == [[5, 6, 7], [3, 2]]
    assert update(batch, step((second, 5, 1))) == [[3, 2]]
    assert update(batch, step((second, 5, 1), (first, 8, 1))) == [[3, 2], [5, 6, 7]]


@pytest.mark.parametrize("count", [1, 5])
def test_a_sequence_that_ended_after_its_scheduling_writes_to_the_padding_block(count: int) -> None:
    """Its blocks may already belong to another sequence."""
    batch, ended, other = PersistentBatch(2, 8, BLOCK), running(9, 5, 6, 7), running(6, 3, 2)
    update(batch, step((ended, 0, 4), (other, 0, 5)))
    ended.status, ended.block_tables = SequenceStatus.FINISHED, []
    assert update(batch, step((ended, 4, count), (other, 5, 1))) == [[], [3, 2]]
    assert batch.update(step((ended, 4, count))).block_table.size  # attention reads the padding block


def test_the_check_finds_a_changed_table() -> None:
    batch, seq = PersistentBatch(2, 8, BLOCK), running(9, 5, 6, 7)
    update(batch, step((seq, 0, 9)))
    seq.block_tables[0][0] = 1
    with pytest.raises(RuntimeError, match="differs"):
        batch.check()
