"""The openai SDK with chat completions."""

import json

import openai
from features import *
from pydantic import BaseModel

client = openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}


class City(BaseModel):
    name: str
    population: int


def plain():
    answer = client.chat.completions.create(model=MODEL, messages=user(HELLO), max_completion_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def user(text):
    return [{"role": "user", "content": text}]


def stream():
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(model=SCRIPTED, messages=user(script("plain")), **options) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content
    assert final.usage.completion_tokens > 1


def tools():
    messages = user(script("weather"))
    with client.chat.completions.stream(model=SCRIPTED, messages=messages, tools=[TOOL]) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == CALLS[0]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "It is sunny in Paris."


def parallel():
    messages = user(script("parallel"))
    with client.chat.completions.stream(model=SCRIPTED, messages=messages, tools=[TOOL]) as events:
        streamed = events.get_final_completion().choices[0].message
    whole = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL]).choices[0].message
    for message in (streamed, whole):
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == CALLS
        assert message.content == "Two calls."
        assert len({c.id for c in message.tool_calls}) == 2


def reasoning():
    messages = user(script("reasoning"))
    whole = client.chat.completions.create(model=SCRIPTED, messages=messages)
    with client.chat.completions.stream(model=SCRIPTED, messages=messages) as events:
        deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk" and event.chunk.choices]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == REASONING
    assert streamed == REASONING[0]
    assert whole.usage.completion_tokens_details.reasoning_tokens > 1
    messages += [message, *user(script("plain"))]  # the answer can be sent back
    assert client.chat.completions.create(model=SCRIPTED, messages=messages).choices[0].message.content


def structured():
    answer = client.chat.completions.parse(model=SCRIPTED, messages=user(script("city")), response_format=City)
    assert answer.choices[0].message.parsed.model_dump() == CITY


def embeddings():
    answer = client.embeddings.create(model=EMBEDDING_MODEL, input=["one", "two"])
    assert [len(each.embedding) for each in answer.data] == [384, 384]


def abort():
    with client.chat.completions.create(model=SCRIPTED, messages=user(script("long")), stream=True) as chunks:
        for number, _ in enumerate(chunks):
            if number == 5:
                break


def call(key, model, prompt, max_tokens):
    other = openai.OpenAI(base_url=OPENAI_URL, api_key=key, max_retries=0)
    other.chat.completions.create(model=model, messages=user(prompt), max_tokens=max_tokens)


run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel tools": parallel,
        "structured output": structured,
        "reasoning": reasoning,
        "embeddings": embeddings,
        **errors(call),
        "abort": abort,
    }
)
