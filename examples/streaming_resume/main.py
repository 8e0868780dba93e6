"""Read a stream, lose the connection, and read the rest without gaps or repeats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import httpx2  # installed with openai

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
HEADERS = {"authorization": f"Bearer {os.environ['MILLRACE_API_KEY']}"}
BODY = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 40,
    "stream": True,
}


def read_events(response: httpx2.Response) -> Iterator[tuple[str, str]]:
    """Yield the ID and the text of each event."""
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            choices = json.loads(line.removeprefix("data: "))["choices"]
            yield event_id, (choices[0]["delta"].get("content") or "") if choices else ""


def main() -> None:
    """Run the example."""
    last = ""
    with httpx2.Client(timeout=60) as client:
        # With this header, the request continues for 30 seconds without a reader.
        headers = HEADERS | {"x-millrace-resume": "1"}
        with client.stream("POST", f"{URL}/v1/chat/completions", json=BODY, headers=headers) as response:
            response.raise_for_status()
            request_id = response.headers["x-request-id"]
            for number, (event_id, text) in enumerate(read_events(response)):
                print(text, end="", flush=True)
                last = event_id
                if number == 5:
                    break  # the connection is closed here
        print(" [connection lost] ", end="")
        headers = HEADERS | {"last-event-id": last}
        with client.stream("GET", f"{URL}/v1/streams/{request_id}", headers=headers) as response:
            response.raise_for_status()
            for _, text in read_events(response):
                print(text, end="", flush=True)
    print("\n[complete]")


if __name__ == "__main__":
    main()
