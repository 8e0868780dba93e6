"""The inputs of a step, built from its sequences without a state between steps."""

from __future__ import annotations

from inference_worker.engine.batch import StepInputs
from inference_worker.engine.sequences.sequence import SequenceStatus
from inference_worker.engine.sequences.step import SchedulerOutput


def check_inputs(
    inputs: StepInputs, output: SchedulerOutput, previous: SchedulerOutput, block_size: int, num_groups: int = 1
) -> None:
    """Check that `inputs` are those of the step `output`, which follows the step `previous`.

    Raises:
        RuntimeError: they differ.
    """
    ended = [s.seq.status is SequenceStatus.FINISHED for s in output.scheduled]  # their inputs are arbitrary
    sampled_before = [s.seq for s in previous.scheduled if s.samples]
    token_ids: list[int | None] = []
    positions: list[int] = []
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    for s, is_ended in zip(output.scheduled, ended, strict=True):
        new = range(s.start, s.start + s.num_new_tokens)
        padding = [0] * len(new) * (new.stop // block_size + 1)
        positions += new
        for group in range(num_groups):
            table = padding if is_ended else s.seq.block_tables[group]
            slots[group] += [table[p // block_size] * block_size + p % block_size for p in new]
        token_ids += s.seq.tokens[new.start : new.stop - len(s.drafts)]
        token_ids += s.drafts
        if s.in_flight:
            token_ids.append(None if is_ended else -1 - sampled_before.index(s.seq))
    ends = [sum(s.num_new_tokens for s in output.scheduled[: i + 1]) for i in range(len(output.scheduled))]
    sampled = [
        row for e, s in zip(ends, output.scheduled, strict=True) if s.samples for row in range(e - 1 - len(s.drafts), e)
    ]
    width = inputs.block_table.shape[-1]
    tables = [
        [
            [0] * width if is_ended else s.seq.block_tables[group] + [0] * (width - len(s.seq.block_tables[group]))
            for s, is_ended in zip(output.scheduled, ended, strict=True)
        ]
        for group in range(num_groups)
    ]
    found_ids = [None if e is None else f for f, e in zip(inputs.token_ids.tolist(), token_ids, strict=True)]
    pairs: dict[str, tuple[object, object]] = {
        "token_ids": (found_ids, token_ids),
        "positions": (inputs.positions.tolist(), positions),
        "slot_mapping": (inputs.slot_mapping.tolist(), slots if num_groups > 1 else slots[0]),
        "query_start_loc": (inputs.query_start_loc.tolist(), [0, *ends]),
        "seq_lens": (inputs.seq_lens.tolist(), [s.start + s.num_new_tokens for s in output.scheduled]),
        "lengths": (inputs.lengths, inputs.seq_lens.tolist()),
        "query_lens": (inputs.query_lens, [s.num_new_tokens for s in output.scheduled]),
        "block_table": (inputs.block_table.tolist(), tables if num_groups > 1 else tables[0]),
        "sampled": (inputs.sampled.tolist(), sampled),
        "has_in_flight": (inputs.has_in_flight, any(s.in_flight for s in output.scheduled)),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise RuntimeError(f"{name} is {found}, want {expected}")
    if any(array.dtype != "int32" for array in inputs.arrays()):
        raise RuntimeError("an array is not int32")
