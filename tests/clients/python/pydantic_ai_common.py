"""The features of Pydantic AI with any of its models."""

from features import *
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput


class City(BaseModel):
    """A city."""

    name: str
    population: int


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def chat_features(make):
    """Return the features of the models that `make` returns. It takes a model's name and a key."""

    def plain():
        result = Agent(make(MODEL)).run_sync(HELLO, model_settings={"max_tokens": 16})
        assert result.output
        assert result.usage.output_tokens > 1

    async def stream():
        async with Agent(make(MODEL)).run_stream(HELLO, model_settings={"max_tokens": 16}) as result:
            text = "".join([delta async for delta in result.stream_text(delta=True)])
            assert text
            assert result.usage.output_tokens > 1

    async def tools():
        agent = Agent(make(SCRIPTED), tools=[get_weather])
        async with agent.run_stream(script("weather")) as result:
            assert await result.get_output() == "It is sunny in Paris."

    def parallel():
        result = Agent(make(SCRIPTED), tools=[get_weather]).run_sync(script("parallel"))
        calls = [p for m in result.all_messages() for p in m.parts if p.part_kind == "tool-call"]
        assert [(call.tool_name, call.args_as_dict()) for call in calls] == CALLS
        assert result.output == "It is sunny in Paris and in Rome."

    def reasoning():
        result = Agent(make(SCRIPTED)).run_sync(script("reasoning"))
        thoughts = [p.content for p in result.all_messages()[-1].parts if p.part_kind == "thinking"]
        assert (*thoughts, result.output) == REASONING

    def structured():
        outputs = {"city": NativeOutput(City), "final_result": ToolOutput(City)}
        for name, output in outputs.items():
            assert Agent(make(SCRIPTED), output_type=output).run_sync(script(name)).output.model_dump() == CITY

    async def abort():
        async with Agent(make(SCRIPTED)).run_stream(script("long"), model_settings={"max_tokens": 4000}) as result:
            number = 0
            async for _ in result.stream_text(delta=True, debounce_by=None):
                number += 1
                if number == 5:
                    break
            await result.cancel()

    def call(key, model, prompt, max_tokens):
        Agent(make(model, key)).run_sync(prompt, model_settings={"max_tokens": max_tokens, "timeout": 50})

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
