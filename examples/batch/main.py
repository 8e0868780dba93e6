"""Run a file of requests in the background, at the prices of the tier `batch`."""

from __future__ import annotations

import io
import json
import os
import time

from openai import OpenAI

ENDED = ("completed", "failed", "expired", "cancelled")
CITIES = ("Paris", "Rome", "Oslo")


def request_line(city: str) -> str:
    """Return a line of the file."""
    messages = [{"role": "user", "content": f"Name one sight of {city}."}]
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 20}
    return json.dumps({"custom_id": city, "method": "POST", "url": "/v1/chat/completions", "body": body})


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ["MILLRACE_API_KEY"])
    lines = "\n".join(request_line(city) for city in CITIES)
    file = client.files.create(file=("cities.jsonl", io.BytesIO(lines.encode())), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ENDED:
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], "->", answer["response"]["body"]["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
