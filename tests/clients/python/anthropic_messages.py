"""The anthropic SDK."""

import anthropic
from anthropic import beta_tool
from features import *
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}


class City(BaseModel):
    name: str
    population: int


@beta_tool
def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: a city.
    """
    return f"sunny in {city}"


def user(text):
    return [{"role": "user", "content": text}]


def plain():
    message = client.messages.create(model=MODEL, messages=user(HELLO), max_tokens=8)
    assert message.content[0].text
    assert message.usage.output_tokens == 8


def stream():
    with client.messages.stream(model=MODEL, messages=user(HELLO), max_tokens=8) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert message.content[0].text == text != ""
    assert (message.usage.output_tokens, message.stop_reason) == (8, "max_tokens")


def reasoning():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    options = {"model": SCRIPTED, "max_tokens": 2000, "thinking": thinking}
    with client.messages.stream(messages=user(script("reasoning")), **options) as events:
        message = events.get_final_message()
    assert (message.content[0].thinking, message.content[1].text) == REASONING
    assert message.usage.output_tokens_details.thinking_tokens > 1
    messages = [{"role": "assistant", "content": message.content}, *user(script("plain"))]
    assert client.messages.create(messages=user("Hello") + messages, **options).content[0].text


def tools():
    messages = user(script("weather"))
    with client.messages.stream(model=SCRIPTED, messages=messages, tools=[TOOL], max_tokens=100) as events:
        message = events.get_final_message()
    (call,) = message.content
    assert (call.name, call.input) == CALLS[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=SCRIPTED, messages=messages, tools=[TOOL], max_tokens=100)
    assert answer.content[0].text == "It is sunny in Paris."
    runner = client.beta.messages.tool_runner(
        model=SCRIPTED, messages=user(script("weather")), tools=[get_weather], max_tokens=100
    )
    assert runner.until_done().content[0].text == "It is sunny in Paris."


def parallel():
    options = {"model": SCRIPTED, "messages": user(script("parallel")), "tools": [TOOL], "max_tokens": 200}
    with client.messages.stream(**options) as events:
        streamed = events.get_final_message()
    for message in (streamed, client.messages.create(**options)):
        text, *calls = message.content
        assert text.text == "Two calls."
        assert [(call.name, call.input) for call in calls] == CALLS


def structured():
    answer = client.messages.parse(model=SCRIPTED, messages=user(script("city")), output_format=City, max_tokens=100)
    assert answer.parsed_output.model_dump() == CITY


def abort():
    options = {"model": SCRIPTED, "messages": user(script("long")), "max_tokens": 4000}
    with client.messages.stream(**options) as events:
        for number, _ in enumerate(events.text_stream):
            if number == 5:
                break


def call(key, model, prompt, max_tokens):
    other = anthropic.Anthropic(base_url=URL, api_key=key, max_retries=0)
    other.messages.create(model=model, messages=user(prompt), max_tokens=max_tokens, timeout=50)


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
