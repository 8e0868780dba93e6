"""Every parameter of chat completions and completions with the openai SDK, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.stack import MODEL, Stack

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


class Sdk:
    """The SDK's two clients with one interface. A stream is returned as the list of its chunks."""

    def __init__(self, stack: Stack, kind: str) -> None:
        self.kind = kind
        self._stack = stack

    def chat(self, **options: Any) -> Any:
        return self._call("chat.completions.create", {"messages": FRANCE, "max_tokens": 12, **options})

    def parse(self, **options: Any) -> Any:
        return self._call("chat.completions.parse", {"messages": FRANCE, **options})

    def complete(self, **options: Any) -> Any:
        return self._call("completions.create", {"max_tokens": 6, "temperature": 0, **options})

    def _call(self, method: str, options: dict[str, Any]) -> Any:
        options = {"model": MODEL, **options}
        if self.kind == "sync":
            with self._stack.client() as client:
                answer = _find(client, method)(**options)
                return list(answer) if options.get("stream") else answer
        return asyncio.run(self._call_async(method, options))

    async def _call_async(self, method: str, options: dict[str, Any]) -> Any:
        async with self._stack.async_client() as client:
            answer = await _find(client, method)(**options)
            return [chunk async for chunk in answer] if options.get("stream") else answer


def _find(client: Any, method: str) -> Any:
    for name in method.split("."):
        client = getattr(client, name)
    return client


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.slow)])
def sdk(stack: Stack, request: pytest.FixtureRequest) -> Sdk:
    return Sdk(stack, request.param)


