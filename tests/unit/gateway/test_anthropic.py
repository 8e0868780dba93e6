"""Anthropic's dialect: parsing of messages, and writing of responses and errors."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.gateway.admission import rates
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from millrace.gateway.core.types import Breakpoint, InferenceRequest, ResponseSpec, Tool
from millrace.gateway.http.consumer import sse
from millrace.gateway.protocols.anthropic.messages import MessagesBody, read_count, read_messages
from millrace.gateway.protocols.anthropic.writer import MessagesWriter
from millrace.gateway.protocols.dialects import ANTHROPIC
from millrace.gateway.protocols.upstreams.images import require_images
from tenants.keys.snapshot import LimitSetSnapshot
from tenants.limits.token_buckets import DAY, MINUTE
from tests.support.gateway.requests import ANY_JSON

TOKENIZER: Any = None  # the output is text
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def read(**fields: Any) -> InferenceRequest:
    return read_messages(msgspec.json.encode({"model": "m", "max_tokens": 5, "messages": HELLO, **fields}))


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        require_images(read(**fields), is_supported=False)
    assert exc_info.value.status == 400
    return exc_info.value


def block(text: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": mark} if mark else {})


def test_a_body_is_parsed() -> None:
    request = read(
        system=[block("Be "), block("brief.")],
        messages=[*HELLO, {"role": "system", "content": "And kind."}],
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        metadata={"user_id": "u"},
        stream=True,
        service_tier="standard_only",
        thinking={"type": "disabled"},
    )
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "And kind."},
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop) == (0.5, 3, 0.9, ("END",))
    assert (request.max_tokens, request.user, request.stream) == (5, "u", True)
    assert (request.speculates, read(speculation="auto").speculates, read(speculation="off").speculates) == (1, 1, 0)
    assert error_of(speculation="on").param == "speculation"


def test_tools_and_their_results() -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [block("I look."), {"type": "tool_use", "id": "t1", "name": "weather", "input": {"at": "sea"}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [block("no "), block("wind")],
                    "is_error": True,
                },
                block("And now?"),
            ],
        },
    ]
    request = read(messages=messages, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"at": "sea"}}}
    assert request.prompt == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "Error: no wind", "tool_call_id": "t1", "name": "weather"},
        {"role": "user", "content": "And now?"},
    ]
    assert request.tools == (Tool("weather", "Tells it", WEATHER["input_schema"]),)  # type: ignore[arg-type]
    assert (request.tool_choice, request.parallel_tools) == ("required", False)
    named = read(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert named.tool_choice == "weather"


def test_the_last_message_of_the_assistant_is_continued() -> None:
    request = read(messages=[*HELLO, {"role": "assistant", "content": "{"}])
    assert request.template.continues
    assert request.prompt[-1] == {"role": "assistant", "content": "{"}
    assert not read().template.continues


def test_thinking_and_empty_answers_in_the_history() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        block("Hi"),
    ]
    turns = [{"role": "assistant", "content": blocks}, *HELLO, {"role": "assistant", "content": []}, *HELLO]
    assert read(messages=[*HELLO, *turns]).prompt == [
        *HELLO,
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},
        *HELLO,
        {"role": "assistant", "content": ""},
        *HELLO,
    ]


def test_hints_and_hosted_tools_are_named() -> None:
    tool = {**WEATHER, "eager_input_streaming": True, "input_examples": [{"at": "sea"}]}
    request = read(
        tools=[tool, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        thread={"type": "create"},
        thinking={"type": "adaptive"},
    )
    assert [tool.name for tool in request.tools] == ["weather"]
    assert request.tools[0].description == 'Tells it\n\nExamples of inputs:\n{"at":"sea"}'
    assert set(request.analysis.ignored) == {
        *("context_management", "output_config.effort", "thinking", "thread", "tools[].web_search_20250305"),
    }
    assert request.analysis.unknown == ()


def test_a_thread_is_not_continued() -> None:
    with pytest.raises(ApiError) as exc_info:
        read(thread={"type": "continue", "previous_message_id": "msg_1"}, messages=[])
    error = exc_info.value
    assert (error.status, error.param) == (404, "thread")
    # The SDK sends all messages again if it finds this detail.
    assert ANTHROPIC.body(error, "req_1")["error"]["details"] == {"error_code": "thread_not_found"}


def test_media_are_refused_by_their_kind() -> None:
    for kind, blocks in (
        ("images", [{"type": "image", "source": {"type": "url", "url": "https://x"}}]),
        ("documents", [{"type": "document", "source": {"type": "url", "url": "https://x"}}]),
    ):
        assert error_of(messages=[{"role": "user", "content": blocks}]).message.startswith(
            f"This model takes no {kind}"
        )
        result = {"type": "tool_result", "tool_use_id": "t1", "content": blocks}
        turns = [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        assert error_of(messages=turns).param == "messages[2].content[0].content[0].type"


def test_images_are_parts_in_their_order() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": source}, {"type": "text", "text": "b"}]
    (message,) = read(messages=[{"role": "user", "content": blocks}]).prompt
    assert message["content"] == "ab"
    assert [part.get("text") or part["url"] for part in message["parts"]] == ["a", "data:image/png;base64,AA==", "b"]


def test_breakpoints_in_the_prompts_order() -> None:
    request = read(
        tools=[{**WEATHER, "cache_control": LONG}],
        system=[block("ab", LONG), block("c")],
        messages=[{"role": "user", "content": [block("Hello", SHORT), block("!")]}],
        cache_control=SHORT,
    )
    assert request.breakpoints == (
        Breakpoint(3600, tools=1),
        Breakpoint(3600, messages=1, characters=2),
        Breakpoint(300, messages=2, characters=5),
        Breakpoint(300, messages=2),
    )


def test_the_last_blocks_cache_control_overrides_the_bodys() -> None:
    marked = [{"role": "user", "content": [block("Hello", SHORT)]}]
    assert read(messages=marked, cache_control=SHORT).breakpoints == (Breakpoint(300, messages=1, characters=5),)
    assert error_of(messages=marked, cache_control=LONG).param == "cache_control"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "input_schema": {}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"type": "costum", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"n": 2}, "n"),
        ({"system": [block("", SHORT)]}, "system[0].cache_control"),
        ({"system": [block("a", SHORT)], "cache_control": LONG}, "cache_control.ttl"),
        ({"system": [block("a", SHORT)] * 5}, "cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"metadata": {"user_id": "u" * 600}}, "metadata.user_id"),
    ],
)
def test_errors_name_the_invalid_parameter(fields: dict[str, Any], param: str) -> None:
    assert error_of(**fields).param == param


def test_count_tokens_accepts_the_parameters_of_a_prompt() -> None:
    body = {"model": "m", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted, asked = read_count(msgspec.json.encode(body)), read(system="Be brief.", tools=[WEATHER])
    assert (counted.prompt, counted.tools, counted.breakpoints) == (asked.prompt, asked.tools, asked.breakpoints)
    with pytest.raises(ApiError):
        read_count(msgspec.json.encode({**body, "max_tokens": 5}))


@given(
    st.dictionaries(st.sampled_from(sorted(field.name for field in msgspec.structs.fields(MessagesBody))), ANY_JSON),
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ANY_JSON}), max_size=3),
)
def test_any_body_is_parsed_or_rejected(fields: dict[str, Any], messages: list[Any]) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": messages or HELLO, **fields}
    for reader in (read_messages, read_count):
        try:
            reader(msgspec.json.encode(body))
        except ApiError as exc:
            assert exc.status in (400, 404)  # 404: a thread that is continued


# Responses.

USAGE = TokenCounts(uncached=1, cache_read=2, cache_write_5m=3, cache_write_1h=4, output=5)
USAGE_JSON = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 7,
    "cache_read_input_tokens": 2,
    "output_tokens": 5,
    "output_tokens_details": {"thinking_tokens": 0},
}


def events(text: str, *, reason: Any = "stop", stop: str | None = None) -> list[AnswerEvent]:
    parts = re.split("( )", text)
    found: list[AnswerEvent] = [Tokens("req_1", 1, seq, [1], part) for seq, part in enumerate(parts)]
    found[0] = msgspec.structs.replace(found[0], prompt=TokenCounts(1, 2, 3, 4))
    return [*found, End("req_1", 1, len(found), reason, stop, USAGE)]


def form(**options: Any) -> ResponseSpec:
    return ResponseSpec("d", "req_1", "m", 123, 10, **options)


def streamed(answer: list[AnswerEvent], **options: Any) -> list[Any]:
    writer = MessagesWriter(form(**options), TOKENIZER)
    found = [msgspec.json.decode(data) for event in answer for data in writer.stream(event)]
    for each in found:
        EVENT.validate_python(each)
    return found


def test_a_message() -> None:
    answer = MessagesWriter(form(), TOKENIZER).build_response(events("Good morning"))
    assert answer == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Good morning"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            **USAGE_JSON,
            "cache_creation": {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 4},
            "service_tier": "standard",
        },
    }
    Message.model_validate(answer, strict=True)


def test_a_stream() -> None:
    first, *rest = streamed(events("Good morning"))
    assert (first["type"], first["message"]["content"], first["message"]["stop_reason"]) == ("message_start", [], None)
    assert first["message"]["usage"]["input_tokens"] == 1
    assert first["message"]["usage"]["cache_creation"] == {
        "ephemeral_5m_input_tokens": 3,
        "ephemeral_1h_input_tokens": 4,
    }
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in ("Good", " ", "morning")
    ]
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE_JSON},
        {"type": "message_stop"},
    ]


CALLS = (
    'See.\n<tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def test_tool_calls_with_and_without_streaming() -> None:
    answer = MessagesWriter(form(tools=["f", "g"]), TOKENIZER).build_response(events(CALLS))
    text, one, two = answer["content"]
    assert (text, answer["stop_reason"]) == ({"type": "text", "text": "See."}, "tool_use")
    assert (one["name"], one["input"], two["name"], two["input"]) == ("f", {"x": [1, 2]}, "g", {})
    assert one["id"].startswith("toolu_")
    Message.model_validate(answer)

    blocks: list[Any] = []
    for event in streamed(events(CALLS), tools=["f", "g"])[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            blocks[-1]["text" if "text" in event["delta"] else "json"] += next(reversed(event["delta"].values()))
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert blocks[0]["text"] == "See."
    assert [(b["id"], msgspec.json.decode(b["json"])) for b in blocks[1:]] == [
        (one["id"], one["input"]),
        (two["id"], two["input"]),
    ]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"reason": "length"}, ("max_tokens", None)),
        ({"stop": "END"}, ("stop_sequence", "END")),
        ({}, ("end_turn", None)),
    ],
)
def test_stop_reasons(end: dict[str, Any], expected: tuple[str, str | None]) -> None:
    answer = MessagesWriter(form(), TOKENIZER).build_response(events("Hi", **end))
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    assert streamed(events("Hi", **end))[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_a_truncated_tool_call_is_omitted() -> None:
    cut = events('<tool_call>{"name": "f", "arguments": {"x', reason="length")
    answer = MessagesWriter(form(tools=["f"]), TOKENIZER).build_response(cut)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert [event["type"] for event in streamed(cut, tools=["f"])][-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_markup_of_a_truncated_call_is_no_text() -> None:
    """A stream and a complete response agree."""
    cut = events("See.\n<tool_call>\n", reason="length")
    answer = MessagesWriter(form(tools=["f"]), TOKENIZER).build_response(cut)
    assert answer["content"] == [{"type": "text", "text": "See."}]
    deltas = [event["delta"] for event in streamed(cut, tools=["f"]) if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "text_delta", "text": "See."}]


def test_exact_usage_in_every_delta() -> None:
    assert read(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    found = streamed(events("Good morning"), continuous_usage=True)
    usages = [event["usage"] for event in found if event["type"] == "content_block_delta"]
    assert [usage["output_tokens"] for usage in usages] == [1, 2, 3]
    assert all({**usage, "output_tokens": 5} == USAGE_JSON for usage in usages)
    message = found[0]["message"]["usage"]
    assert message["output_tokens"] == 1


def test_an_interrupted_stream_ends_with_the_billed_usage() -> None:
    writer = MessagesWriter(form(continuous_usage=True), TOKENIZER)
    writer.stream(events("Good morning")[0])
    (data,) = writer.interrupt("worker_lost", TokenCounts())
    event = msgspec.json.decode(data)
    EVENT.validate_python(event)
    assert (event["type"], event["usage"]["output_tokens"]) == ("message_delta", 0)
    assert msgspec.json.decode(writer.interrupt("cancelled", None)[0])["usage"]["output_tokens"] == 1
    assert MessagesWriter(form(), TOKENIZER).interrupt("cancelled", None) == []


def test_input_tokens_are_0_if_the_whole_prompt_was_read_or_written() -> None:
    """The sum of the three classes is the prompt's length, on which clients rely."""
    for usage in (TokenCounts(cache_read=32, output=1), TokenCounts(cache_write_5m=32, output=1)):
        end: list[AnswerEvent] = [End("req_1", 1, 0, "stop", None, usage)]
        answer = MessagesWriter(form(), TOKENIZER).build_response(end)["usage"]
        assert answer["input_tokens"] == 0
        assert answer["cache_read_input_tokens"] + answer["cache_creation_input_tokens"] == 32


