"""CrewAI with its provider for OpenAI."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent
from crewai.tools import tool
from features import *
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool("get_weather")
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def make(model=SCRIPTED, key=KEY, **options):
    return LLM(model=f"openai/{model}", base_url=OPENAI_URL, api_key=key, max_retries=0, **options)


def plain():
    assert make(MODEL, max_tokens=8).call(HELLO)


def stream():
    llm = make(MODEL, max_tokens=8, stream=True)
    assert llm.call(HELLO)
    assert llm.get_token_usage_summary().completion_tokens == 8


def tools():
    agent = Agent(role="guide", goal="answer", backstory="-", llm=make(), tools=[get_weather])
    assert "It is sunny in Paris." in agent.kickoff(script("weather")).raw


def parallel():
    agent = Agent(role="guide", goal="answer", backstory="-", llm=make(), tools=[get_weather])
    assert "It is sunny in Paris and in Rome." in agent.kickoff(script("parallel")).raw


def structured():
    answer = make(response_format=City).call(script("city"))
    city = answer if isinstance(answer, City) else City.model_validate_json(answer)
    assert city.model_dump() == CITY


def call(key, model, prompt, max_tokens):
    make(model, key, max_tokens=max_tokens).call(prompt)


run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel tools": parallel,
        "structured output": structured,
        **errors(call),
    }
)