def chat_texts(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def completion_texts(chunks: list[Completion]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_several_choices(sdk: Sdk) -> None:
    options = {"n": 3, "seed": 5, "temperature": 1.0}
    whole: ChatCompletion = sdk.chat(**options)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 3
    chunks = sdk.chat(**options, **USAGE)
    assert chat_texts(chunks) == texts
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # the prompt counts once


@pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
def test_log_probabilities(sdk: Sdk) -> None:
    # In float32, PyTorch computes. Its last bits depend on the rows of a step, so both requests have the same steps:
    # without drafts, whose number depends on the time, and without a cached prefix.
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    options["extra_body"] = {"speculation": "off"}
    choice = sdk.chat(**options, prompt_cache_key=f"whole-{sdk.kind}").choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert entry.token.encode() == bytes(entry.bytes)
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert 0 >= entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    streamed = [
        entry
        for chunk in sdk.chat(**options, prompt_cache_key=f"streamed-{sdk.kind}", stream=True)
        for c in chunk.choices
        if c.logprobs
        for entry in c.logprobs.content
    ]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in content]


def test_penalties_and_logit_bias_change_the_tokens(sdk: Sdk) -> None:
    plain = sdk.chat(temperature=0, logprobs=True, max_tokens=4).choices[0].logprobs.content
    wanted = sdk.complete(prompt="a", logprobs=0, max_tokens=1).choices[0]
    assert wanted.logprobs.tokens == [wanted.text]
    forced = sdk.chat(temperature=0, max_tokens=3, logit_bias={"28": 100}).choices[0].message.content
    assert len(set(forced)) == 1
    with_penalties = sdk.chat(
        max_tokens=4,
        temperature=0,
        presence_penalty=2,
        frequency_penalty=2,
        logprobs=True,
        logit_bias={"28": 100},
        extra_body={"repetition_penalty": 10.0},
    )
    assert with_penalties.choices[0].logprobs.content != plain
    one = {"min_p": 1.0, "top_k": -1, "min_tokens": 4, "priority": 3}
    assert sdk.chat(temperature=2, max_tokens=4, extra_body=one).choices[0].message.content == "".join(
        entry.token for entry in plain
    )


def test_stop_token_ids_and_min_tokens(sdk: Sdk) -> None:
    ended = sdk.chat(temperature=0, extra_body={"stop_token_ids": list(range(30, 60))}, logit_bias={"40": 100})
    assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", "")
    longer = sdk.chat(temperature=0, max_tokens=20, extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens == 20


@pytest.mark.parametrize(("asked", "used"), [("auto", "default"), ("default",) * 2, ("flex",) * 2, ("priority",) * 2])
def test_the_response_names_the_service_tier(sdk: Sdk, asked: Literal["auto"], used: str) -> None:
    assert sdk.chat(service_tier=asked, max_tokens=2).service_tier == used
    assert {chunk.service_tier for chunk in sdk.chat(service_tier=asked, max_tokens=2, stream=True)} == {used}


def test_the_callers_metadata_is_in_the_decision_record(stack: Stack) -> None:
    raw = stack.client().chat.completions.with_raw_response.create(
        model=MODEL,
        messages=FRANCE,
        max_tokens=1,
        metadata={"order": "7"},
        safety_identifier="u-1",  # type: ignore[arg-type]
    )
    why = httpx2.get(f"{stack.url}/v1/requests/{raw.headers['x-request-id']}/decisions", headers=stack.headers).json()
    assert (why["metadata"], why["user"]) == ({"order": "7"}, "u-1")


class Capital(pydantic.BaseModel):
    city: Literal["Paris", "London"]
    sure: bool


def test_output_follows_its_schema(sdk: Sdk) -> None:
    answer = sdk.parse(response_format=Capital, temperature=0, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Capital)
    anything = sdk.chat(response_format={"type": "json_object"}, max_tokens=60, temperature=0).choices[0]
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)
    assert sdk.chat(extra_body={"guided_regex": "(Rome|Oslo)!"}).choices[0].message.content in ("Rome!", "Oslo!")
    grammar = 'start: "yes" | "no"'
    assert sdk.chat(extra_body={"guided_grammar": grammar}).choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_accepted(sdk: Sdk, choice: Any) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    whole = sdk.chat(**options, temperature=0).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "London")

    chunks = sdk.chat(**options, temperature=0, stream=True)
    deltas = [d for chunk in chunks for c in chunk.choices for d in c.delta.tool_calls or ()]
    assert (deltas[0].id.startswith("call_"), deltas[0].function.name) == (True, "get_weather")
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert len(deltas) > 2  # the arguments are streamed
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = sdk.chat(messages=[*FRANCE, whole.message, result], tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_a_model_may_answer_without_calling_a_tool(sdk: Sdk) -> None:
    """SmolLM2 answers with text."""
    plain = sdk.chat(tools=[WEATHER], temperature=0)
    assert plain.choices[0].message.tool_calls is None
    assert "Paris" in plain.choices[0].message.content
    assert chat_texts(sdk.chat(tools=[WEATHER], temperature=0, stream=True)) == {0: plain.choices[0].message.content}


def test_prefixes_with_cache_control_are_written_and_read(sdk: Sdk) -> None:
    mark = {
        "type": "text",
        "text": f"{sdk.kind} rules: " + "be brief, " * 60,
        "prompt_cache_breakpoint": {"mode": "explicit"},
    }
    messages = [{"role": "system", "content": [mark]}, *FRANCE]
    first, second = (sdk.chat(messages=messages, max_tokens=1).usage.prompt_tokens_details for _ in range(2))
    assert first.cached_tokens == 0
    assert first.cache_write_tokens > 100
    assert second.cached_tokens >= first.cache_write_tokens
    assert second.cache_write_tokens == 0


@pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
def test_completions_of_several_prompts(stack: Stack, sdk: Sdk) -> None:
    options = {"prompt": ["One, two, three,", "Monday, Tuesday,"], "n": 2}
    whole: Completion = sdk.complete(**options)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert texts[0] == texts[1] == sdk.complete(prompt="One, two, three,").choices[0].text
    assert texts[2] == texts[3] == sdk.complete(prompt="Monday, Tuesday,").choices[0].text
    chunks = sdk.complete(**options, **USAGE)
    assert completion_texts(chunks) == texts
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24


def test_completions_of_token_ids(sdk: Sdk) -> None:
    answer = sdk.complete(prompt=[[504, 3575, 282], [504]], max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == 4


def test_an_echo_with_log_probabilities(sdk: Sdk) -> None:
    options = {"prompt": ["The capital of France", "One"], "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = sdk.complete(**options)
    for choice, prompt in zip(whole.choices, options["prompt"], strict=True):  # type: ignore[call-overload]
        assert choice.text.startswith(prompt)
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
    assert completion_texts(sdk.complete(**options, stream=True)) == {c.index: c.text for c in whole.choices}


def test_the_log_probabilities_of_a_prompt(sdk: Sdk) -> None:
    prompts = ["The capital of France", "One"]
    echo = sdk.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    found = sdk.complete(prompt=prompts, max_tokens=1, extra_body={"prompt_logprobs": 1})
    for choice, echoed in zip(found.choices, echo.choices, strict=True):
        assert choice.prompt_logprobs[0] is None
        tokens = echoed.logprobs.tokens[1 : len(choice.prompt_logprobs)]
        expected = echoed.logprobs.token_logprobs[1 : len(choice.prompt_logprobs)]
        for ranked, token, logprob in zip(choice.prompt_logprobs[1:], tokens, expected, strict=True):
            (own,) = [each for each in ranked.values() if each["decoded_token"] == token]
            assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert own["rank"] >= 1
    chat = sdk.chat(max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


@pytest.mark.parametrize(("count", "valid"), [(1, "true"), (2, "false")])
def test_an_answer_is_validated_under_keywords_that_cannot_be_enforced(stack: Stack, count: int, valid: str) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": count, "maxItems": count, "uniqueItems": True}
    raw = stack.client().chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Numbers?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
    )
    assert json.loads(raw.parse().choices[0].message.content or "") == [1] * count
    assert raw.headers["x-millrace-ignored"] == "response_format.json_schema.schema.uniqueItems"
    assert raw.headers["x-millrace-schema-valid"] == valid


def test_the_end_and_special_tokens_of_an_output(sdk: Sdk) -> None:
    whole = sdk.complete(prompt="One, two, three,", max_tokens=12, temperature=0).choices[0].text
    stop = whole[3:6]
    options = {"prompt": "One, two, three,", "max_tokens": 12, "temperature": 0, "stop": [stop]}
    ended = sdk.complete(**options, extra_body={"include_stop_str_in_output": True})
    assert ended.choices[0].text == whole[: whole.index(stop) + len(stop)]
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    eos = sdk.chat(temperature=0, logit_bias={"2": 100}, extra_body=shown)
    assert (eos.choices[0].message.content, eos.choices[0].finish_reason) == ("<|im_end|>", "stop")
    assert sdk.chat(temperature=0, logit_bias={"2": 100}).choices[0].message.content == ""


def events_of(response: httpx2.Response) -> Iterator[tuple[str, str]]:
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, line.removeprefix("data: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": ["One, two,", "Monday,", "red, green,"], "n": 2, "logprobs": 1, "echo": False}),
        (
            "chat/completions",
            {"messages": FRANCE, "n": 2, "logprobs": True, "tools": [WEATHER], "tool_choice": "required"},
        ),
    ],
)
def test_streams_with_these_parameters_resume_without_gap_or_repeat(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    options = {"model": MODEL, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, **body}
    with httpx2.stream("POST", f"{stack.url}/v1/{path}", json=options, headers=stack.headers, timeout=60) as response:
        events = list(events_of(response))
        request_id = response.headers["x-request-id"]
    assert events[-1][1] == "[DONE]"
    for had in (None, 0, len(events) // 2, len(events) - 2):
        last = {} if had is None else {"last-event-id": events[had][0]}
        url = f"{stack.url}/v1/streams/{request_id}"
        with httpx2.stream("GET", url, headers=stack.headers | last, timeout=60) as response:
            assert list(events_of(response)) == events[0 if had is None else had + 1 :]


@pytest.mark.parametrize(
    ("options", "code", "param"),
    [
        ({"n": 0}, "invalid_value", "n"),
        ({"logit_bias": {"999999": 1}}, "invalid_value", "logit_bias"),
        ({"extra_body": {"stop_token_ids": [999999]}}, "invalid_value", "stop_token_ids"),
        ({"extra_body": {"guided_regex": "("}}, "invalid_schema", "guided_regex"),
        ({"max_tokens": 5, "extra_body": {"min_tokens": 6}}, "invalid_value", "min_tokens"),
        ({"extra_body": {"audio": {}}}, "unsupported_parameter", "audio"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_invalid_parameter(
    sdk: Sdk, options: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        sdk.chat(**options, stream=stream)
    assert (exc_info.value.code, exc_info.value.param) == (code, param)
