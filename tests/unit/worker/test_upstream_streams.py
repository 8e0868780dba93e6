"""Unusual but valid streams and usage of providers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_worker.contract.request import RequestOutput, TokenCounts
from inference_worker.contract.upstreams import UpstreamRequest
from inference_worker.worker.relay import sse
from inference_worker.worker.relay.anthropic_stream import AnthropicDecoder
from inference_worker.worker.relay.failures import UpstreamFailed, response_failure
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


def chunk(delta: dict[str, Any] | None = None, reason: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}], **more}


def decode(*events: Any, body: bytes = b"{}") -> list[RequestOutput]:
    """Return the outputs of an OpenAI-compatible stream with these events."""
    decoder = OpenAIDecoder("e", UpstreamRequest("chat", body, 100, 25), 1, 50)
    outputs = [
        output
        for event in (*events, b"[DONE]")
        for output in decoder.decode(event if isinstance(event, bytes) else json.dumps(event).encode())
    ]
    return outputs + decoder.finish()


REASONS = {
    "stop": """stop end_turn eos EOS_TOKEN stop_sequence tool_calls tool_use function_call COMPLETE STOP
        FINISH_REASON_STOP""",
    "length": "length max_tokens MAX_TOKENS model_length max-output-tokens model_context_window_exceeded pause_turn",
    "content_filter": """content_filter sensitive SAFETY RECITATION PROHIBITED_CONTENT ERROR_TOXIC refusal
        guardrail_intervened""",
}
FAILURES = "error network_error insufficient_system_resource abort malformed_function_call OTHER timeout new_reason ?"


@pytest.mark.parametrize(("given", "reason"), [(each, name) for name, text in REASONS.items() for each in text.split()])
def test_documented_finish_reasons_in_both_protocols(given: str, reason: str) -> None:
    assert decode(chunk({"content": "hello"}), chunk(reason=given))[-1].finish_reason == reason
    anthropic = AnthropicDecoder("e", REQUEST, 1, 50)
    for event in ({"type": "message_delta", "delta": {"stop_reason": given}}, {"type": "message_stop"}):
        anthropic.decode(json.dumps(event).encode())
    assert anthropic.finish()[-1].finish_reason == reason


@pytest.mark.parametrize("given", FAILURES.split())
def test_an_answer_with_another_finish_reason_fails(given: str) -> None:
    with pytest.raises(UpstreamFailed, match="ended the answer") as exc_info:
        decode(chunk({"content": "hello"}), chunk(reason=given))
    assert not exc_info.value.is_outage


USAGE = {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70}
HELLO = chunk({"content": "hello"})
CACHED = {"prompt_tokens_details": {"cached_tokens": 30}}


@pytest.mark.parametrize(
    ("events", "counts", "source"),
    [
        ([chunk(usage=USAGE)], (50, 0, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, "prompt_tokens_details": None, "extra": [1]})], (50, 0, 0, 20), "upstream"),
        ([chunk(usage={"prompt_tokens": "50", "completion_tokens": 20.0})], (50, 0, 0, 20), "upstream"),
        ([chunk(usage={"input_tokens": 50, "output_tokens": 20})], (50, 0, 0, 20), "upstream"),
        ([chunk(usage=None)], (25, 0, 0, 2), "estimated"),
        ([chunk(usage="none")], (25, 0, 0, 2), "estimated"),
        ([chunk(usage={"prompt_tokens": None, "completion_tokens": 20})], (25, 0, 0, 20), "estimated"),
        ([chunk(usage={"prompt_tokens": 50})], (50, 0, 0, 2), "estimated"),
        ([chunk(usage={"prompt_tokens": 50, "completion_tokens": 0})], (50, 0, 0, 2), "estimated"),
        ([chunk(usage={"prompt_tokens": 50, "total_tokens": 70})], (50, 0, 0, 20), "upstream"),
        ([chunk(usage=USAGE), chunk(usage=dict.fromkeys(USAGE, 0))], (50, 0, 0, 20), "upstream"),
        ([chunk(usage=USAGE), {"choices": [], "usage": None}], (50, 0, 0, 20), "upstream"),
        ([{"choices": [{"delta": {}, "usage": USAGE}]}], (50, 0, 0, 20), "upstream"),
        ([chunk(x_groq={"usage": USAGE})], (50, 0, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, **CACHED})], (20, 30, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, **CACHED, "total_tokens": 100})], (50, 30, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, "cached_tokens": 30})], (20, 30, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, "prompt_cache_hit_tokens": 30})], (20, 30, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, "cache_read_input_tokens": 30})], (20, 30, 0, 20), "upstream"),
        ([chunk(usage={**USAGE, "cache_creation_input_tokens": 30})], (20, 0, 30, 20), "upstream"),
        ([chunk(usage={**USAGE, "reasoning_tokens": 9, "total_tokens": 79})], (50, 0, 0, 29), "upstream"),
        ([chunk(usage={**USAGE, "reasoning_tokens": 9})], (50, 0, 0, 20), "upstream"),
    ],
)
def test_usage_in_the_forms_of_different_servers(events: list[Any], counts: tuple[int, ...], source: str) -> None:
    last = decode(HELLO, chunk(reason="stop"), *events)[-1]
    assert last.usage == TokenCounts(*counts[:3], output=counts[3])
    assert last.usage_source == source


def call(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return chunk({"tool_calls": [{**more, "function": {"name": name, "arguments": arguments}}]})


ONE_TOOL = json.dumps({"tools": [{"type": "function", "function": {"name": "now"}}]}).encode()


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        ([call("now", "{}", index=0, id="c")], [["now", "{}"]]),
        ([call("now", {"a": 1}, index="0", id=7)], [["now", '{"a":1}']]),
        ([call("", "", index=0, id="c"), call("now", "{}", index=0)], [["now", "{}"]]),
        ([call(None, '{"a"', index=0), call(None, ":1}", index=0), call("now", "", index=0)], [["now", '{"a":1}']]),
        ([call(None, "{}", index=0, id="c")], [["now", "{}"]]),  # the only tool
        ([call("now", "{", id="c"), call(None, "}", id="c")], [["now", "{}"]]),
        ([call("now", "{", index=0, id="c"), call(None, "}", id="c")], [["now", "{}"]]),
        ([call("now", "{"), call(None, "}")], [["now", "{}"]]),
        ([call("now", "{", index=None, id=None), call(None, "}", index=None)], [["now", "{}"]]),
        ([call("a", "{}"), call("b", "{}")], [["a", "{}"], ["b", "{}"]]),
        ([call("a", "{", id="x"), call("b", "{}", id="y"), call(None, "}", id="x")], [["a", "{}"], ["b", "{}"]]),
        ([call("a", "1", index=0, id="x"), call("b", "2", index=0, id="y")], [["a", "1"], ["b", "2"]]),
        ([chunk({"tool_calls": [None, "x"]}), chunk({"tool_calls": {}})], []),
    ],
)
def test_tool_calls_in_the_forms_of_different_servers(parts: list[Any], calls: list[list[str]]) -> None:
    outputs = decode(*parts, chunk(reason="tool_calls"), body=ONE_TOOL)
    found: dict[int, list[str]] = {}
    for part in (part for output in outputs for part in output.calls):
        known = found.setdefault(part.number, ["", ""])
        known[0] += part.name
        known[1] += part.arguments
    assert list(found.values()) == calls


def test_a_call_without_a_name_fails_if_it_can_be_of_several_tools() -> None:
    body = json.dumps({"tools": 2 * [{"function": {"name": "now"}}]}).encode()
    with pytest.raises(UpstreamFailed, match="without a name"):
        decode(call(None, "{}", index=0), chunk(reason="tool_calls"), body=body)


@pytest.mark.parametrize(
    "event",
    [
        b"", b"  ", {"choices": None}, {"choices": []}, {"choices": [{"index": None, "delta": None}]}, {"id": None},
        chunk({"content": None, "refusal": None, "tool_calls": None}), chunk({"content": {}, "reasoning_content": []}),
        {"choices": [{"index": "0", "delta": {}, "finish_reason": 0, "stop_reason": [], "text": 1}]},
    ],
)  # fmt: skip
def test_events_with_unusual_fields_do_not_break_a_stream(event: Any) -> None:
    outputs = decode(HELLO, event, chunk({"content": " you"}, "stop"))
    assert "".join(output.text for output in outputs) == "hello you"


OVERFLOWS: list[tuple[int, Any]] = [
    (400, {"error": {"code": "context_length_exceeded", "message": "The input is 9000 tokens."}}),
    (400, {"error": {"code": 400, "type": "exceed_context_size_error", "message": "9000 tokens are more than 8192"}}),
    (500, {"error": {"code": 500, "type": "exceed_context_size_error", "message": "x"}}),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8"}}),
    (400, {"error": {"message": "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"}}),
    (400, {"object": "error", "message": "This model's maximum context length is 4096 tokens.", "code": 400}),
    (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}),
    (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096", "error_type": "validation"}),
    (422, {"error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000"}),
    (400, [{"error": {"code": 400, "message": "The input token count (9) exceeds the maximum number of tokens (8)"}}]),
    (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081"}),
    (400, {"error": {"message": "Please reduce the length of the messages or completion."}}),
    (400, {"error": {"message": "The prompt is too long: 9000, model maximum context length: 8191"}}),
    (400, {"message": "Input is too long for requested model.", "__type": "ValidationException"}),
    (400, {"error": "This model's maximum prompt length is 131072 but the request contains 140000 tokens."}),
    (400, {"error": {"code": "1261", "message": "Prompt exceeds max length"}}),
    (400, {"code": "InvalidParameter", "message": "Range of input length should be [1, 30720]"}),
    (400, {"error": {"message": "Invalid request: Your request exceeded model token limit: 8192"}}),
    (400, {"error": "Trying to keep the first 5000 tokens when context the overflows."}),
    (400, {"error": {"message": "the request exceeds the available context size"}}),
    (400, {"detail": [{"msg": "Prompt length (9000) exceeds maximum input length (8192)"}]}),
    (413, {"error": {"message": "Request too long"}}),
]
OTHERS: list[tuple[int, Any]] = [
    (400, {"error": {"code": "string_above_max_length", "message": "'tools[0].name' has a maximum length of 64."}}),
    (400, {"error": {"code": "invalid_value", "message": "max_tokens is too large. The model writes at most 8."}}),
    (413, {"error": {"code": "rate_limit_exceeded", "type": "tokens", "message": "Request too long for the minute"}}),
    (429, {"error": {"type": "exceed_context_size_error", "message": "too many tokens per minute"}}),
    (500, {"error": {"message": "failed to allocate the context length"}}),
    (400, "[[[["), (400, {"error": None}), (400, []), (400, {"error": [{"message": {"a": 1}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body"), OVERFLOWS)
def test_a_prompt_that_is_too_long_is_recognized(status: int, body: Any) -> None:
    assert response_failure(status, {}, json.dumps(body).encode()).code == "context_length_exceeded"
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        with pytest.raises(UpstreamFailed) as exc_info:
            decode({"error": body["error"]})
        assert exc_info.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("status", "body"), OTHERS)
def test_other_errors_are_not_taken_for_a_long_prompt(status: int, body: Any) -> None:
    assert response_failure(status, {}, json.dumps(body).encode()).code != "context_length_exceeded"
