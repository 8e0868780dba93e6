"""Prompts for the summary of a conversation that has outgrown its context."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import SamplingParams
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols import context_overflow
from millrace.gateway.protocols.context_overflow import SUMMARY_TOKENS, summary_prompt, summary_request


@pytest.mark.parametrize("room", [-100, 0, 1, 3, 4, 50, 400])
def test_the_end_of_the_transcript_is_shortened_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    lengths: list[int] = []

    def tokenize(model: ServedModel, request: InferenceRequest, max_tokens: int | None = None) -> Prompt:
        text = request.prompt[0]["content"]  # type: ignore[index]
        lengths.append(len(text) - len(summary_request(request).prompt[0]["content"]))  # type: ignore[index]
        assert len(lengths) < 50, "it does not end"
        return Prompt([1] * len(text))

    monkeypatch.setattr(context_overflow, "tokenize_here", tokenize)
    model = ServedModel("m", None, SUMMARY_TOKENS + room, 100, 0)  # type: ignore[arg-type]
    request = InferenceRequest("m", [{"role": "user", "content": "x" * 10_000}], SamplingParams(), 10)
    prompt = summary_prompt(model, request, 1)
    assert max(lengths) <= max(1, 4 * room)
    assert prompt.num_tokens <= room or lengths[-1] <= max(1, room // 4)
