"""Bodies are read strictly: supported, harmless, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.engine.request import SamplingParams
from millrace.gateway.errors import ApiError
from millrace.gateway.forms import InferenceRequest
from millrace.gateway.openai.chat import ChatBody, read_chat
from millrace.gateway.openai.completions import read_completion
from millrace.gateway.openai.parameters import NO_OP

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> InferenceRequest:
    return read_chat(msgspec.json.encode({"model": "m", "messages": HELLO, **fields}))


def completion(**fields: Any) -> InferenceRequest:
    return read_completion(msgspec.json.encode({"model": "m", "prompt": "Hello", **fields}))


def fault_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_it_works() -> None:
    request = chat(
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
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
            temperature=0.5, top_p=0.9, top_k=40, seed=2**63 - 1, stop=("a", "b"), stop_token_ids=(5,), ignore_eos=True
        ),
        max_tokens=9,
        cache_key="k",
        stream=True,
        include_usage=True,
        continuous_usage=True,
    )


def test_content_may_be_parts_and_the_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}])
    assert request.prompt == [{"role": "system", "content": "Be brief"}, HELLO[0]]


def test_an_answer_can_be_sent_back_as_the_sdk_had_it() -> None:
    turn = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}
    assert chat(messages=[*HELLO, turn]).prompt == [*HELLO, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize("name", sorted(set(NO_OP) | set(ChatBody.__struct_fields__) - {"model", "messages"}))
def test_null_is_as_good_as_absent(name: str) -> None:
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_OP.items() for value in values])
def test_a_harmless_value_is_accepted(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs", True),
        ("logprobs", 0),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 1}),
        ("presence_penalty", 0.1),
        ("service_tier", "flex"),
        ("audio", {}),
        ("guided_regex", "a+"),
        ("min_p", 0.1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    fault = fault_of(**{name: value})
    assert (fault.code, fault.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_p": 1.01}, "invalid_value", "top_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"stop": list("abcde")}, "invalid_value", "stop"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": "a" * 257}, "invalid_value", "stop"),
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
        ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "unknown_parameter", "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_type", None),
        ({"model": 5}, "invalid_type", "model"),
    ],
)
def test_a_fault_names_its_parameter(fields: dict[str, Any], code: str, param: str | None) -> None:
    fault = fault_of(**fields)
    assert fault.code == code
    if param is not None:
        assert fault.param == param
    assert fault.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(b'{"messages": []}')
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "model")


def test_completions_take_text_or_ids() -> None:
    assert completion().prompt == "Hello"
    assert completion(prompt=["Hello"]).prompt == "Hello"
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion().max_tokens == 16
    for prompt in ([], ["a", "b"], [1, "a"], [[1]], 5):
        with pytest.raises(ApiError) as caught:
            completion(prompt=prompt)
        assert caught.value.status == 400


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(sorted({*NO_OP, *ChatBody.__struct_fields__})) | st.text(max_size=8)


@given(st.dictionaries(_names, _json, max_size=6))
def test_nothing_but_a_400_comes_of_nonsense(fields: dict[str, Any]) -> None:
    for read in (read_chat, read_completion):
        try:
            read(msgspec.json.encode({"model": "m", "messages": HELLO} | fields))
        except ApiError as fault:
            assert fault.status == 400
            assert set(fault.body()["error"]) == {"message", "type", "param", "code"}
