"""Strict parsing of request bodies: each parameter is supported, harmless or rejected by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from inference_worker.contract.output_formats import HERMES
from inference_worker.contract.request import SamplingParams, ServiceClass, StructuredSpec
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import MODEL_LENGTH, Breakpoint, InferenceRequest, Prompt, TemplateOptions, Tool
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.protocols.openai.chat import ChatBody, read_chat
from millrace.gateway.protocols.openai.completions import DEFAULT_MAX_TOKENS, read_completion
from millrace.gateway.protocols.openai.parameters import NO_OP
from millrace.gateway.protocols.tools import spec as tool_spec
from millrace.gateway.protocols.unknown_fields import check_unknown
from millrace.gateway.protocols.upstreams.images import require_images
from tests.support.gateway.keys import KEY, MODEL
from tests.support.gateway.requests import ANY_JSON, HELLO, LIKELY, NAMES, called, named, tool


def chat(**fields: Any) -> InferenceRequest:
    return read_chat(msgspec.json.encode({"model": "m", "messages": HELLO, **fields}))


def completion(**fields: Any) -> InferenceRequest:
    return read_completion(msgspec.json.encode({"model": "m", "prompt": "Hello", **fields}))


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        request = chat(**fields)
        check_unknown("reject", request.analysis.unknown)
        require_images(request, is_supported=False)
    assert exc_info.value.status == 400
    return exc_info.value


def test_a_chat_body_is_parsed() -> None:
    request = chat(
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        n=2,
        min_p=0.1,
        min_tokens=3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=2,
        service_tier="flex",
        priority=-3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        prompt_cache_key="k",
        user="u",
        metadata={"a": "b"},
    )
    assert request == InferenceRequest(
        model="m",
        prompt=HELLO,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=-1,
            stop=("a", "b"),
            stop_token_ids=(5,),
            ignore_eos=True,
            n=2,
            min_p=0.1,
            min_tokens=3,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias=((7, -100),),
            logprobs=2,
        ),
        max_tokens=9,
        service_class=ServiceClass.FLEX,
        priority=-3,
        cache_key="k",
        metadata={"a": "b"},
        user="u",
        stream=True,
        include_usage=True,
        continuous_usage=True,
    )


def test_content_can_be_parts_and_developer_is_the_system_role() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}])
    assert request.prompt == [{"role": "system", "content": "Be brief"}, HELLO[0]]


def test_an_sdks_message_object_can_be_sent_back() -> None:
    turn = ChatCompletionMessage(role="assistant", content="Hi", annotations=[]).model_dump()
    assert chat(messages=[*HELLO, turn]).prompt == [*HELLO, {"role": "assistant", "content": "Hi"}]


def test_names_are_passed_to_templates() -> None:
    roles = ("system", "user", "assistant")
    turns = [{"role": role, "content": "Hi", "name": "planner"} for role in roles]
    assert chat(messages=turns).prompt == turns
    developer = chat(messages=[{"role": "developer", "content": "Hi", "name": "planner"}])
    assert developer.prompt == [{"role": "system", "content": "Hi", "name": "planner"}]
    result = {"role": "tool", "content": "42", "tool_call_id": "c", "name": "g"}
    assert chat(messages=[called("{}"), result]).prompt[-1]["name"] == "g"
    nameless: dict[str, Any] = {"role": "user", "content": "Hi", "name": None}
    assert chat(messages=[nameless]).prompt == [{"role": "user", "content": "Hi"}]


def test_an_answer_with_other_vendors_fields_can_be_sent_back() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    call["provider_specific_fields"] = None
    turn = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "function_call": None,
        "reasoning": None,
        "reasoning_content": "Hm.",
        "thinking_blocks": None,
        "provider_specific_fields": {"a": 1},
        "tool_calls": [call],
    }
    request = chat(messages=[*HELLO, turn, {"role": "tool", "content": "42", "tool_call_id": "c"}])
    assert request.analysis.ignored == ()
    assert request.prompt[1]["reasoning_content"] == "Hm."
    assert request.prompt[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_a_refusal_can_be_sent_back() -> None:
    parts = [{"type": "refusal", "refusal": "No."}]
    expected = [{"role": "assistant", "content": "No."}]
    assert chat(messages=[{"role": "assistant", "content": parts}]).prompt == expected
    assert chat(messages=[{"role": "assistant", "content": None, "refusal": "No."}]).prompt == expected
    assert chat(messages=[{"role": "assistant", "content": []}]).prompt == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize("arguments", ["{", '{"x": "y', "[]", "Paris"])
def test_a_truncated_call_can_be_sent_back_with_its_result(arguments: str) -> None:
    result = {"role": "tool", "content": "invalid", "tool_call_id": "c"}
    _, call, answer = chat(messages=[*HELLO, called(arguments), result]).prompt
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert answer["name"] == "f"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "audio"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "files"),
    ],
)
def test_media_are_refused_by_their_kind(part: dict[str, Any], kind: str) -> None:
    api_error = error_of(messages=[{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}])
    assert (api_error.code, api_error.param) == ("unsupported_parameter", "messages[0].content[1].type")
    assert api_error.message == f"This model takes no {kind}. Send text only."


def test_tool_calls_and_results_are_converted_for_templates() -> None:
    result = {"role": "tool", "content": "42", "tool_call_id": "c"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert chat(messages=[*HELLO, called('{"x": [1]}'), result]).prompt == [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "f"},
    ]


def test_tools() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [tool(description="d", parameters=schema, strict=True), tool("g")]
    request = chat(tools=tools, tool_choice=named("g"), parallel_tool_calls=False)
    assert request.tools == (Tool("f", "d", schema, strict=True), Tool("g"))
    assert (request.tool_choice, request.parallel_tools) == ("g", False)
    assert (chat(tools=tools).tool_choice, chat(tools=tools).parallel_tools) == ("auto", True)


def test_functions_are_tools() -> None:
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "42"},
    ]
    request = chat(messages=turns, functions=[{"name": "f"}, {"name": "g"}], function_call={"name": "g"})
    assert (request.tools, request.tool_choice, request.parallel_tools) == ((Tool("f"), Tool("g")), "g", False)
    call, result = request.prompt[1:]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])
    assert error_of(functions=[{"name": "f"}], tools=[tool()]).param == "functions"
    assert error_of(function_call={"name": "f"}).param == "function_call"
    assert error_of(messages=turns[2:]).param == "messages[0].name"


def test_allowed_tools_are_a_subset_of_the_tools() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}
    request = chat(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert [each.name for each in request.tools] == ["f", "g"]  # the prompt contains them all
    assert (request.tool_choice, request.allowed_tools) == ("required", ("g",))
    spec = tool_spec(request, HERMES)
    assert spec is not None
    assert [each["name"] for each in msgspec.json.decode(spec.text)["tools"]] == ["g"]
    for names in ([], ["h"]):
        wrong = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool(name) for name in names]}}
        assert error_of(tools=[tool("f")], tool_choice=wrong).param == "tool_choice"


def test_stream_options_without_a_stream_have_no_effect() -> None:
    assert not chat(stream=False, stream_options={"include_usage": True}).stream


def test_vllms_options_of_the_template() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "I"}]
    request = chat(
        messages=turns,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
        truncate_prompt_tokens=9,
    )
    assert request.template == TemplateOptions(
        continues=True, adds_prompt=False, variables={"enable_thinking": False}, special_tokens=True, max_tokens=9
    )
    assert chat().template == TemplateOptions()
    assert completion(truncate_prompt_tokens=3).template.max_tokens == 3
    assert chat(truncate_prompt_tokens=-1).template.max_tokens == MODEL_LENGTH


def test_sixteen_stop_strings() -> None:
    assert len(chat(stop=["a"] * 16).sampling.stop) == 16


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredSpec("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}},
            StructuredSpec("json_schema", '{"type":"string"}'),
        ),
        ({"guided_regex": "a+"}, StructuredSpec("regex", "a+", "guided_regex")),
        ({"guided_grammar": "start: A"}, StructuredSpec("grammar", "start: A", "guided_grammar")),
        ({"guided_json": {"type": "string"}}, StructuredSpec("json_schema", '{"type":"string"}', "guided_json")),
        ({"guided_json": '{"type": "string"}'}, StructuredSpec("json_schema", '{"type":"string"}', "guided_json")),
        ({"guided_choice": ['"a', "b"]}, StructuredSpec("grammar", 'start: "\\"a" | "b"', "guided_choice")),
        (
            {"structured_outputs": {"choice": ["a"]}},
            StructuredSpec("grammar", 'start: "a"', "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredSpec("json_object", param="structured_outputs.json_object"),
        ),
        ({"structured_outputs": {}}, None),
    ],
)
def test_response_formats(fields: dict[str, Any], spec: StructuredSpec | None) -> None:
    assert chat(**fields).structured == spec


def test_keywords_that_cannot_be_enforced_are_named_unless_the_schema_is_strict() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "array", "uniqueItems": True}}, "not": {"type": "null"}}

    def read(**fields: Any) -> InferenceRequest:
        return chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}})

    request = read()
    assert request.structured is not None
    assert msgspec.json.decode(request.structured.text) == {
        "type": "object",
        "properties": {"not": {"type": "array"}},
    }
    path = "response_format.json_schema.schema"
    assert request.analysis.ignored == (f"{path}.not", f"{path}.uniqueItems")
    strict = read(strict=True)
    assert strict.structured is not None
    assert (msgspec.json.decode(strict.structured.text), strict.analysis.ignored) == (schema, ())


def test_cache_breakpoints() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": "Hel", **mark}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief", **mark}]}]
    messages.append({"role": "user", "content": parts})
    marked = (Breakpoint(3600, messages=1, characters=8), Breakpoint(3600, messages=2, characters=3))
    assert chat(messages=messages).breakpoints == marked
    assert chat(messages=messages, prompt_cache_options={"mode": "explicit"}).breakpoints == marked
    assert chat(messages=messages, prompt_cache_options={"ttl": "30m"}).breakpoints == (
        *marked,
        Breakpoint(3600, messages=2),
    )
    many = [{"type": "text", "text": "x", **mark}] * 6
    assert [b.characters for b in chat(messages=[{"role": "user", "content": many}]).breakpoints] == [3, 4, 5, 6]


@pytest.mark.parametrize("name", sorted(set(NO_OP) | set(ChatBody.__struct_fields__) - {"model", "messages"}))
def test_null_equals_an_absent_parameter(name: str) -> None:
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_OP.items() for value in values])
def test_a_harmless_value_is_accepted(name: str, value: object) -> None:
    asked = completion if name in ChatBody.__struct_fields__ else chat
    assert asked(**{name: value}) == asked()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {}),
        ("best_of", 2),
        ("suffix", "!"),
    ],
)
def test_errors_name_the_unsupported_parameter(name: str, value: object) -> None:
    api_error = error_of(**{name: value})
    assert (api_error.code, api_error.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_cache_retention", "24h"),
        ("store", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
    ],
)
def test_a_hint_is_accepted_and_named(name: str, value: object) -> None:
    request = chat(**{name: value})
    assert (request.analysis.ignored, request.analysis.unknown) == ((name,), ())


def test_a_predicted_output_is_text_or_parts() -> None:
    parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "():"}]
    for content in ("def f():", parts):
        request = chat(prediction={"type": "content", "content": content})
        assert (request.prediction, request.speculates, request.analysis.ignored) == ("def f():", True, ())
    assert chat(prediction=None).prediction == ""
    assert error_of(prediction={"type": "content"}).param == "prediction.content"


def test_speculation_can_be_turned_off() -> None:
    assert chat(speculation="auto").speculates
    assert not chat(speculation="off").speculates
    assert not completion(speculation="off").speculates
    assert error_of(speculation="on").param == "speculation"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"n": True}, "invalid_type", "n"),
        ({"min_tokens": 3, "max_tokens": 2}, "invalid_value", "min_tokens"),
        ({"logit_bias": {"x": 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
        ({"logprobs": 0}, "invalid_type", "logprobs"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"service_tier": "scale"}, "invalid_type", "service_tier"),
        ({"priority": 2**31}, "invalid_value", "priority"),
        ({"tools": [{"type": "functoin", "function": {"name": "f"}}]}, "invalid_type", "tools[0].type"),
        ({"tools": [tool("a b")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool("auto")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "invalid_value", "tools"),
        ({"tools": [tool(parameters="x")]}, "invalid_type", "tools[0].function.parameters"),
        ({"tools": [tool(str(n)) for n in range(129)]}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("g")}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "guided_regex": "a"}, "unsupported_parameter", "guided_regex"),
        ({"guided_grammar": "a", "guided_regex": "a"}, "invalid_value", "guided_grammar"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"structured_outputs": {"form": "a"}}, "unknown_parameter", "structured_outputs.form"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "invalid_value", "structured_outputs.regex"),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"skip_special_tokens": 1}, "invalid_type", "skip_special_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "guided_regex"),
        ({"response_format": {"type": "xml"}}, "invalid_type", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "invalid_type", "prompt_cache_options.ttl"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": "a" * 1025}, "invalid_value", "stop"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"includ": True}}, "unknown_parameter", "stream_options.includ"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"metadata": {str(n): "" for n in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"k" * 65: ""}}, "invalid_value", "metadata"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hello"}, "invalid_type", "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "invalid_type", "messages[0].role"),
        ({"messages": [{"content": ""}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "", "name": 1}]}, "invalid_type", "messages[0].name"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "tool", "content": "", "tool_call_id": "c"}]},
            "invalid_value",
            "messages[0].tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "invalid_type", None),
        ({"model": 5}, "invalid_type", "model"),
    ],
)
def test_errors_name_the_invalid_parameter(fields: dict[str, Any], code: str, param: str | None) -> None:
    api_error = error_of(**fields)
    assert api_error.code == code
    if param is not None:
        assert api_error.param == param
    assert api_error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 100_000])
def test_a_body_that_is_not_a_json_object_is_rejected(body: bytes) -> None:
    with pytest.raises(ApiError) as exc_info:
        read_chat(body)
    assert (exc_info.value.status, exc_info.value.code) == (400, "invalid_json")


def test_an_error_names_a_missing_model() -> None:
    with pytest.raises(ApiError) as exc_info:
        read_chat(b'{"messages": []}')
    assert (exc_info.value.code, exc_info.value.param) == ("missing_required_parameter", "model")


def test_completions_accept_text_or_token_ids() -> None:
    assert completion().prompt == "Hello"
    assert completion(prompt=["Hello"]).prompt == "Hello"
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion().max_tokens == 16
    assert completion(logprobs=0).sampling.logprobs == 0
    echoed = completion(logprobs=3, echo=True)
    assert (echoed.echo, echoed.sampling.logprobs, echoed.sampling.prompt_logprobs) == (True, 3, 3)
    with pytest.raises(ApiError) as several:
        completion(logprobs=3, echo=True, n=2)
    assert several.value.param == "n"
    for prompts in (["a", "b"], [[1], [2, 3]], [[1]]):
        request = completion(prompt=prompts)
        assert [request.prompt, *request.more_prompts] == prompts
    for prompt in ([], [1, "a"], [1, [2]], [["a"]], ["a"] * 65, 5):
        with pytest.raises(ApiError) as caught:
            completion(prompt=prompt)
        assert caught.value.status == 400


@given(st.dictionaries(NAMES, ANY_JSON, max_size=6), st.fixed_dictionaries({}, optional=LIKELY))
@example({}, {"temperature": float("inf")})
def test_any_invalid_body_gets_400(fields: dict[str, Any], likely: dict[str, Any]) -> None:
    for read, own in ((read_chat, {"messages": HELLO}), (read_completion, {"prompt": "Hello"})):
        try:
            read(msgspec.json.encode({"model": "m", **own} | fields | likely))
        except ApiError as exc:
            assert exc.status == 400
            assert set(exc.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "max_tokens", "hides_output"),
    [
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, 1, True),
        ({"max_tokens": 0}, 1, True),
        ({"max_tokens": 1, "echo": True}, 1, False),
        ({}, DEFAULT_MAX_TOKENS, False),
    ],
)
def test_a_completion_may_have_no_tokens(fields: dict[str, Any], max_tokens: int, hides_output: bool) -> None:
    request = completion(**fields)
    assert (request.max_tokens, request.hides_output) == (max_tokens, hides_output)
    admitted = AdmittedRequest(AdmissionRequest("req_1", 0, KEY, request, Prompt([1]), [MODEL]), max_tokens)
    assert InferenceJobBuilder("gw", "secret", 60).make(admitted).hides_output == hides_output


def test_a_completion_cannot_have_less_than_no_tokens() -> None:
    with pytest.raises(ApiError):
        completion(max_tokens=-1)
