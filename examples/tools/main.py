"""Let the model call a function, and answer with its result."""

from __future__ import annotations

import json
import os

from openai import OpenAI

MODEL = "smollm2-135m"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def get_weather(city: str) -> str:
    """Return the weather of a city. A real program would call a service here."""
    return f"18 degrees and sunny in {city}"


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ["MILLRACE_API_KEY"])
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
    )
    call = first.choices[0].message.tool_calls[0]
    result = get_weather(**json.loads(call.function.arguments))  # valid under the schema
    print("tool:", call.function.name, "->", result)
    messages += [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
    print("answer:", second.choices[0].message.content)


if __name__ == "__main__":
    main()
