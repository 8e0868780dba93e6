"""Unknown fields of request bodies: dropped and named, refused as typos, or rejected by the tenant's setting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.contract.spelling import edit_distance
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.anthropic.messages import read_messages
from millrace.gateway.protocols.dialect_readers import READERS
from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.prompts import tokenize_here
from millrace.gateway.protocols.responses.body import read_response
from millrace.gateway.protocols.unknown_fields import MAX_COUNTED, MAX_NAMED, check_unknown
from tests.support.gateway.inference_requests import read_for_upstream
from tests.support.gateway.requests import BODIES, ENCODERS, HELLO, tool


def chat(**fields: Any) -> InferenceRequest:
    return read_chat(msgspec.json.encode({"model": "m", "messages": HELLO, **fields}))


def test_unknown_fields_are_dropped_and_named_by_their_path() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hello", "mark": 1}], "mood": "good"}] * 2
    request = chat(messages=turns, tools=[{**tool(), "icon": "x"}], flavor={"a": 1}, nothing=None)
    assert request.prompt == [{"role": "user", "content": "Hello"}] * 2
    assert set(request.analysis.ignored) == {"flavor", "messages[].mood", "messages[].content[].mark", "tools[].icon"}
    assert set(request.analysis.unknown) == set(request.analysis.ignored)
    assert chat().analysis.ignored == ()


def test_an_unknown_field_that_is_null_is_not_named() -> None:
    assert chat(messages=[{**HELLO[0], "mood": None}], flavor=None).analysis.ignored == ()


def test_a_hint_without_effect_is_named_and_not_unknown() -> None:
    request = chat(store=True, reasoning_effort="high")
    assert (request.analysis.ignored, request.analysis.unknown) == (("store", "reasoning_effort"), ())


@pytest.mark.parametrize(
    ("read", "body", "name"),
    [
        (read_chat, {"messages": HELLO}, "max_completion_token"),
        (read_chat, {"messages": HELLO}, "temprature"),
        (read_chat, {"messages": HELLO}, "steram"),
        (read_chat, {"messages": HELLO}, "top_log_probs"),
        (read_messages, {"messages": HELLO, "max_tokens": 5}, "stop_sequence"),
        (read_response, {"input": "Hello"}, "max_output_token"),
    ],
)
def test_a_probable_typo_is_refused(read: Any, body: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as exc_info:
        read(msgspec.json.encode({"model": "m", **body, name: 1}))
    assert (exc_info.value.code, exc_info.value.param) == ("unknown_parameter", name)
    assert "Did you mean" in exc_info.value.message


@pytest.mark.parametrize("name", ["max_x", "sto", "steramm", "temp", "thread", "client_metadata"])
def test_other_unknown_names_are_no_typos(name: str) -> None:
    assert chat(**{name: 1}).analysis.ignored == (name,)


def test_formats_stay_strict() -> None:
    for response_format in (
        {"type": "json_object", "mode": "x"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "mode": "x"}},
    ):
        with pytest.raises(ApiError) as exc_info:
            chat(response_format=response_format)
        assert exc_info.value.code == "unknown_parameter"


def test_the_switch() -> None:
    request = chat(flavor=1, messages=[{**HELLO[0], "mood": "good"}])
    check_unknown("warn", request.analysis.unknown)
    with pytest.raises(ApiError) as exc_info:
        check_unknown("reject", request.analysis.unknown)
    assert (exc_info.value.status, exc_info.value.param) == (400, "flavor")
    check_unknown("reject", chat(store=True).analysis.unknown)


def test_names_are_bounded_and_fit_a_header() -> None:
    many = chat(messages=[{**HELLO[0], **{f"x{number}\r\n": 1 for number in range(500)}}])
    assert len(many.analysis.ignored) == MAX_NAMED + 1
    assert many.analysis.ignored[-1] == f"+{MAX_COUNTED - MAX_NAMED}"
    assert chat(**{"ü" * 500: 1}).analysis.ignored == ("?" * 80,)
    with pytest.raises(ApiError):
        chat(**{f"unknown{number}": 1 for number in range(33)})


def test_a_whole_float_is_an_integer() -> None:
    assert chat(max_tokens=4.0, tools=[tool()]).max_tokens == 4


@given(st.text(max_size=8), st.text(max_size=8))
def test_edit_distance(first: str, second: str) -> None:
    found = edit_distance(first, second)
    assert found == edit_distance(second, first)
    assert (found == 0) == (first == second)
    assert abs(len(first) - len(second)) <= found <= max(len(first), len(second))


HINTS: dict[str, dict[str, list[Any]]] = {
    "openai.chat": {
        "web_search_options": [{}, {"search_context_size": "low"}],
        "verbosity": ["low", 1],
        "store": [True],
    },
    "openai.completion": {"prompt_cache_options": [{"mode": "explicit"}], "web_search_options": [{}]},
    "openai.responses": {
        "truncation": ["auto", 1, {"type": "auto"}],
        "context_management": [[{"type": "compaction", "compact_threshold": 1}], {"edits": []}],
        "max_tool_calls": [1, "x"],
        "prompt_cache_options": [{"mode": "explicit"}, True],
    },
    "anthropic.messages": {
        "diagnostics": [{}, {"previous_message_id": None}, True],
        "speed": ["fast", 2],
        "container": ["container_1", {"skills": []}],
        "mcp_servers": [[{"type": "url", "url": "https://a.example", "name": "a"}]],
        "context_management": [{"edits": [{"type": "x"}]}, 1],
    },
}


@pytest.mark.parametrize("dialect", HINTS)
def test_a_hint_is_accepted_with_every_value_and_named(dialect: str) -> None:
    for name, values in HINTS[dialect].items():
        for value in values:
            request = READERS[dialect](msgspec.json.encode({"model": "m", **BODIES[dialect], name: value}))
            assert (request.analysis.ignored, request.analysis.unknown) == ((name,), ()), (name, value)


@pytest.mark.parametrize("dialect", [*BODIES, *ENCODERS])
def test_a_name_that_another_server_documents_is_no_typo(dialect: str) -> None:
    for name in ("images", "inputs", "mode", "models", "speculative", "top_a"):
        body = {"model": "m", **BODIES.get(dialect, {}), **ENCODERS.get(dialect, {}), name: [1]}
        assert READERS[dialect](msgspec.json.encode(body)).analysis.ignored == (name,)


def test_padding_of_events_is_a_hint() -> None:
    for dialect in ("openai.chat", "openai.completion", "openai.responses"):
        fields = {"stream": True, "stream_options": {"include_obfuscation": True}}
        request = READERS[dialect](msgspec.json.encode({"model": "m", **BODIES[dialect], **fields}))
        assert request.analysis.ignored == ("stream_options.include_obfuscation",)


def test_a_place_is_a_demand() -> None:
    for dialect in BODIES:
        with pytest.raises(ApiError) as exc_info:
            READERS[dialect](msgspec.json.encode({"model": "m", **BODIES[dialect], "inference_geo": "eu"}))
        assert (exc_info.value.status, exc_info.value.param) == (400, "inference_geo")


def test_speed_is_refused_for_an_upstream() -> None:
    body = msgspec.json.encode({"model": "m", **BODIES["anthropic.messages"], "speed": "fast"})
    request = read_for_upstream("anthropic.messages", body)
    upstream = upstream_model("m", "", UpstreamSpec(UpstreamEngine.ANTHROPIC, "https://a.example", "m", "anthropic"))
    with pytest.raises(ApiError) as exc_info:
        tokenize_here(upstream, request)
    assert exc_info.value.param == "speed"
