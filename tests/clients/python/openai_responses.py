"""The openai SDK with responses."""

import json

import openai
from features import *
from pydantic import BaseModel

client = openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0)
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


class City(BaseModel):
    name: str
    population: int


def plain():
    answer = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens > 1


def stream():
    with client.responses.stream(model=SCRIPTED, input=script("plain")) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert final.output_text == text != ""
    assert final.usage.output_tokens > 1


def tools():
    items = [{"role": "user", "content": script("weather")}]
    with client.responses.stream(model=SCRIPTED, input=items, tools=[TOOL]) as events:
        final = events.get_final_response()
    (call,) = final.output
    assert (call.name, json.loads(call.arguments)) == CALLS[0]
    items += [*final.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model=SCRIPTED, input=items, tools=[TOOL]).output_text == "It is sunny in Paris."


def reasoning():
    with client.responses.stream(model=SCRIPTED, input=script("reasoning"), reasoning={"effort": "high"}) as events:
        final = events.get_final_response()
    item = final.output[0]
    assert (item.content[0].text, final.output_text) == REASONING
    assert final.usage.output_tokens_details.reasoning_tokens > 1
    items = [*final.output, {"role": "user", "content": script("plain")}]  # the answer can be sent back
    assert client.responses.create(model=SCRIPTED, input=items).output_text


def parallel():
    with client.responses.stream(model=SCRIPTED, input=script("parallel"), tools=[TOOL]) as events:
        streamed = events.get_final_response()
    whole = client.responses.create(model=SCRIPTED, input=script("parallel"), tools=[TOOL])
    for response in (streamed, whole):
        calls = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert response.output_text == "Two calls."


def structured():
    answer = client.responses.parse(model=SCRIPTED, input=script("city"), text_format=City)
    assert answer.output_parsed.model_dump() == CITY


def abort():
    with client.responses.create(model=SCRIPTED, input=script("long"), stream=True) as events:
        for number, _ in enumerate(events):
            if number == 10:
                break


def call(key, model, prompt, max_tokens):
    other = openai.OpenAI(base_url=OPENAI_URL, api_key=key, max_retries=0)
    other.responses.create(model=model, input=prompt, max_output_tokens=max_tokens)


run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel tools": parallel,
        "structured output": structured,
        "reasoning": reasoning,
        **errors(call),
        "abort": abort,
    }
)