def test_a_message_without_text() -> None:
    nothing: list[AnswerEvent] = [End("req_1", 1, 0, "stop", None, USAGE)]
    assert [event["type"] for event in streamed(nothing)] == ["message_start", "message_delta", "message_stop"]


def test_a_batchs_message_names_its_service_tier() -> None:
    whole = MessagesWriter(form(service_class=ServiceClass.BATCH), TOKENIZER).build_response(events("Hi"))
    assert whole["usage"]["service_tier"] == "batch"


def test_event_names_equal_their_types() -> None:
    assert sse(b'{"type":"ping"}') == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert sse(b"[DONE]") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("code", "status", "type_", "class_"),
    [
        ("invalid_value", 400, "invalid_request_error", anthropic.BadRequestError),
        ("invalid_api_key", 401, "authentication_error", anthropic.AuthenticationError),
        ("budget_exceeded", 402, "billing_error", anthropic.PaymentRequiredError),
        ("credit_balance_exhausted", 402, "billing_error", anthropic.PaymentRequiredError),
        ("model_not_allowed", 403, "permission_error", anthropic.PermissionDeniedError),
        ("model_not_found", 404, "not_found_error", anthropic.NotFoundError),
        ("idempotency_conflict", 409, "conflict_error", anthropic.ConflictError),
        ("request_too_large", 413, "request_too_large", anthropic.RequestTooLargeError),
        ("rate_limit_exceeded", 429, "rate_limit_error", anthropic.RateLimitError),
        ("internal_error", 500, "api_error", anthropic.InternalServerError),
        ("worker_lost", 500, "api_error", anthropic.InternalServerError),
        ("timeout", 504, "timeout_error", anthropic.DeadlineExceededError),
        ("server_is_overloaded", 529, "overloaded_error", anthropic.OverloadedError),
        ("model_loading", 529, "overloaded_error", anthropic.OverloadedError),
    ],
)
def test_errors(code: str, status: int, type_: str, class_: type[Exception]) -> None:
    api_error = ApiError(code, "Because.")
    body = {"type": "error", "error": {"type": type_, "message": "Because."}, "request_id": "req_1"}
    assert (ANTHROPIC.status(api_error), ANTHROPIC.body(api_error, "req_1")) == (status, body)
    client = anthropic.Anthropic(api_key="sk-x")
    request = client._build_request(anthropic._models.FinalRequestOptions(method="get", url="/"))
    response = anthropic._client.httpx2.Response(status, request=request, json=body)
    assert type(client._make_status_error("", body=body, response=response)) is class_


