"""A platform that serves published GGUF files: chats, calls of tools and JSON schemas. Gemma's has no chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.e2e.deployments import publish_prices
from tests.support.engine.real_models import GEMMA, QWEN
from tests.support.models import share_models
from tests.support.stack import Stack, eventually, running_with

pytestmark = pytest.mark.timeout(900)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Return the current time of a time zone.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
MAX_TOKENS = 200
BOTH = pytest.mark.parametrize("name", [GEMMA.name, QWEN.name])
ADA = "Describe Ada Lovelace as JSON."


@pytest.fixture(scope="module")
def platform(
    files: dict[str, Path], converted_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("platform")
    share_models(folder / "state", converted_models)
    models = f"{QWEN.name}={files[QWEN.name]},{GEMMA.name}={files[GEMMA.name]}?quantization=gguf"
    with running_with(folder, MILLRACE_MODELS=models) as stack:
        stack.wait_until_ready()
        publish_prices(stack, GEMMA.name, QWEN.name)
        for name in (GEMMA.name, QWEN.name):
            eventually(lambda name=name: stack.client().completions.create(model=name, prompt="a", max_tokens=1))
        yield stack


@pytest.fixture
def client(platform: Stack) -> openai.OpenAI:
    return platform.client(timeout=300)


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    return client.chat.completions.create(
        model=QWEN.name, messages=messages, max_tokens=MAX_TOKENS, temperature=0, **fields
    ).choices[0]


def test_a_question(client: openai.OpenAI) -> None:
    choice = ask(client, "What is the capital of France? Answer with one word.")
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


@BOTH
def test_a_completion_continues_its_prompt(name: str, client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    choice = client.completions.create(
        model=name, prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert choice.text.startswith(f"{prompt} ")
    assert choice.logprobs is not None
    for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
        assert choice.text[offset:].startswith(token) or token == "<bos>"


@BOTH
def test_a_completion_by_a_schema(name: str, client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model=name, prompt=f"{ADA}\n", max_tokens=MAX_TOKENS, temperature=0, extra_body={"guided_json": PERSON}
    ).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.text), PERSON)


def test_a_chat_by_a_schema(client: openai.OpenAI) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    choice = ask(client, ADA, response_format={"type": "json_schema", "json_schema": schema})
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), PERSON)


def check_call(calls: list[tuple[str, str]], city: str) -> None:
    ((name, arguments),) = calls
    assert name == "get_weather"
    assert city in json.loads(arguments)["city"]


CITIES = ["Paris", "Oslo", "Tokyo"]


@pytest.mark.parametrize("city", CITIES)
@pytest.mark.parametrize("tool_choice", ["auto", "required", "named"])
def test_a_call_of_a_tool(city: str, tool_choice: str, client: openai.OpenAI) -> None:
    """One call, which ends before the length limit, with or without the marks of the format."""
    choice: Any = {"type": "function", "function": {"name": "get_weather"}} if tool_choice == "named" else tool_choice
    text = f"What is the weather in {city}?"
    answer = ask(client, text, tools=[WEATHER, TIME], tool_choice=choice)
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    check_call([(call.function.name, call.function.arguments) for call in answer.message.tool_calls], city)
    chunks = client.chat.completions.create(
        model=QWEN.name,
        messages=[{"role": "user", "content": text}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        tools=[WEATHER, TIME],
        tool_choice=choice,
        stream=True,
    )
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    functions = [part.function for part in parts if part.function is not None]
    name = "".join(function.name or "" for function in functions)
    check_call([(name, "".join(function.arguments or "" for function in functions))], city)


def test_the_result_of_a_tool(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    called = ask(client, "", messages=[question], tools=[WEATHER], tool_choice="required").message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": '{"degrees": 17, "sky": "rain"}'}
    messages = [question, called.to_dict(), result]
    answer = ask(client, "", messages=messages, tools=[WEATHER], tool_choice="none")
    assert "17" in answer.message.content


def test_an_answer_in_json_is_no_call(client: openai.OpenAI) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    choice = ask(
        client,
        ADA,
        tools=[WEATHER],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert not choice.message.tool_calls
    jsonschema.validate(json.loads(choice.message.content), PERSON)
