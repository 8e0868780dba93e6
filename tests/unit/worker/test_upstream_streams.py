"""Unusual but valid streams and usage of providers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_worker.contract.request import RequestOutput, TokenCounts
from inference_worker.contract.upstreams import UpstreamRequest
from inference_worker.worker.relay import sse
from inference_worker.worker.relay.anthropic_stream import AnthropicDecoder
from inference_worker.worker.relay.failures import UpstreamFailed
from inference_worker.worker.relay.openai_stream import OpenAIDecoder

REQUEST = UpstreamRequest("messages", b"{}", 100, 25)
HOUR = {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 30}
FIRST = {"input_tokens": 5, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 40, "cache_creation": HOUR}
TOTALS = {"input_tokens": 5, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 40}


@pytest.mark.parametrize("final", [{}, {"input_tokens": 5}, TOTALS])
def test_repeated_prompt_totals_keep_the_classes_that_they_do_not_name(final: dict[str, int]) -> None:
    decoder = AnthropicDecoder("e", REQUEST, 1, 50)
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"usage": {**FIRST, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {**final, "output_tokens": 9}},
        {"type": "message_stop"},
    ]
    for event in events:
        decoder.decode(json.dumps(event).encode())
    assert decoder.usage() == (TokenCounts(5, 7, 10, 30, output=9), "upstream")


def test_a_stream_whose_finish_reason_is_empty_is_not_complete() -> None:
    decoder = OpenAIDecoder("e", REQUEST, 1, 50)
    decoder.decode(b'{"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": ""}]}')
    with pytest.raises(UpstreamFailed, match="before the answer was complete"):
        decoder.finish()


def test_parallel_calls_with_one_index_are_separate() -> None:
    decoder = OpenAIDecoder("e", REQUEST, 1, 50)
    calls = []
    for number in range(2):
        call = {"index": 0, "id": f"c{number}", "function": {"name": f"f{number}", "arguments": "{"}}
        for each in (call, {"index": 0, "function": {"arguments": "}"}}):
            outputs: list[RequestOutput] = decoder.decode(
                json.dumps({"choices": [{"delta": {"tool_calls": [each]}}]}).encode()
            )
            calls += [(part.number, part.name, part.arguments) for output in outputs for part in output.calls]
    assert calls == [(0, "f0", "{"), (0, "", "}"), (1, "f1", "{"), (1, "", "}")]


@pytest.mark.parametrize("part", [b"data:\n", b"data: x\n", b"x"])
def test_the_size_of_an_event_is_limited(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = sse.EventParser()
    assert parser.feed(b"data: y\n\n" * 1000) == [b"y"] * 1000
    with pytest.raises(UpstreamFailed, match="too large"):
        for _ in range(1001):
            parser.feed(part)
