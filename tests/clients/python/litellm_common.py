"""LiteLLM's features with any of its providers."""

import json

import litellm
from features import *
from pydantic import BaseModel

litellm.suppress_debug_info = True
litellm.telemetry = False
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Return the weather.", "parameters": PARAMETERS},
}


class City(BaseModel):
    name: str
    population: int


def chat_features(provider, base, city="city"):
    """Return the features of a provider of LiteLLM. `city` is the script for structured output."""

    def ask(prompt, model=SCRIPTED, key=KEY, complete=litellm.completion, **options):
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        options |= {"api_base": base, "api_key": key, "num_retries": 0, "max_retries": 0, "timeout": 50}
        return complete(model=f"{provider}/{model}", messages=messages, **options)

    def streamed(prompt, **options):
        chunks = list(ask(prompt, stream=True, stream_options={"include_usage": True}, **options))
        return litellm.stream_chunk_builder(chunks)

    def calls_of(answer):
        calls = answer.choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]

    def plain():
        answer = ask(HELLO, model=MODEL, max_tokens=8)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 8

    def stream():
        answer = streamed(HELLO, model=MODEL, max_tokens=8)
        assert answer.choices[0].message.content
        usage = ask(HELLO, model=MODEL, max_tokens=8).usage
        counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        assert counts == (usage.prompt_tokens, usage.completion_tokens)

    def tools():
        messages = [{"role": "user", "content": script("weather")}]
        answer = streamed(messages, tools=[TOOL])
        assert calls_of(answer) == CALLS[:1]
        message = answer.choices[0].message
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
        assert ask(messages, tools=[TOOL]).choices[0].message.content == "It is sunny in Paris."

    def parallel():
        for answer in (ask(script("parallel"), tools=[TOOL]), streamed(script("parallel"), tools=[TOOL])):
            assert calls_of(answer) == CALLS

    def reasoning():
        answers = (ask(script("reasoning")), streamed(script("reasoning")))
        for message in (answer.choices[0].message for answer in answers):
            assert (message.reasoning_content, message.content) == REASONING

    def structured():
        answer = ask(script(city), response_format=City)
        assert json.loads(answer.choices[0].message.content) == CITY

    async def abort():
        chunks = await ask(script("long"), complete=litellm.acompletion, stream=True, max_tokens=4000)
        number = 0
        async for _ in chunks:
            number += 1
            if number == 5:
                break
        await chunks.aclose()

    def call(key, model, prompt, max_tokens):
        ask(prompt, key=key, model=model, max_tokens=max_tokens)

    return {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel tools": parallel,
        "structured output": structured,
        "reasoning": reasoning,
        **errors(call),
        "abort": abort,
    }