def test_a_prompt_that_is_too_long_has_the_text_that_clients_recognize() -> None:
    body = ANTHROPIC.body(ApiError("context_length_exceeded", "Shorten it."), "req_1")
    assert body["error"]["message"] == "prompt is too long: Shorten it."
    for message in ("100 + 20000 > 200", "input length and `max_tokens` exceed context limit: 100 + 20000 > 200"):
        body = ANTHROPIC.body(ApiError("context_length_exceeded", message, "max_tokens"), "req_1")
        assert body["error"]["message"] == "input length and `max_tokens` exceed context limit: 100 + 20000 > 200"


def test_limits_are_sent_in_anthropics_headers() -> None:
    limits = LimitSetSnapshot(id=1, scope="key")

    def standing(counts: str, limit: int, level: int, period: tuple[int, int] = MINUTE) -> LimitStatus:
        return LimitStatus(LimitCheck("k", 0, 0, limit, 0, period, limits, counts, counts), 0, level * period[0])

    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = [standing("requests", 10, 5), standing("requests", 100, 20, DAY), standing("input", 60, 6)]
    assert dict(rates.anthropic_headers(found, now)) == {
        b"anthropic-ratelimit-requests-limit": b"10",
        b"anthropic-ratelimit-requests-remaining": b"5",
        b"anthropic-ratelimit-requests-reset": b"2026-01-01T00:00:30Z",
        b"anthropic-ratelimit-tokens-limit": b"60",
        b"anthropic-ratelimit-tokens-remaining": b"54",
        b"anthropic-ratelimit-tokens-reset": b"2026-01-01T00:00:06Z",
        b"anthropic-ratelimit-input-tokens-limit": b"60",
        b"anthropic-ratelimit-input-tokens-remaining": b"54",
        b"anthropic-ratelimit-input-tokens-reset": b"2026-01-01T00:00:06Z",
    }
