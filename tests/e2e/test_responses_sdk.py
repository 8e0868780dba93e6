"""/v1/responses of the running platform with the unmodified openai SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.support.e2e.websocket import FRANCE
from tests.support.stack import MODEL, Stack

QUESTION = "What is the capital of France?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Sdk:
    """The SDK's two clients with one interface. A stream is returned as the list of its events."""

    def __init__(self, stack: Stack, kind: str) -> None:
        self.kind = kind
        self._stack = stack

    def create(self, **options: Any) -> Any:
        return self.call("create", model=MODEL, **{"input": QUESTION, "temperature": 0, **options})

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self.kind == "sync":
            with self._stack.client() as client:
                answer = getattr(client.responses, method)(*arguments, **options)
                return list(answer) if options.get("stream") else answer
        return asyncio.run(self._call_async(method, *arguments, **options))

    async def _call_async(self, method: str, *arguments: Any, **options: Any) -> Any:
        async with self._stack.async_client() as client:
            answer = await getattr(client.responses, method)(*arguments, **options)
            return [event async for event in answer] if options.get("stream") else answer


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.slow)])
def sdk(stack: Stack, request: pytest.FixtureRequest) -> Sdk:
    return Sdk(stack, request.param)


def test_a_response_contains_the_same_text_as_a_chat_completion(stack: Stack, sdk: Sdk) -> None:
    response: Response = sdk.create(max_output_tokens=20, metadata={"a": "b"})
    with stack.client() as client:
        chat = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=20, temperature=0)  # type: ignore[arg-type]
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.metadata) == ("completed", {"a": "b"})
    assert response.usage is not None and chat.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    event = stack.event("req_" + response.id.removeprefix("resp_"))
    assert (event["input"], event["output"]) == (response.usage.input_tokens, response.usage.output_tokens)


def test_an_incomplete_response_contains_the_reason(sdk: Sdk) -> None:
    response = sdk.create(max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
def test_a_stream_is_numbered_and_resumes_after_any_event(sdk: Sdk) -> None:
    whole, events = sdk.create(), sdk.create(stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    name = events[0].response.id
    for had in (0, 3, len(events) - 2):
        rest = sdk.call("retrieve", name, stream=True, starting_after=had)
        assert rest == events[had + 1 :]
    assert sdk.call("retrieve", name, stream=True) == events


def test_functions_are_called_and_their_outputs_accepted(sdk: Sdk) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    response = sdk.create(input=asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)["place"] in ("Paris", "Rome")) == ("get_weather", True)
    asked += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
    assert sdk.create(input=asked, tools=[WEATHER], max_output_tokens=5).usage.output_tokens > 0


class Answer(BaseModel):
    number: int


def test_output_follows_its_schema(sdk: Sdk) -> None:
    response = sdk.call("parse", model=MODEL, input="Count.", text_format=Answer, max_output_tokens=60, temperature=0)
    assert isinstance(response.output_parsed, Answer)


def test_errors_name_the_invalid_parameter(stack: Stack, sdk: Sdk) -> None:
    for options, param in (
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        with pytest.raises(openai.BadRequestError) as exc_info:
            sdk.create(**options)
        assert exc_info.value.param == param
    with pytest.raises(openai.NotFoundError):
        sdk.call("retrieve", "resp_none", stream=True)
    name = sdk.create(max_output_tokens=1).id
    with pytest.raises(openai.BadRequestError) as exc_info:
        sdk.call("retrieve", name)
    assert exc_info.value.param == "stream"
    response = httpx2.get(f"{stack.url}/v1/responses/{name}?stream=true&starting_after=x", headers=stack.headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "starting_after")
