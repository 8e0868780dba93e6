"""Which answers may be kept: every finish reason with every content, for one and several choices."""

from __future__ import annotations

from itertools import product
from typing import get_args

import msgspec
import pytest

from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens, Vectors
from inference_worker.contract.request import FinishReason, TokenCounts, TokenLogprobs, ToolCallDelta
from millrace.gateway.answer_cache.answer_rules import is_keepable

REASONS = get_args(FinishReason)
KEPT = {"stop": True, "length": True, "cancelled": False, "content_filter": False}
CALL = ToolCallDelta(0, "find", "{}")
LOGPROB = TokenLogprobs(5, -0.5, 1)
# The events of one choice, and whether they have a text or a tool call.
CONTENTS: dict[str, tuple[list[Tokens], bool]] = {
    "text": ([Tokens("r", 1, 0, [5], "Hello")], True),
    "text in two events": ([Tokens("r", 1, 0, [5], ""), Tokens("r", 1, 1, [6], "Hi")], True),
    "text after reasoning": ([Tokens("r", 1, 0, [5], "", reasoning="x"), Tokens("r", 1, 1, [6], "Hi")], True),
    "call of an upstream": ([Tokens("r", 1, 0, [], "", calls=[CALL])], True),
    "call in the text": ([Tokens("r", 1, 0, [5], "<tool_call>{}</tool_call>")], True),
    "text and call": ([Tokens("r", 1, 0, [5], "I look."), Tokens("r", 1, 1, [], "", calls=[CALL])], True),
    "nothing": ([], False),
    "tokens without text": ([Tokens("r", 1, 0, [5, 6], "")], False),
    "white space": ([Tokens("r", 1, 0, [5], " \n"), Tokens("r", 1, 1, [6], "\u00a0\t")], False),
    "reasoning": ([Tokens("r", 1, 0, [5], "", reasoning="I think", reasoning_tokens=1)], False),
    "signature": ([Tokens("r", 1, 0, [], "", signature="abc")], False),
    "log-probabilities": ([Tokens("r", 1, 0, [5], "", logprobs=[LOGPROB])], False),
    "counts of the prompt": ([Tokens("r", 1, 0, [], "", prompt=TokenCounts(uncached=3))], False),
}


def test_every_finish_reason_is_in_the_table() -> None:
    assert set(KEPT) == set(REASONS)


def made(*choices: tuple[str, str]) -> list[AnswerEvent]:
    """Return the events of an answer with these choices, each with its finish reason and its content."""
    events: list[AnswerEvent] = []
    for index, (reason, content) in enumerate(choices):
        events += [msgspec.structs.replace(event, index=index) for event in CONTENTS[content][0]]
        if index < len(choices) - 1:
            events.append(Finished("r", 1, 0, index, reason, None))  # type: ignore[arg-type]
    events.append(End("r", 1, 0, choices[-1][0], None, TokenCounts()))  # type: ignore[arg-type]
    return events


@pytest.mark.parametrize("may_be_truncated", [True, False])
def test_an_answer_is_kept_if_each_choice_is_complete_and_not_empty(may_be_truncated: bool) -> None:
    choices = list(product(REASONS, CONTENTS))
    cases = [*((choice,) for choice in choices), *product(choices, repeat=2)]
    assert len(cases) == 52 + 52**2
    for case in cases:
        expected = all(KEPT[reason] and CONTENTS[content][1] for reason, content in case)
        if not may_be_truncated:
            expected = expected and "length" not in {reason for reason, _ in case}
        assert is_keepable(made(*case), len(case), may_be_truncated=may_be_truncated) is expected, case


@pytest.mark.parametrize(
    "events",
    [
        [],
        [Tokens("r", 1, 0, [5], "Hello")],
        [Tokens("r", 1, 0, [5], "Hello"), Finished("r", 1, 1, 0, "stop", None)],
        [Vectors("r", 1, 0, b"\0\0\0\0"), End("r", 1, 1, "stop", None, TokenCounts())],
    ],
    ids=["nothing", "no end", "a choice without an end", "vectors"],
)
def test_other_events_are_not_kept(events: list[AnswerEvent]) -> None:
    assert not is_keepable(events, 1)


def test_a_choice_without_events_is_empty() -> None:
    assert not is_keepable(made(("stop", "text")), 2)
