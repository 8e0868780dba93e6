"""Extract a record from a text. The output follows a JSON schema."""

from __future__ import annotations

import json
import os

from openai import OpenAI

TEXT = "Ada Lovelace was born in London in 1815 and wrote the first program."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "birth_year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "field": {"enum": ["mathematics", "physics", "literature"]},
    },
    "required": ["name", "birth_year", "field"],
    "additionalProperties": False,
}


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ["MILLRACE_API_KEY"])
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": f"Extract the person as JSON. {TEXT}"}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}},
        max_tokens=120,
    )
    choice = answer.choices[0]
    if choice.finish_reason != "stop":
        raise SystemExit("The completion was truncated: increase max_tokens.")
    print(json.loads(choice.message.content))


if __name__ == "__main__":
    main()
