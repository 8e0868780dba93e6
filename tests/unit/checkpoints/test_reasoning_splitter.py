"""Reasoning and answer of a completion, independent of how the text is split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.checkpoints.reasoning import ReasoningSplitter
from inference_worker.contract.output_formats import REASONING_FORMATS


def split(form: str, *texts: str, is_open: bool = False, is_truncated: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(REASONING_FORMATS[form], is_open=is_open)
    parts = [*(splitter.push(text) for text in texts), ("", splitter.close(is_truncated=is_truncated))]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


SAMPLES = [
    ("think", False, "<think>\nHm. 1 < 2 </thin\n</think>\n\nYes </think>", "Hm. 1 < 2 </thin", "Yes </think>"),
    ("think", True, "\nHm\n\nso</think>Yes", "Hm\n\nso", "Yes"),
    ("think", False, "\n <think></think>\nYes", "", "Yes"),
    ("think", False, " Yes <think>no</think>", "", " Yes <think>no</think>"),
    ("think", False, "<thin ice", "", "<thin ice"),
    ("think", False, " \n", "", " \n"),
    ("granite", False, "<think>Hm</think>\n<response> Yes </response>", "Hm", "Yes "),
    ("granite", False, "<think>Hm</think> Yes < <response", "Hm", "Yes < <response"),
    *((form, False, text, "", text) for form, text in (("think", "<"), ("mistral", "["), ("granite_text", "H"))),
    ("granite", False, "<think>Hm</think>1 <", "Hm", "1 <"),
    ("granite", False, "No <response>", "", "No <response>"),
    (
        "granite_text",
        False,
        "Here's my thought process:\nHere is a way.\nHere is my response:\n\nYes",
        *("Here is a way.", "Yes"),
    ),
    ("granite_text", False, "Here is my answer", "", "Here is my answer"),
    ("mistral", False, "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
    ("gemma", False, "<|channel>thought\nHm\n<channel|>Yes", "Hm", "Yes"),
]


@pytest.mark.parametrize(("form", "is_open", "text", "reasoning", "answer"), SAMPLES)
def test_reasoning_and_answer_at_every_split(form: str, is_open: bool, text: str, reasoning: str, answer: str) -> None:
    assert split(form, text, is_open=is_open) == (reasoning, answer)
    assert split(form, *text, is_open=is_open) == (reasoning, answer)
    for cut in range(len(text)):
        assert split(form, text[:cut], text[cut:], is_open=is_open) == (reasoning, answer)
        found = split(form, text[:cut], is_open=is_open, is_truncated=True)  # without a part of a mark
        assert reasoning.startswith(found[0])
        assert answer.startswith(found[1].rstrip())


@given(
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.booleans(),
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<response>",
                "</response>",
                "[THINK]",
                "[/THINK]",
                "<",
                "</",
                " ",
                "\n",
                "a",
                "Here",
            ]
        ),
        max_size=10,
    ),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_the_result_is_independent_of_the_splitting(
    form: str, is_open: bool, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = (text[start:end] for start, end in itertools.pairwise(edges))
    assert split(form, *pieces, is_open=is_open) == split(form, text, is_open=is_open)
