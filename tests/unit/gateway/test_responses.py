"""OpenAI's Responses dialect: parsing and writing of items."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import ServiceClass, StructuredSpec, TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, ResponseSpec, Tool
from millrace.gateway.protocols.dialects import RESPONSES
from millrace.gateway.protocols.responses.body import ResponseBody, read_response
from millrace.gateway.protocols.responses.writer import ResponsesWriter
from millrace.gateway.protocols.upstreams.images import require_images
from tests.support.gateway.requests import ANY_JSON

TOKENIZER: Any = None  # the output is text
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def read(**fields: Any) -> InferenceRequest:
    return read_response(msgspec.json.encode({"model": "m", "input": "Hello", **fields}))


def test_a_body_is_parsed() -> None:
    request = read(
        instructions="Be brief.",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="u",
        prompt_cache_key="k",
        service_tier="flex",
        stream=True,
        store=False,
        truncation="disabled",
        text={"format": {"type": "json_object"}},
    )
    assert request.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (request.sampling.temperature, request.sampling.top_p, request.max_tokens) == (0.5, 0.9, 7)
    assert (request.metadata, request.user, request.cache_key) == ({"a": "b"}, "u", "k")
    assert (request.service_class, request.stream) == (ServiceClass.FLEX, True)
    assert request.structured == StructuredSpec("json_object", param="text.format")
    assert (request.speculates, read(speculation="auto").speculates, read(speculation="off").speculates) == (1, 1, 0)


def test_items_are_converted_to_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Wind?"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"at": "sea"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "no wind"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"at": "sea"}}}
    request = read(input=items, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wind?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "no wind", "tool_call_id": "c1", "name": "weather"},
    ]
    assert (request.tools, request.tool_choice) == ((Tool("weather", None, {"type": "object"}, True),), "weather")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"tools": [{"type": "functoin"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_errors_name_the_invalid_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as exc_info:
        read(**fields)
    assert (exc_info.value.status, exc_info.value.param) == (400, param)


def test_a_truncated_call_can_be_sent_back_with_its_result() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "y'}
    result = {"type": "function_call_output", "call_id": "c", "output": "invalid"}
    made, answer = read(input=[call, result]).prompt
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "y'}
    assert answer["name"] == "f"


def test_the_fields_of_codex_are_accepted() -> None:
    """As Codex CLI sends them with its first request."""
    request = read(
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
        ],
        tools=[
            WEATHER,
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "mcp__x", "description": "", "tools": [WEATHER]},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        client_metadata={"x-codex-installation-id": "i"},
    )
    assert [message["role"] for message in request.prompt] == ["system", "system", "user"]
    assert [tool.name for tool in request.tools] == ["weather"]
    assert set(request.analysis.ignored) == {
        *("reasoning", "client_metadata", "text.verbosity", "tools[].web_search", "tools[].namespace"),
    }
    assert request.analysis.unknown == ()


def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    request = read(tools=[WEATHER, {**WEATHER, "name": "time"}], tool_choice=choice)
    assert (request.tool_choice, request.allowed_tools) == ("auto", ("weather",))
    assert request.echoed_parameters["tool_choice"] == choice


def test_an_answer_with_a_refusal_can_be_sent_back() -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "!", "annotations": [{"a": 1}]}]
    turn = {"type": "message", "role": "assistant", "content": parts, "phase": "final_answer"}
    assert read(input=[turn, {"type": "message", "role": "assistant", "content": []}]).prompt == [
        {"role": "assistant", "content": "No.!"},
        {"role": "assistant", "content": ""},
    ]


def test_media_are_refused_by_their_kind() -> None:
    with pytest.raises(ApiError, match="This model takes no images"):
        image = {"type": "input_image", "image_url": "data:"}
        require_images(read(input=[{"role": "user", "content": [image]}]), is_supported=False)


def test_references_to_stored_items_are_refused() -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(ApiError, match="Send complete items") as exc_info:
        read(input=items)
    assert exc_info.value.param == "input[1].type"


def test_responses_are_not_stored_and_the_header_names_it() -> None:
    assert read(store=True).analysis.ignored == ("store",)


@given(
    st.dictionaries(st.sampled_from(sorted(field.name for field in msgspec.structs.fields(ResponseBody))), ANY_JSON),
    st.lists(
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "call_id", "output", "name", "arguments"]), ANY_JSON
        )
    ),
)
def test_any_body_is_parsed_or_rejected(fields: dict[str, Any], items: list[Any]) -> None:
    try:
        read(**{"input": items, **fields})
    except ApiError as exc:
        assert exc.status == 400


# Responses.

USAGE = TokenCounts(uncached=1, cache_read=2, cache_write_1h=3, output=4)


def events(text: str, reason: Any = "stop") -> list[AnswerEvent]:
    parts = re.split("( )", text)
    found: list[AnswerEvent] = [Tokens("req_1", 1, seq, [1], part) for seq, part in enumerate(parts)]
    return [*found, End("req_1", 1, len(found), reason, None, USAGE, accepted_drafts=2, rejected_drafts=3)]


def form(**fields: Any) -> ResponseSpec:
    request = read(**fields)
    return ResponseSpec(
        "d",
        "req_1",
        "m",
        123,
        6,
        tools=[tool.name for tool in request.tools],
        echoed_parameters=request.echoed_parameters,
        continuous_usage=request.continuous_usage,
    )


def streamed(answer: list[AnswerEvent], **fields: Any) -> list[Any]:
    writer = ResponsesWriter(form(**fields), TOKENIZER)
    found = [msgspec.json.decode(data) for event in answer for data in writer.stream(event)]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        EVENT.validate_python(event)
    return found


def test_a_response() -> None:
    answer = ResponsesWriter(form(instructions="Be brief.", tools=[WEATHER]), TOKENIZER).build_response(
        events("Good morning")
    )
    (message,) = answer["output"]
    assert message == {
        "id": "msg_1_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Good morning", "annotations": [], "logprobs": []}],
    }
    assert answer["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3},
        "output_tokens": 4,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 2,
            "rejected_prediction_tokens": 3,
        },
        "total_tokens": 10,
    }
    assert (answer["id"], answer["status"], answer["instructions"]) == ("resp_1", "completed", "Be brief.")
    response = Response.model_validate(answer)
    assert (response.output_text, response.tools[0].type) == ("Good morning", "function")


def test_a_stream() -> None:
    found = streamed(events("Good morning"))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert found[2]["item"]["content"] == []
    assert found[-1]["response"] == ResponsesWriter(form(), TOKENIZER).build_response(events("Good morning"))


CALLS = (
    'See.\n<tool_call>\n{"name": "weather", "arguments": {"x": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def test_function_calls() -> None:
    found = streamed(events(CALLS), tools=[WEATHER])
    message, one, two = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "See."
    assert [(c["type"], c["name"], c["arguments"], c["status"]) for c in (one, two)] == [
        ("function_call", "weather", '{"x": [1, 2]}', "completed"),
        ("function_call", "weather", "{}", "completed"),
    ]
    assert one["call_id"] != two["call_id"]
    arguments: dict[int, str] = {}
    for event in found:
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["output_index"]] = arguments.get(event["output_index"], "") + event["delta"]
    assert arguments == {1: one["arguments"], 2: two["arguments"]}
    state: Any = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in found:
        state.handle_event(EVENT.validate_python(event))


def test_a_truncated_response_is_incomplete() -> None:
    last = streamed(events("Good", "length"))[-1]
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_exact_usage_in_every_delta() -> None:
    found = streamed(events("Good morning"), stream=True, stream_options={"continuous_usage_stats": True})
    deltas = [event for event in found if event["type"].endswith(".delta")]
    assert [event["usage"]["output_tokens"] for event in deltas] == [1, 2, 3]
    assert {event["usage"]["input_tokens"] for event in deltas} == {6}
    assert not any("usage" in event for event in streamed(events("Good morning"), stream=True))


def test_an_interrupted_stream_ends_with_the_billed_usage() -> None:
    spec = form(stream=True, stream_options={"continuous_usage_stats": True})
    writer = ResponsesWriter(spec, TOKENIZER)
    sent = [data for event in events("Good morning")[:2] for data in writer.stream(event)]
    (data,) = writer.interrupt("worker_lost", TokenCounts())
    event = msgspec.json.decode(data)
    EVENT.validate_python(event)
    assert (event["type"], event["sequence_number"]) == ("response.failed", len(sent))
    assert event["response"]["usage"]["total_tokens"] == 0


def test_a_response_without_text() -> None:
    last = streamed([End("req_1", 1, 0, "stop", None, USAGE)])[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == ""


def test_an_error_in_a_stream_has_a_sequence_number() -> None:
    event = msgspec.json.decode(RESPONSES.event(ApiError("timeout", "Too long."), "req_1", 7))
    assert event == {"type": "error", "code": "timeout", "message": "Too long.", "param": None, "sequence_number": 7}
    EVENT.validate_python(event)
