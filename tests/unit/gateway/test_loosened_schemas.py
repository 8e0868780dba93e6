"""Schemas that are enforced in part, in each dialect: what is named, enforced, validated and reported."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.output_formats import HERMES
from inference_worker.contract.request import TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import upstream_model
from millrace.gateway.core.types import CheckedSchemas, InferenceRequest, ResponseSpec
from millrace.gateway.protocols.answer_validity import CheckedEnd, checked_events
from millrace.gateway.protocols.dialect_readers import READERS
from millrace.gateway.protocols.openai import completions
from millrace.gateway.protocols.prompts import tokenize_here
from millrace.gateway.protocols.tools import UPSTREAM_CALLS, spec
from millrace.gateway.protocols.unknown_fields import MAX_CHECKED_CHARACTERS, MAX_NAMED
from millrace.gateway.protocols.writers import make_writer
from tests.support.gateway.inference_requests import read_for_upstream

INT64 = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**63 - 1}}, "required": ["n"]}
LOOSE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GOOD = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "openai.chat", completions.DIALECT
RESPONSES, MESSAGES = "openai.responses", "anthropic.messages"


def body_of(reader: str, **fields: Any) -> bytes:
    prompt: dict[str, Any] = {"messages": HELLO}
    if reader == RESPONSES:
        prompt = {"input": "Hello"}
    elif reader == COMPLETIONS:
        prompt = {"prompt": "Hello"}
    elif reader == MESSAGES:
        prompt["max_tokens"] = 9
    return json.dumps({"model": "m", **prompt, **fields}).encode()


def read(reader: str, **fields: Any) -> InferenceRequest:
    return READERS[reader](body_of(reader, **fields))


def tool(reader: str, name: str, schema: Any, **fields: Any) -> dict[str, Any]:
    if reader == MESSAGES:
        return {"name": name, "input_schema": schema, **fields}
    function = {"name": name, "parameters": schema, **fields}
    return {"type": "function", **function} if reader == RESPONSES else {"type": "function", "function": function}


def chat_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}}


def text_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, **fields}}}


FORMATS = [
    (CHAT, chat_format(INT64), "response_format.json_schema.schema.maximum"),
    (CHAT, chat_format(INT64, strict=False), "response_format.json_schema.schema.maximum"),
    ("openai.realtime", chat_format(INT64), "response_format.json_schema.schema.maximum"),
    (RESPONSES, text_format(INT64), "text.format.schema.maximum"),
    (CHAT, {"guided_json": INT64}, "guided_json.maximum"),
    (CHAT, {"guided_json": json.dumps(INT64)}, "guided_json.maximum"),
    (CHAT, {"structured_outputs": {"json": INT64}}, "structured_outputs.json.maximum"),
    (COMPLETIONS, {"guided_json": INT64}, "guided_json.maximum"),
]


@pytest.mark.parametrize(("reader", "fields", "name"), FORMATS)
def test_a_format_that_is_not_strict_is_loosened(reader: str, fields: dict[str, Any], name: str) -> None:
    request = read(reader, **fields)
    assert request.analysis.ignored == (name,)
    assert request.structured is not None
    assert json.loads(request.structured.text) == LOOSE
    assert request.analysis.checked == CheckedSchemas(json.dumps(INT64, separators=(",", ":")))


@pytest.mark.parametrize(
    ("reader", "fields"),
    [
        (CHAT, chat_format(INT64, strict=True)),
        (RESPONSES, text_format(INT64, strict=True)),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": INT64}}}),
    ],
)
def test_a_strict_format_is_unchanged(reader: str, fields: dict[str, Any]) -> None:
    request = read(reader, **fields)
    assert (request.analysis.ignored, request.analysis.checked) == ((), None)  # the worker refuses it
    assert request.structured is not None
    assert json.loads(request.structured.text) == INT64


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (CHAT, "tools[].function.parameters.maximum"),
        (RESPONSES, "tools[].parameters.maximum"),
        (MESSAGES, "tools[].input_schema.maximum"),
    ],
)
def test_one_odd_tool_leaves_the_others_enforced(reader: str, name: str) -> None:
    tools = [
        tool(reader, "good", GOOD),
        tool(reader, "odd", INT64),
        tool(reader, "strict", INT64, strict=True),
    ]
    request = read(reader, tools=tools)
    assert request.analysis.ignored == (name,)
    assert [each.parameters for each in request.tools] == [GOOD, INT64, INT64]  # as the prompt describes them
    structured = spec(request, HERMES)
    assert structured is not None
    assert [each["parameters"] for each in json.loads(structured.text)["tools"]] == [GOOD, LOOSE, INT64]
    assert request.analysis.checked is not None
    assert (request.analysis.checked.answer, list(request.analysis.checked.tools)) == (None, ["odd"])


def test_names_are_counted_and_large_schemas_are_not_kept() -> None:
    keywords = ("if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems", "contentEncoding")
    odd: dict[str, Any] = {key: {} for key in (*keywords, "dependentRequired", "dependentSchemas", "propertyNames")}
    large = {**INT64, "title": "x" * MAX_CHECKED_CHARACTERS}
    request = read(CHAT, **chat_format(odd), tools=[tool(CHAT, "a", {**INT64, **odd}), tool(CHAT, "b", large)])
    assert len(request.analysis.ignored) == MAX_NAMED + 1
    assert request.analysis.ignored[-1] == "+5"
    assert request.analysis.checked is not None
    assert request.analysis.checked.tools["b"] == ""


@pytest.mark.parametrize(
    ("engine", "reader", "fields", "ignored"),
    [
        (UpstreamEngine.OPENAI, CHAT, chat_format(INT64), ()),
        (UpstreamEngine.OPENAI, CHAT, {"tools": [tool(CHAT, "odd", INT64)]}, ()),
        (UpstreamEngine.OPENAI, RESPONSES, text_format(INT64), ()),
        (UpstreamEngine.ANTHROPIC, MESSAGES, {"tools": [tool(MESSAGES, "odd", INT64)]}, ()),
        (UpstreamEngine.ANTHROPIC, CHAT, chat_format(INT64), ("response_format.json_schema.schema.maximum",)),
    ],
)
def test_an_upstream_receives_the_schema(engine: Any, reader: str, fields: Any, ignored: Any) -> None:
    body = body_of(reader, **fields)
    request = read_for_upstream(reader, body)
    model = upstream_model("m", "", UpstreamSpec(engine, "https://api.example.com/v1", "m", context_length=10_000))
    prompt = tokenize_here(model, request)
    assert prompt.ignored == ignored
    assert prompt.upstream is not None
    assert (str(2**63 - 1).encode() in prompt.upstream.body) is not bool(ignored)


# The result of the validation.

WHOLE = json.dumps(INT64)
CALL = '<tool_call>\n{{"name": "odd", "arguments": {}}}\n</tool_call>'
GOOD_CALL, ODD_CALL = CALL.format('{"n": 5}'), CALL.format('{"n": "x"}')


def events_of(text: str, reason: Any = "stop") -> list[AnswerEvent]:
    half = len(text) // 2
    return [
        Tokens("req_1", 1, 0, [1], text[:half], prompt=TokenCounts(uncached=2)),
        Tokens("req_1", 1, 1, [2], text[half:]),
        End("req_1", 1, 2, reason, None, TokenCounts(uncached=2, output=2)),
    ]


def checked(response_spec: ResponseSpec, events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    async def iter_events() -> AsyncIterator[AnswerEvent]:
        for event in events:
            yield event

    async def get_spec() -> ResponseSpec:
        return response_spec

    async def collect() -> list[AnswerEvent]:
        return [event async for event in checked_events(iter_events(), get_spec)]

    return asyncio.run(collect())


def result(schemas: CheckedSchemas | None, events: Sequence[AnswerEvent], **fields: Any) -> bool | None:
    end = checked(ResponseSpec("openai.chat", "req_1", "m", 1, 2, checked=schemas, **fields), events)[-1]
    return end.schema_valid if isinstance(end, CheckedEnd) else None


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ('{"n": 5}', "stop", True),
        ('{"n": 9223372036854775808}', "stop", False),
        ('{"n": 5', "length", False),
        ("Hello", "stop", False),
    ],
)
def test_an_answer_is_validated_under_the_whole_schema(text: str, reason: str, expected: bool) -> None:
    assert result(CheckedSchemas(WHOLE), events_of(text, reason)) is expected
    assert result(None, events_of(text, reason)) is None
    assert result(CheckedSchemas(""), events_of(text, reason)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD_CALL, True),
        (CALL.format('{"n": 9223372036854775808}'), False),
        (f"{GOOD_CALL}\n{ODD_CALL}", False),
        ("Hello", True),  # no call, so nothing is wrong
    ],
)
def test_the_arguments_of_calls_are_validated(text: str, expected: bool) -> None:
    schemas = CheckedSchemas(None, {"odd": WHOLE})
    assert result(schemas, events_of(text), tools=["odd", "good"]) is expected


def test_calls_of_an_upstream_and_every_choice_are_validated() -> None:
    calls = [ToolCallDelta(0, "odd", '{"n": '), ToolCallDelta(0, "", "9223372036854775808}")]
    events = [Tokens("req_1", 1, 0, [], "", calls=calls), events_of("")[-1]]
    schemas = CheckedSchemas(None, {"odd": WHOLE})
    assert result(schemas, events, tools=["odd"], tool_format=UPSTREAM_CALLS) is False
    second = [Tokens("req_1", 1, 0, [1], text, index=index) for index, text in enumerate(['{"n": 1}', "{}"])]
    assert result(CheckedSchemas(WHOLE), [*second, events_of("")[-1]], n=2) is False
    assert result(CheckedSchemas(WHOLE), [*second[:1], events_of("")[-1]]) is True


@pytest.mark.parametrize("dialect", ["openai.chat", COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("valid", [True, False])
def test_each_dialect_reports_the_result_once(dialect: str, valid: bool) -> None:
    text = json.dumps({"n": 5 if valid else 2**63})
    tokenizer: Any = None
    for usage in (False, True):
        given = ResponseSpec(dialect, "req_1", "m", 1, 2, include_usage=usage, checked=CheckedSchemas(WHOLE))
        events = checked(given, events_of(text))
        assert make_writer(given, tokenizer).build_response(events)["schema_valid"] is valid
        writer = make_writer(given, tokenizer)
        chunks = [json.loads(data) for event in events for data in writer.stream(event) if data != b"[DONE]"]
        found = [chunk.get("schema_valid", chunk.get("response", {}).get("schema_valid")) for chunk in chunks]
        place = -2 if dialect == MESSAGES else -1  # message_stop has no fields
        assert found.pop(place) is valid
        assert set(found) == {None}
        plain = make_writer(given, tokenizer)
        unchecked = [data for event in events_of(text) for data in plain.stream(event)]
        assert b"schema_valid" not in b"".join(unchecked)
        assert len(unchecked) == len(chunks) + (dialect in (CHAT, COMPLETIONS))
