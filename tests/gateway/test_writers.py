"""Answers in OpenAI's words, chunk by chunk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inference_worker.engine.request import TokenUsage
from inference_worker.protocol import AnswerEvent, End, Tokens
from millrace.gateway.forms import Form
from millrace.gateway.openai.writer import ChatWriter, CompletionWriter, OpenAIWriter

TOKENIZER: Any = None  # only asked for log-probabilities
EVENTS: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [5], "Hel", prompt=TokenUsage(uncached=6, cache_read=4)),
    Tokens("req_1", 1, 1, [6], ""),  # half a character: a token, and no text yet
    Tokens("req_1", 1, 2, [7, 8], "lo"),
    End("req_1", 1, 3, "stop", None, TokenUsage(uncached=6, cache_read=4, output=5)),
]
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def form(**options: bool) -> Form:
    return Form("d", "req_1", "m", 123, 10, **options)


def streamed(writer: OpenAIWriter) -> list[Any]:
    datas = [data for event in EVENTS for data in writer.stream(event)]
    assert datas[-1] == b"[DONE]"
    return [msgspec.json.decode(data) for data in datas[:-1]]


def test_a_chat_stream() -> None:
    chunks = streamed(ChatWriter(form(), TOKENIZER))
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 123,
        "model": "m",
        "service_tier": "default",
    }
    deltas = [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    reasons = [None, None, None, "stop"]
    assert chunks == [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in zip(deltas, reasons, strict=True)
    ]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_usage_comes_once_at_the_end_if_asked_for() -> None:
    *chunks, last = streamed(ChatWriter(form(include_usage=True), TOKENIZER))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_continuous_usage_counts_up() -> None:
    chunks = streamed(ChatWriter(form(include_usage=True, continuous_usage=True), TOKENIZER))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == [1, 1, 4, 5, 5]  # the first with the role alone
    assert all(chunk["usage"]["prompt_tokens"] == 10 for chunk in chunks if chunk.get("usage"))


def test_a_whole_chat_answer() -> None:
    answer = ChatWriter(form(), TOKENIZER).whole(EVENTS)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer["usage"] == USAGE
    ChatCompletion.model_validate(answer)


def test_completions() -> None:
    chunks = streamed(CompletionWriter(form(), TOKENIZER))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    answer = CompletionWriter(form(), TOKENIZER).whole(EVENTS)
    assert {body["object"] for body in (*chunks, answer)} == {"text_completion"}
    Completion.model_validate(answer)


@pytest.mark.parametrize("writer", [ChatWriter, CompletionWriter])
def test_the_same_events_give_the_same_stream(writer: type[OpenAIWriter]) -> None:
    """Resuming writes a stream again from its start: event n must be event n."""
    assert streamed(writer(form(include_usage=True), TOKENIZER)) == streamed(
        writer(form(include_usage=True), TOKENIZER)
    )
